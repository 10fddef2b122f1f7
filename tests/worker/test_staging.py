"""A prefill pass finds its rows in place or in the staging blocks, each host row loaded once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import InvariantError
from hisparse.kernels.contract import BlockTables
from hisparse.protocol import DeviceBlockId
from hisparse.worker.staging import StagingArea

BLOCK_SIZE = 4
STAGING = (DeviceBlockId(9), DeviceBlockId(3))
STAGING_ROWS = [36, 37, 38, 39, 12, 13, 14, 15]


def tables(resident: list[list[int]], host: list[list[int]]) -> BlockTables:
    def table(entries: list[list[int]]) -> torch.Tensor:
        return torch.tensor(entries, dtype=torch.int32)

    return BlockTables(table(resident), table(host), table([[0, 0]] * len(host)))


@pytest.fixture
def area() -> StagingArea:
    return StagingArea(STAGING, BLOCK_SIZE)


MIXED = tables(resident=[[7, 0, 0], [0, 5, 0]], host=[[0, 8, 0], [2, 0, 0]])


def test_resident_rows_are_read_in_place_and_host_rows_from_the_staging_blocks(area: StagingArea) -> None:
    plan = area.plan(torch.tensor([[1, 5, 6], [0, 4, 7]]), torch.tensor([0, 1]), MIXED)
    assert plan.host_row.tolist() == [8, 33, 34]
    assert plan.slab_row.tolist() == [36, 37, 38]
    assert plan.rows.tolist() == [[29, 37, 38], [36, 20, 23]]
    assert plan.rows.dtype == torch.int32
    assert (plan.num_resident, plan.num_loaded, plan.num_shared, plan.num_unreachable) == (3, 3, 0, 0)


def test_a_host_row_that_several_rows_select_is_loaded_once(area: StagingArea) -> None:
    plan = area.plan(torch.tensor([[5, 6], [6, 5], [5, 5]]), torch.tensor([0, 0, 0]), MIXED)
    assert plan.host_row.tolist() == [33, 34]
    assert plan.rows.tolist() == [[36, 37], [37, 36], [36, 36]]
    assert (plan.num_loaded, plan.num_shared) == (2, 4)


def test_a_page_that_two_requests_share_on_the_host_is_loaded_once(area: StagingArea) -> None:
    shared = tables(resident=[[0], [0]], host=[[8], [8]])
    plan = area.plan(torch.tensor([[1], [1]]), torch.tensor([0, 1]), shared)
    assert plan.host_row.tolist() == [33]
    assert plan.rows.tolist() == [[36], [36]]


def test_a_page_in_both_places_is_read_on_the_device(area: StagingArea) -> None:
    plan = area.plan(torch.tensor([[2]]), torch.tensor([0]), tables(resident=[[6]], host=[[8]]))
    assert plan.rows.tolist() == [[26]]
    assert plan.num_loaded == 0


def test_what_is_nowhere_gives_minus_one_and_is_counted_but_padding_is_not(area: StagingArea) -> None:
    positions = torch.tensor([[8, -1, 400], [0, 1, 2]])
    plan = area.plan(positions, torch.tensor([0, -1]), MIXED)
    assert plan.rows.tolist() == [[-1, -1, -1], [-1, -1, -1]]
    assert (plan.num_unreachable, plan.num_resident, plan.num_loaded) == (2, 0, 0)


def test_a_pass_that_fills_the_staging_blocks_fits_and_one_row_more_is_refused(area: StagingArea) -> None:
    wide = tables(resident=[[0, 0, 0]], host=[[4, 2, 6]])
    plan = area.plan(torch.arange(8)[None], torch.tensor([0]), wide)
    assert plan.slab_row.tolist() == STAGING_ROWS
    with pytest.raises(InvariantError, match="selects 9 rows on the host; the staging blocks hold 8"):
        area.plan(torch.arange(9)[None], torch.tensor([0]), wide)


@pytest.mark.parametrize("seed", range(20))
def test_a_pass_takes_every_row_up_to_the_one_that_would_overflow(area: StagingArea, seed: int) -> None:
    wide = tables(resident=[[0, 0, 9, 0, 0, 0]], host=[[4, 2, 0, 6, 5, 1]])
    positions = torch.randint(-1, 24, (20, 5), generator=torch.Generator().manual_seed(seed))
    distinct: set[int] = set()
    fitting = 0
    for row in positions.tolist():
        distinct |= {position for position in row if position >= 0 and not 8 <= position < 12}
        if len(distinct) > len(STAGING_ROWS):
            break
        fitting += 1
    plan = area.plan(positions, torch.zeros(20, dtype=torch.int64), wide)
    assert plan.rows.shape[0] == fitting < 20
    assert plan.num_loaded <= len(STAGING_ROWS)


@pytest.mark.parametrize("blocks", [(), (0, 3), (3, 3)])
def test_a_lease_without_blocks_of_its_own_is_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(InvariantError, match="no staging lease"):
        StagingArea(tuple(map(DeviceBlockId, blocks)), BLOCK_SIZE)


@given(
    positions=st.lists(st.lists(st.integers(-1, 15), min_size=2, max_size=2), min_size=1, max_size=4),
    pages=st.lists(st.sampled_from(["resident", "host", "nowhere"]), min_size=6, max_size=6),
    slots=st.lists(st.integers(-1, 1), min_size=4, max_size=4),
)
def test_a_pass_agrees_with_one_that_looks_up_each_position_alone(
    positions: list[list[int]], pages: list[str], slots: list[int]
) -> None:
    area = StagingArea(STAGING, BLOCK_SIZE)
    blocks = [21, 14, 17, 10, 25, 11]
    entries = {
        place: [[blocks[3 * slot + page] * (pages[3 * slot + page] == place) for page in range(3)] for slot in (0, 1)]
        for place in ("resident", "host")
    }
    given_tables = tables(entries["resident"], entries["host"])
    slots = slots[: len(positions)]
    plan = area.plan(torch.tensor(positions), torch.tensor(slots), given_tables)
    loads = dict(zip(plan.slab_row.tolist(), plan.host_row.tolist(), strict=True))
    assert plan.host_row.tolist() == sorted(set(plan.host_row.tolist()))
    assert set(loads) <= set(STAGING_ROWS)
    seen = []
    for row, (slot, selected) in enumerate(zip(slots, positions, strict=True)):
        for column, position in enumerate(selected):
            got = int(plan.rows[row, column])
            place = (
                "padding"
                if min(slot, position) < 0
                else "nowhere"
                if position >= 12
                else pages[3 * slot + position // 4]
            )
            seen.append(place)
            physical = blocks[3 * max(slot, 0) + position // 4 % 3] * 4 + position % 4
            if place == "resident":
                assert got == physical
            elif place == "host":
                assert loads[got] == physical
            else:
                assert got == -1
    assert plan.num_resident == seen.count("resident")
    assert plan.num_loaded + plan.num_shared == seen.count("host")
    assert plan.num_unreachable == seen.count("nowhere")
