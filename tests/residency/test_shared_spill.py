"""Pages that several requests share: what leaves, for whom, and what comes free."""

from array import array

import pytest

from hisparse.config import WriteBack
from hisparse.errors import InvariantError
from hisparse.protocol import DeviceBlockId, HostBlockId
from hisparse.residency import Arrival, PageState
from tests.residency.world import BLOCK_SIZE, HOT_BLOCKS, World

RESIDENT, SPILLING, HOST = PageState.RESIDENT, PageState.SPILLING, PageState.HOST
PREFIX = 8


def join(world: World, request_id: str, slot: int, tokens: "array[int]", may_spill: bool = True) -> "array[int]":
    """A request that adopts what there is of the text and has computed nothing itself."""
    tokens = array("i", [*tokens, 9])
    hit = world.coordinator.find_prefix(world.coordinator.prefix_keys(tokens))
    world.kv.add(request_id, slot)
    world.coordinator.add(request_id, slot, tokens, may_spill)
    world.coordinator.adopt_prefix(request_id, hit)
    world.coordinator.assert_invariants()
    return tokens


def go_on(world: World, request_id: str, tokens: "array[int]", num_pages: int, seed: int) -> None:
    """Compute pages of its own, from the last token of the text on."""
    tokens[-1:] = array("i", [seed * 1000 + at for at in range(num_pages * BLOCK_SIZE)])
    assert world.kv.grow(request_id, len(tokens) // BLOCK_SIZE).granted
    world.coordinator.seal(request_id, len(tokens))
    world.coordinator.assert_invariants()


def sharers(num_own: int = 0, num_pages: int = PREFIX, device_blocks: int = 24) -> World:
    """Requests a and b with the same beginning in the same blocks, and `num_own` pages each behind it."""
    world = World(device_blocks=device_blocks)
    tokens = world.start("a", 0, num_pages)
    beside = join(world, "b", 1, tokens)
    if num_own:
        tokens.append(9)
        go_on(world, "a", tokens, num_own, seed=1)
        go_on(world, "b", beside, num_own, seed=2)
    world.log.drain()
    return world


def back_both(world: World) -> None:
    """Both hold hot leases, as if they read from the host."""
    for request_id in ("a", "b"):
        assert world.kv.take_hot(request_id).granted


def test_a_shared_block_counts_once() -> None:
    world = sharers()
    assert world.kv.slab.offers == {0b11: PREFIX}
    assert world.coordinator.num_reclaimable() == PREFIX - 2 * HOT_BLOCKS
    world.coordinator.remove("b")
    assert world.coordinator.num_reclaimable() == PREFIX - HOT_BLOCKS


def test_a_shared_page_leaves_for_all_with_one_copy_and_frees_its_block() -> None:
    world = sharers()
    back_both(world)
    free = world.kv.slab.num_free
    assert world.coordinator.reclaim(3) == 3
    (transfer,) = world.take()
    assert len(transfer.copies) == 3
    for request_id in ("a", "b"):
        assert world.states(request_id) == [SPILLING] * 3 + [RESIDENT] * (PREFIX - 3)
    assert world.kv.slab.num_free == free
    world.coordinator.assert_invariants()

    world.report(enqueued=[transfer])
    assert world.kv.slab.num_free == free + 3
    for request_id in ("a", "b"):
        assert world.states(request_id) == [HOST] * 3 + [RESIDENT] * (PREFIX - 3)
        assert world.coordinator.pages(request_id).host[:3].tolist() == [copy.host_block for copy in transfer.copies]
    assert world.coordinator.host_pool.leases(transfer.copies[0].host_block) == 3

    world.report(completed=[transfer])
    assert world.coordinator.host_pool.leases(transfer.copies[0].host_block) == 2
    assert world.coordinator.host_pool.num_leased == 3
    totals = world.coordinator.totals
    assert (totals.spills, totals.shared_spills) == (6, 3), "one of two pages needed no copy of its own"


def test_both_need_a_hot_lease_once_what_they_share_left() -> None:
    world = sharers()
    assert world.coordinator.reclaim(1) == 1 + 2 * HOT_BLOCKS
    assert sorted(world.coordinator.take_newly_backed()) == ["a", "b"]


def test_what_a_request_has_alone_leaves_before_what_it_shares() -> None:
    world = sharers(num_own=3)
    back_both(world)
    assert world.coordinator.reclaim(6) == 6
    for request_id in ("a", "b"):
        assert world.states(request_id) == [RESIDENT] * PREFIX + [SPILLING] * 3
    world.take()
    assert world.coordinator.reclaim(7) == 7
    assert world.states("a")[0] is world.states("b")[0] is SPILLING


def test_pages_whose_hot_leases_would_take_more_than_they_give_stay() -> None:
    world = sharers(num_own=1, num_pages=2 * HOT_BLOCKS - 2)
    assert world.coordinator.reclaim(1) == 0
    assert world.coordinator.num_reclaimable() == 0
    assert world.take() == ()
    world.coordinator.remove("b")
    assert world.coordinator.reclaim(1) == 1 + HOT_BLOCKS, "who is alone has only its own hot lease to pay for"


def test_a_request_that_stays_whole_keeps_what_others_share_with_it() -> None:
    world = World(device_blocks=24)
    tokens = world.start("a", 0, PREFIX)
    join(world, "small", 1, tokens[: 2 * BLOCK_SIZE], may_spill=False)
    world.kv.take_hot("a")
    assert world.coordinator.num_reclaimable() == PREFIX - 2
    assert world.coordinator.reclaim(PREFIX) == PREFIX - 2
    assert world.states("a")[:3] == [RESIDENT, RESIDENT, SPILLING]
    world.report(*2 * [world.take()])
    world.coordinator.remove("small")
    assert world.coordinator.reclaim(PREFIX) == 2


def test_a_block_that_a_copy_to_below_reads_does_not_come_free_and_does_not_count() -> None:
    world = sharers()
    back_both(world)
    pin = world.coordinator.arrivals.pin((DeviceBlockId(world.kv.resident.blocks("a")[0]),), ())
    assert world.coordinator.num_reclaimable() == PREFIX - 1
    assert world.coordinator.reclaim(PREFIX) == PREFIX - 1
    assert world.states("a")[0] is RESIDENT
    world.coordinator.arrivals.unpin(pin)
    world.coordinator.assert_invariants()
    assert world.coordinator.reclaim(PREFIX) == PREFIX


@pytest.mark.parametrize("when", ["begun", "enqueued"])
def test_a_sharer_that_goes_with_the_copy_in_flight_changes_nothing_for_the_other(when: str) -> None:
    world = sharers()
    back_both(world)
    world.coordinator.reclaim(3)
    (transfer,) = world.take()
    free = world.kv.slab.num_free
    if when == "enqueued":
        world.report(enqueued=[transfer])
        free += 3
    assert world.coordinator.blocks_on_their_way == (3 if when == "begun" else 0)
    world.coordinator.remove("a")
    world.coordinator.assert_invariants()
    assert world.kv.slab.num_free == free + HOT_BLOCKS
    if when == "begun":
        assert world.coordinator.blocks_on_their_way == 3
        world.report(enqueued=[transfer])
    world.report(completed=[transfer])
    assert world.states("b") == [HOST] * 3 + [RESIDENT] * (PREFIX - 3)
    assert world.coordinator.host_pool.num_leased == 3
    world.coordinator.remove("b")
    world.coordinator.assert_invariants()
    assert world.coordinator.host_pool.num_leased == 0


def test_a_request_that_adopts_a_page_on_its_way_out_keeps_the_block() -> None:
    world = sharers()
    back_both(world)
    world.coordinator.reclaim(3)
    (transfer,) = world.take()
    join(world, "c", 2, world.coordinator.pages("a").tokens)
    assert world.coordinator.blocks_on_their_way == 0
    free = world.kv.slab.num_free
    world.report(enqueued=[transfer])
    assert world.kv.slab.num_free == free
    assert world.states("a")[0] is HOST
    assert world.states("c")[0] is RESIDENT
    world.report(completed=[transfer])
    world.kv.take_hot("c")
    host_free = world.coordinator.host_pool.num_free
    assert world.coordinator.reclaim(3) == 3
    assert world.take() == (), "the host has them already"
    assert world.states("c")[:4] == [HOST, HOST, HOST, RESIDENT]
    assert world.coordinator.host_pool.num_free == host_free
    assert world.kv.slab.num_free == free - HOT_BLOCKS + 3


def test_pages_that_the_host_holds_already_leave_for_all_sharers_without_a_copy() -> None:
    world = World(device_blocks=24)
    tokens = world.start("a", 0, PREFIX)
    world.spill("a", PREFIX)
    world.coordinator.remove("a")
    for slot, name in enumerate("bc"):
        join(world, name, slot, tokens)
        world.kv.take_hot(name)
    assert world.states("b") == world.states("c") == [RESIDENT] * PREFIX
    assert world.coordinator.reclaim(PREFIX) == PREFIX
    world.coordinator.assert_invariants()
    assert world.take() == ()
    assert world.states("b") == world.states("c") == [HOST] * PREFIX
    assert list(world.coordinator.pages("b").host) == list(world.coordinator.pages("c").host)
    world.coordinator.assert_invariants()


def test_eager_write_back_leaves_what_is_shared_where_it_is() -> None:
    world = World(device_blocks=24, write_back=WriteBack.EAGER)
    tokens = world.start("a", 0, PREFIX, may_spill=False)
    beside = join(world, "b", 1, tokens)
    go_on(world, "b", beside, 2, seed=1)
    assert world.states("b") == [RESIDENT] * PREFIX + [SPILLING] * 2


def test_what_came_after_the_pools_had_to_forget_is_for_its_request_alone() -> None:
    """Not when it comes, nor when it goes to the host, nor when it comes back from there."""
    world = World()
    tokens = array("i", range(5 * BLOCK_SIZE + 1))
    world.kv.add("n", 3)
    world.coordinator.add("n", 3, tokens)
    keys = world.coordinator.prefix_keys(tokens)
    arrival = world.coordinator.arrivals.reserve("n", keys, 0, on_host=True)
    assert isinstance(arrival, Arrival)
    world.coordinator.forget_content()
    world.coordinator.commit_arrival("n", arrival)

    def assert_not_found() -> None:
        world.coordinator.assert_invariants()
        for pool in (world.kv.slab, world.kv.index_pool, world.coordinator.host_pool):
            assert not any(pool.lookup_all(keys)), pool.name

    assert_not_found()
    world.spill("n", 4)
    assert_not_found()
    world.lose_device_copies()
    assert world.coordinator.restore("n", 4) == 4
    transfers = world.take()
    world.report(transfers, transfers)
    assert_not_found()
    assert world.states("n") == [RESIDENT] * 5
    # What is computed from now on is found, and so is what somebody computes anew.
    world.start("m", 1, num_pages=5)
    assert all(world.kv.slab.lookup_all(keys))
    world.spill("n", 2)
    assert not any(world.coordinator.host_pool.lookup_all(keys))
    world.spill("m", 3)
    assert all(world.coordinator.host_pool.lookup_all(keys[:3]))


def test_what_a_request_had_when_the_pools_had_to_forget_is_not_found_once_it_is_on_the_host() -> None:
    world = World()
    tokens = world.start("a", 0, num_pages=4)
    world.coordinator.forget_content()
    world.spill("a", 3)
    assert not any(world.coordinator.host_pool.lookup_all(world.coordinator.prefix_keys(tokens)))
    control = World()
    tokens = control.start("a", 0, num_pages=4)
    control.spill("a", 3)
    assert all(control.coordinator.host_pool.lookup_all(control.coordinator.prefix_keys(tokens)))


@pytest.mark.parametrize("damage", ["owner", "host lease", "holder", "price"])
def test_damage_is_found_by_the_invariants(damage: str) -> None:
    world = sharers()
    back_both(world)
    world.coordinator.reclaim(2)
    (transfer,) = world.take()
    world.coordinator.assert_invariants()
    if damage == "owner":
        del world.coordinator.pages("b").in_flight[1]
    elif damage == "host lease":
        world.coordinator.host_pool.release([HostBlockId(transfer.copies[0].host_block)])
    elif damage == "price":
        world.kv.slab.price(world.coordinator.pages("b").holder)
    else:
        block = DeviceBlockId(world.kv.resident.blocks("a")[5])
        world.kv.slab.withdraw([block], world.coordinator.pages("b").holder)
    with pytest.raises(InvariantError, match=r"page 1 of request b|host block|offer leases|need hot leases"):
        world.coordinator.assert_invariants()
