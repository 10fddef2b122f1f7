"""Worker tables hold what the scheduler's updates say, and rows are only given where there is a block."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.config import CachePlan
from hisparse.errors import InvariantError, ProtocolError
from hisparse.protocol import Table, TableUpdate
from hisparse.worker import WorkerTables
from tests.worker.world import make_plan


def test_tables_start_null_and_are_as_wide_as_the_plan_says(plan: CachePlan) -> None:
    tables = WorkerTables(plan)
    for table in Table:
        width = plan.hot_blocks if table is Table.HOT else plan.max_pages
        assert tables[table].shape == (plan.config.max_running, width)
        assert tables[table].dtype == torch.int32
        assert int(tables[table].count_nonzero()) == 0


def test_an_update_overwrites_its_run_and_nothing_else(plan: CachePlan) -> None:
    tables = WorkerTables(plan)
    tables.apply((), [TableUpdate(Table.HOST, 1, 3, (7, 8, 9))])
    expected = torch.zeros_like(tables[Table.HOST])
    expected[1, 3:6] = torch.tensor([7, 8, 9])
    assert torch.equal(tables[Table.HOST], expected)
    assert int(tables[Table.RESIDENT].count_nonzero()) == 0


def test_resolvers_see_updates_through_the_tables_they_were_given(plan: CachePlan) -> None:
    tables = WorkerTables(plan)
    given_out = tables.block_tables()
    tables.apply((), [TableUpdate(Table.RESIDENT, 0, 0, (5,)), TableUpdate(Table.HOT, 2, 0, (6, 7))])
    assert int(given_out.resident[0, 0]) == 5
    assert given_out.hot[2].tolist() == [6, 7]


def test_a_slot_that_is_lent_again_in_the_step_of_its_reset_keeps_the_new_pages_only(plan: CachePlan) -> None:
    tables = WorkerTables(plan)
    tables.apply((), [TableUpdate(table, 1, 0, (3, 4)) for table in Table])
    tables.apply((1,), [TableUpdate(Table.RESIDENT, 1, 0, (9,))])
    assert tables[Table.RESIDENT][1].tolist() == [9] + [0] * (plan.max_pages - 1)
    assert all(int(tables[table][1].count_nonzero()) == 0 for table in Table if table is not Table.RESIDENT)


def test_slots_whose_hot_lease_changed_are_told_of(plan: CachePlan) -> None:
    tables = WorkerTables(plan)
    assert tables.apply((2,), [TableUpdate(Table.HOT, 0, 0, (5, 6)), TableUpdate(Table.HOST, 1, 0, (4,))]) == (0, 2)
    assert tables.apply((), [TableUpdate(Table.RESIDENT, 0, 0, (5,))]) == ()


@pytest.mark.parametrize(
    ("resets", "update", "complaint"),
    [
        ((3,), TableUpdate(Table.HOST, 0, 0, (1,)), "reset names slot 3"),
        ((), TableUpdate(Table.HOST, -1, 0, (1,)), "host update names slot -1"),
        ((), TableUpdate(Table.HOST, 0, 15, (1, 2)), "host pages 15 to 17 of slot 0; there are 16"),
        ((), TableUpdate(Table.HOT, 1, -1, (1,)), "hot pages -1 to 0 of slot 1"),
        ((), TableUpdate(Table.RESIDENT, 2, 0, (1, 30)), "resident blocks 1 to 30 of slot 2; there are 30"),
        ((), TableUpdate(Table.INDEXER, 2, 0, (-1,)), "indexer blocks -1 to -1"),
    ],
)
def test_what_does_not_exist_is_a_protocol_error_and_changes_nothing(
    plan: CachePlan, resets: tuple[int, ...], update: TableUpdate, complaint: str
) -> None:
    tables = WorkerTables(plan)
    good = TableUpdate(Table.HOST, 0, 0, (5,))
    tables.apply((), [good])
    with pytest.raises(ProtocolError, match=complaint):
        tables.apply((0, *resets), [TableUpdate(Table.HOST, 0, 1, (6,)), update])
    assert tables[Table.HOST][0, :2].tolist() == [5, 0]


def test_rows_are_block_times_size_plus_place_in_the_page(plan: CachePlan) -> None:
    tables = WorkerTables(plan)
    tables.apply((), [TableUpdate(Table.RESIDENT, 1, 0, (9, 4)), TableUpdate(Table.INDEXER, 1, 1, (3,))])
    slots = torch.tensor([1, 1, 1])
    rows = tables.physical_rows(Table.RESIDENT, slots, torch.tensor([0, 7, 4]))
    assert rows.dtype == torch.int64
    assert rows.tolist() == [36, 19, 16]
    assert tables.physical_rows(Table.INDEXER, slots[:1], torch.tensor([6])).tolist() == [14]


@pytest.mark.parametrize(("slot", "position"), [(1, 8), (0, 0), (1, -1), (-1, 0), (3, 0), (1, 64)])
def test_a_position_without_a_block_is_named(plan: CachePlan, slot: int, position: int) -> None:
    tables = WorkerTables(plan)
    tables.apply((), [TableUpdate(Table.RESIDENT, 1, 0, (9, 4))])
    with pytest.raises(InvariantError, match=rf"slot {slot} has no resident block for position {position}$"):
        tables.physical_rows(Table.RESIDENT, torch.tensor([1, slot]), torch.tensor([0, position]))


@st.composite
def table_updates(draw: st.DrawFn) -> TableUpdate:
    table = draw(st.sampled_from(Table))
    width = 2 if table is Table.HOT else 16
    first = draw(st.integers(0, width - 1))
    blocks = draw(st.lists(st.integers(0, 16), max_size=width - first))
    return TableUpdate(table, draw(st.integers(0, 2)), first, tuple(blocks))


@given(
    commands=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=2), st.lists(table_updates(), max_size=6)), max_size=5
    )
)
def test_tables_agree_with_dicts_that_apply_one_entry_at_a_time(
    commands: list[tuple[list[int], list[TableUpdate]]],
) -> None:
    tables = WorkerTables(make_plan())
    naive: dict[tuple[Table, int, int], int] = {}
    for resets, updates in commands:
        tables.apply(resets, updates)
        naive = {key: block for key, block in naive.items() if key[1] not in resets}
        for update in updates:
            for index, block in enumerate(update.blocks):
                naive[update.table, update.slot, update.first_page + index] = block
        for table in Table:
            for slot, entries in enumerate(tables[table].tolist()):
                assert entries == [naive.get((table, slot, page), 0) for page in range(len(entries))]
        assert tables.any_leased == bool(tables[Table.HOT].any())
