"""What attention sees is the same bytes wherever rows are, for leaders, followers and prefill passes."""

import pytest
import torch

from hisparse.errors import InputError, InvariantError
from hisparse.geometry import RowFormat
from hisparse.kernels.contract import Selection
from hisparse.kernels.fp8_rows import pack_rows, unpack_rows
from hisparse.protocol import Table
from hisparse.worker import FollowerRuntime, LeaderRuntime
from tests.worker.late_side import LateBackend
from tests.worker.world import LEADER_OF, MakeWorld, World, make_plan


def spill_all_but_last(world: World, slot: int, num_pages: int) -> dict[int, int]:
    """A slot of `num_pages` pages, all on the host but the last. Returns {page: host block}."""
    blocks = world.admit(slot, num_pages)
    host = world.spill(slot, dict(enumerate(blocks[:-1])))
    world.step(updates=world.on_host(slot, host))
    return host


def select(slot: int, positions: list[int]) -> Selection:
    return Selection(torch.tensor([positions], dtype=torch.int32), torch.tensor([slot], dtype=torch.int32))


# Roles.


def test_leaders_hold_state_and_followers_have_no_place_for_any(world: World) -> None:
    for handle, leader in zip(world.worker.handles, LEADER_OF, strict=True):
        runtime = handle.runtime
        if handle.layer == leader:
            assert isinstance(runtime, LeaderRuntime)
        else:
            assert isinstance(runtime, FollowerRuntime)
            assert runtime.leader is world.worker.handles[leader].runtime
            assert not hasattr(runtime, "state")
            with pytest.raises(AttributeError):
                runtime.state = None  # type: ignore[attr-defined]


def test_a_follower_cannot_resolve_and_a_leader_follows_nobody(world: World) -> None:
    world.admit(0, 2)
    with pytest.raises(InvariantError, match="layer 1 follows layer 0 and cannot resolve"):
        world.worker.handles[1].resolve(select(0, [0, 1, 2, 3]))
    with pytest.raises(InvariantError, match="layer 2 is a leader"):
        world.worker.handles[2].load_followed()


# Decode.


def test_every_layer_decodes_its_own_bytes_from_device_and_host_alike(world: World) -> None:
    spill_all_but_last(world, slot=1, num_pages=5)
    world.admit(0, 3)
    world.assert_decodes(1, [0, 7, 9, 19])
    world.assert_decodes(1, [0, 7, 13, 18])
    world.assert_decodes(0, [2, 5, 8, -1])
    counters = world.worker.counters()
    leaders = len(set(LEADER_OF))
    assert counters["miss"] == 4 * leaders
    assert counters["hot"] == 2 * leaders
    assert counters["resident"] == (1 + 1 + 3) * leaders
    assert counters["unreachable"] == 0
    assert counters["bytes"] == 4 * len(LEADER_OF) * 48


def test_the_check_of_a_follower_s_bytes_fails_when_it_does_not_load(make_world: MakeWorld) -> None:
    world = make_world(LateBackend())
    spill_all_but_last(world, slot=1, num_pages=5)
    rows = world.worker.handles[0].resolve(select(1, [0, 7, 9, 19]))
    positions = torch.tensor([[0, 7, 9, 19]])
    follower = world.worker.handles[1]
    assert not torch.equal(follower.gather(rows), world.truth(1, positions, 1))
    follower.load_followed()
    assert torch.equal(follower.gather(rows), world.truth(1, positions, 1))


def test_loading_twice_for_one_resolve_copies_once(world: World) -> None:
    spill_all_but_last(world, slot=1, num_pages=5)
    world.decode(1, torch.tensor([0, 1, 2, 3]))
    moved = world.worker.counters()["bytes"]
    world.worker.handles[1].load_followed()
    assert world.worker.counters()["bytes"] == moved


def test_a_follower_that_misses_a_plan_says_so(world: World) -> None:
    spill_all_but_last(world, slot=1, num_pages=5)
    world.worker.handles[0].resolve(select(1, [0, 1, 2, 3]))
    with pytest.raises(InvariantError, match="layer 1 missed a plan of layer 0: it must load after each"):
        world.worker.handles[0].resolve(select(1, [4, 5, 6, 7]))


# Prefill.


def test_passes_over_host_pages_see_the_bytes_that_an_all_resident_run_sees(make_world: MakeWorld) -> None:
    staged, resident = make_world(seed=1), make_world(seed=2)
    spill_all_but_last(staged, slot=2, num_pages=7)
    resident.admit(2, 7)
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(-1, 28, (12, 4), generator=generator)
    slots = torch.full((12,), 2)
    for layer in range(len(LEADER_OF)):
        gathered = []
        for world in (staged, resident):
            handle, parts, start, passes = world.worker.handles[layer], [], 0, 0
            while start < len(positions):
                rows = handle.stage(positions[start:], slots[start:])
                parts.append(handle.gather(rows))
                start, passes = start + len(rows), passes + 1
            assert (passes > 1) == (world is staged), "host rows come in passes, resident rows all at once"
            gathered.append(torch.cat(parts))
        assert torch.equal(gathered[0], gathered[1])
        assert torch.equal(gathered[0], staged.expected(2, positions, layer))
    assert staged.worker.counters()["miss"] > 0
    assert resident.worker.counters()["miss"] == 0


def test_rows_of_a_pass_that_is_over_hold_other_bytes(world: World) -> None:
    spill_all_but_last(world, slot=0, num_pages=5)
    handle, slots = world.worker.handles[0], torch.tensor([0, 0])
    first, second = torch.arange(8).reshape(2, 4), torch.arange(8, 16).reshape(2, 4)
    rows = handle.stage(first, slots)
    handle.stage(second, slots)
    # The control of the test above: passes do share the staging blocks.
    assert not torch.equal(handle.gather(rows), world.truth(0, first, 0))
    assert torch.equal(handle.gather(rows).unique(), world.truth(0, second, 0).unique())


def test_staging_leaves_hot_rows_alone(world: World) -> None:
    spill_all_but_last(world, slot=0, num_pages=5)
    world.assert_decodes(0, [0, 5, 10, 15])
    for handle in world.worker.handles:
        handle.stage(torch.arange(8).reshape(2, 4), torch.tensor([0, 0]))
    missed = world.worker.counters()["miss"]
    world.assert_decodes(0, [0, 5, 10, 15])
    assert world.worker.counters()["miss"] == missed


def test_staged_rows_are_counted_once_for_leaders_and_their_bytes_for_every_layer(world: World) -> None:
    spill_all_but_last(world, slot=0, num_pages=3)
    for handle in world.worker.handles:
        handle.stage(torch.tensor([[0, 1, 9, 63], [1, 2, 9, -1]]), torch.tensor([0, 0]))
    counters = world.worker.counters()
    assert [counters[name] for name in ("resident", "hot", "miss", "unreachable")] == [4, 2, 6, 2]
    assert counters["bytes"] == 3 * 48 * len(LEADER_OF)


# Rows.


def test_values_of_another_type_are_refused(world: World) -> None:
    with pytest.raises(InvariantError, match=r"layer 0 stores torch\.float32 elements, not torch\.bfloat16"):
        world.worker.handles[0].write(torch.tensor([9]), torch.zeros(1, 24, dtype=torch.bfloat16))


def test_rows_that_are_not_there_gather_as_zeros(world: World) -> None:
    rows = torch.tensor([[-1, -1]], dtype=torch.int32)
    assert torch.equal(world.worker.handles[0].gather(rows), torch.zeros(1, 2, 12))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_rows_come_back_from_the_host_bit_for_bit(make_world: MakeWorld, name: str) -> None:
    world = make_world(plan=make_plan(RowFormat(name, 48)))
    dtype = getattr(torch, name)
    values = torch.randn(len(LEADER_OF), 4, 24).to(dtype)
    (block,) = world.admit_pages(0, 1)
    for handle in world.worker.handles:
        handle.write(block * 4 + torch.arange(4), values[handle.layer])
    host = world.spill(0, {0: block})
    world.step(updates=world.on_host(0, host))
    for layer, got in enumerate(world.decode(0, torch.arange(4))):
        assert torch.equal(got, values[layer])


@pytest.mark.parametrize("packed_before", [True, False], ids=["packed before", "packed on write"])
def test_packed_rows_come_back_from_the_host_bit_for_bit_and_are_read_as_numbers(
    make_world: MakeWorld, packed_before: bool
) -> None:
    world = make_world(plan=make_plan(RowFormat("fp8_ds_mla", 656)))
    values = torch.randn(len(LEADER_OF), 4, 576).bfloat16()
    packed = pack_rows(values.flatten(0, 1)).view(len(LEADER_OF), 4, 656)
    (block,) = world.admit_pages(0, 1)
    for handle in world.worker.handles:
        handle.write(block * 4 + torch.arange(4), (packed if packed_before else values)[handle.layer])
    host = world.spill(0, {0: block})
    world.step(updates=world.on_host(0, host))
    assert int(world.worker.tables[Table.RESIDENT][0, 0]) == 0
    rows = world.worker.handles[0].resolve(select(0, [0, 1, 2, 3]))
    world.worker.handles[1].load_followed()
    for handle in world.worker.handles[:2]:
        assert torch.equal(handle.runtime.views.slab.read(rows[0], torch.uint8), packed[handle.layer])
        assert torch.equal(handle.gather(rows)[0], unpack_rows(packed[handle.layer]))
        assert torch.equal(handle.gather(rows.new_full((1, 2), -1)), torch.zeros(1, 2, 576))
        assert handle.gather(rows[:0]).shape == (0, 4, 576)


def test_numbers_that_do_not_fit_packed_rows_are_refused(make_world: MakeWorld) -> None:
    handle = make_world(plan=make_plan(RowFormat("fp8_ds_mla", 656))).worker.handles[0]
    with pytest.raises(InputError, match="packs rows of 576 elements"):
        handle.write(torch.tensor([9]), torch.zeros(1, 575))
    with pytest.raises(InvariantError, match=r"stores torch\.uint8 elements, not torch\.int32"):
        handle.write(torch.tensor([9]), torch.zeros(1, 656, dtype=torch.int32))
    with pytest.raises(InvariantError, match="no place to write"):
        handle.write(torch.tensor([0]), torch.zeros(1, 576))
