"""The spill transaction, one acknowledgement at a time."""

import pytest

from hisparse.config import LEAST_HOST_BLOCKS, WriteBack
from hisparse.errors import InvariantError, ProtocolError
from hisparse.protocol import DeviceBlockId, Direction, SparseKVWorkerReport, Table, TransferId
from hisparse.residency import PageState
from hisparse.residency.page_states import TRANSITIONS, RequestPages
from tests.residency.world import BLOCK_SIZE, HOT_BLOCKS, World

RESIDENT, SPILLING, HOST = PageState.RESIDENT, PageState.SPILLING, PageState.HOST


def test_pages_move_along_the_diagram_only() -> None:
    for before in PageState:
        for after in PageState:
            pages = RequestPages("r", 0, tokens=None)  # type: ignore[arg-type]
            pages.extend(1)
            pages.state[0] = before
            if (before, after) in TRANSITIONS:
                pages.move(0, after)
            else:
                with pytest.raises(InvariantError, match=f"page 0 of request r cannot go from {before.name}"):
                    pages.move(0, after)
    assert {(RESIDENT, SPILLING), (SPILLING, HOST), (HOST, RESIDENT)} == TRANSITIONS


def test_a_spill_goes_begun_enqueued_completed() -> None:
    world = World()
    world.start("a", 2, num_pages=4)
    world.log.drain()
    free = world.kv.slab.num_free
    key = world.coordinator.pages("a").keys[0]

    assert world.coordinator.reclaim(1) == 1 + HOT_BLOCKS, "the pages pay for the hot lease that they make necessary"
    (transfer,) = world.take()
    assert transfer.direction is Direction.DEVICE_TO_HOST
    assert world.states("a") == [SPILLING] * 3 + [RESIDENT]
    assert world.kv.slab.num_free == free, "nothing is free before the copy is in the stream"
    assert world.table_writes(Table.RESIDENT) == []
    world.coordinator.assert_invariants()

    world.report(enqueued=[transfer])
    assert world.states("a") == [HOST] * 3 + [RESIDENT]
    assert world.kv.slab.num_free == free + 3
    assert world.coordinator.host_pool.lookup(key) is None, "enqueued is not valid"
    assert world.coordinator.host_pool.leases(transfer.copies[0].host_block) == 2

    world.report(completed=[transfer])
    assert world.coordinator.host_pool.lookup(key) == transfer.copies[0].host_block
    assert world.coordinator.host_pool.leases(transfer.copies[0].host_block) == 1
    assert world.coordinator.num_in_flight == 0


def test_workers_learn_of_a_hole_together_with_its_host_block() -> None:
    world = World()
    world.start("a", 2, num_pages=4)
    world.coordinator.reclaim(1)
    world.log.drain()
    (transfer,) = world.take()
    world.report(enqueued=[transfer])
    _, updates = world.log.drain()
    entries = {(update.table, update.first_page): update.blocks for update in updates}
    for page, copy in enumerate(transfer.copies):
        assert entries[(Table.RESIDENT, page)] == (0,)
        assert entries[(Table.HOST, page)] == (copy.host_block,)


def test_reclaim_asks_for_no_more_than_is_missing() -> None:
    world = World()
    world.start("a", 0, num_pages=4)
    world.coordinator.reclaim(1)
    world.take()
    assert world.coordinator.reclaim(2) == 3, "what is on its way counts"
    assert world.take() == ()


def test_requests_on_host_give_before_whole_ones() -> None:
    world = World(device_blocks=20)
    world.start("a", 0, num_pages=4, seed=1)
    world.start("b", 1, num_pages=6, seed=2)
    world.spill("b", 1)
    world.coordinator.reclaim(2)
    assert world.states("b")[:3] == [HOST, SPILLING, SPILLING]
    assert world.states("a") == [RESIDENT] * 4


def test_pages_that_are_not_full_stay() -> None:
    world = World()
    tokens = world.start("a", 0, num_pages=2)
    tokens.extend([7, 8, 9])
    assert world.kv.grow("a", 3).granted
    world.coordinator.seal("a", len(tokens))
    assert world.coordinator.reclaim(10) == 2
    assert world.kv.resident.blocks("a")[2] != 0


def test_small_requests_stay_whole() -> None:
    world = World(write_back=WriteBack.EAGER)
    world.start("a", 0, num_pages=3, may_spill=False)
    assert world.coordinator.reclaim(3) == 0
    assert world.take() == ()


def test_eager_write_back_does_not_wait_for_pressure() -> None:
    world = World(write_back=WriteBack.EAGER)
    world.start("a", 0, num_pages=3)
    (transfer,) = world.take()
    assert len(transfer.copies) == 3
    lazy = World()
    lazy.start("a", 0, num_pages=3)
    assert lazy.take() == ()


def test_pages_that_may_never_leave_do_not() -> None:
    world = World(write_back=WriteBack.NEVER)
    world.start("a", 0, num_pages=3)
    assert world.coordinator.num_reclaimable() == 0
    assert world.coordinator.reclaim(3) == 0
    assert world.take() == ()
    assert world.plan.num_host_blocks == LEAST_HOST_BLOCKS < World().plan.num_host_blocks
    lazy = World()
    lazy.start("a", 0, num_pages=3)
    assert lazy.coordinator.reclaim(3) == 3


def test_a_full_host_pool_ends_reclaiming() -> None:
    world = World(host_blocks=3)
    world.start("a", 0, num_pages=6)
    assert world.coordinator.reclaim(6) == 2
    assert world.coordinator.num_reclaimable() == 2
    world.report(*2 * [world.take()])
    assert world.coordinator.reclaim(6) == 0


def test_bytes_that_the_host_holds_already_are_not_copied_again() -> None:
    world = World(device_blocks=20)
    world.start("a", 0, num_pages=3)
    world.start("b", 1, num_pages=3)
    first = world.spill("a", 3)
    assert [len(transfer.copies) for transfer in first] == [3]
    assert world.spill("b", 3) == ()
    assert world.states("b") == [HOST] * 3
    assert list(world.coordinator.pages("b").host) == list(world.coordinator.pages("a").host)
    assert world.coordinator.totals.shared_spills == 3
    world.coordinator.remove("a")
    world.coordinator.assert_invariants()


def twin_that_leaves() -> World:
    """Request b has begun to leave the device, for pages that a brought to the host before."""
    world = World(device_blocks=20)
    world.start("a", 0, num_pages=3)
    world.start("b", 1, num_pages=3)
    world.spill("a", 3)
    world.log.drain()
    assert world.coordinator._spill(world.coordinator.pages("b").holder, 2) == 2
    return world


def test_a_page_that_leaves_without_a_copy_is_on_the_device_in_the_command_at_hand() -> None:
    """That command may decode the request without the hot lease which it takes for the next one."""
    world = twin_that_leaves()
    free = world.kv.slab.num_free
    assert world.coordinator.take_newly_backed() == ["a", "b"]
    assert world.states("b") == [SPILLING, SPILLING, RESIDENT]
    assert world.coordinator.blocks_on_their_way == 2
    assert world.table_writes(Table.RESIDENT) == []
    world.coordinator.assert_invariants()
    assert world.take() == ()
    assert world.states("b") == [HOST, HOST, RESIDENT]
    assert world.kv.slab.num_free == free + 2
    assert world.coordinator.blocks_on_their_way == 0
    assert world.table_writes(Table.RESIDENT) == [(1, 0, (0,)), (1, 1, (0,))]
    world.coordinator.assert_invariants()


def test_a_request_that_is_gone_before_its_pages_left_without_a_copy_takes_them_along() -> None:
    world = twin_that_leaves()
    world.coordinator.remove("b")
    world.coordinator.assert_invariants()
    assert world.take() == ()
    assert world.coordinator.blocks_on_their_way == 0
    assert world.states("a") == [HOST] * 3


@pytest.mark.parametrize("when", ["begun", "enqueued"])
def test_a_request_that_leaves_with_a_copy_in_flight_frees_nothing_under_it(when: str) -> None:
    world = World()
    world.start("a", 0, num_pages=4)
    world.coordinator.reclaim(2)
    (transfer,) = world.take()
    key = world.coordinator.pages("a").keys[0]
    if when == "enqueued":
        world.report(enqueued=[transfer])
    world.coordinator.remove("a")
    world.coordinator.assert_invariants()
    block = transfer.copies[0].device_block
    assert (world.kv.slab.leases(block) == 1) is (when == "begun")
    assert world.coordinator.host_pool.leases(transfer.copies[0].host_block) == 1
    assert world.coordinator.host_pool.lookup(key) is None
    if when == "begun":
        world.report(enqueued=[transfer])
        assert world.kv.slab.leases(block) == 0
    world.report(completed=[transfer])
    assert world.coordinator.host_pool.leases(transfer.copies[0].host_block) == 0
    assert world.coordinator.host_pool.lookup(key) is not None, "the page was full and computed, so it may be found"


def test_a_preempted_request_publishes_only_what_was_computed() -> None:
    world = World()
    tokens = world.start("a", 0, num_pages=2)
    tokens.extend(range(8))
    world.kv.grow("a", 4)
    keys = world.coordinator.prefix_keys(tokens + tokens[:1])
    world.coordinator.remove("a")
    hit = world.coordinator.find_prefix(keys)
    assert hit.num_pages == 2


def test_restore_brings_pages_back_and_keeps_the_host_copy_findable() -> None:
    world = World()
    world.start("a", 0, num_pages=4)
    world.spill("a", 3)
    world.lose_device_copies()
    assert world.coordinator.restore("a", 2) == 2
    (transfer,) = world.take()
    assert transfer.direction is Direction.HOST_TO_DEVICE
    assert world.states("a") == [HOST, HOST, HOST, RESIDENT], "the truth is on the host until the copy is enqueued"
    world.report(enqueued=[transfer])
    assert world.states("a") == [HOST, RESIDENT, RESIDENT, RESIDENT]
    assert world.would_leave("a") == [3], "pages on their way back stay"
    world.report(completed=[transfer])
    assert world.would_leave("a") == [1, 2, 3]
    assert world.coordinator.totals.restores == 2
    assert world.coordinator.host_pool.lookup(world.coordinator.pages("a").keys[1]) is not None


def test_a_page_whose_block_holds_the_bytes_still_comes_back_without_a_copy() -> None:
    """Whoever leases the block: nobody (page 1), or a request with the same beginning (page 0)."""
    world = World()
    tokens = world.start("a", 0, num_pages=4)
    block_of = list(world.kv.resident.blocks("a"))
    world.spill("a", 2)
    other = tokens[: BLOCK_SIZE + 1]
    hit = world.coordinator.find_prefix(world.coordinator.prefix_keys(other))
    world.kv.add("b", 1)
    world.coordinator.add("b", 1, other)
    world.coordinator.adopt_prefix("b", hit)
    host_free = world.coordinator.host_pool.num_free
    world.log.drain()
    assert world.coordinator.restore("a", 2) == 2
    assert world.take() == ()
    assert world.states("a") == [RESIDENT] * 4
    assert list(world.kv.resident.blocks("a")) == block_of
    assert world.kv.slab.leases(DeviceBlockId(block_of[0])) == 2
    assert world.coordinator.host_pool.num_free == host_free + 2
    assert (world.coordinator.totals.restores, world.coordinator.totals.adopted_restores) == (2, 2)
    world.coordinator.assert_invariants()
    assert world.would_leave("a") == [0, 1, 2, 3]


def test_a_block_that_went_to_somebody_else_is_not_adopted() -> None:
    world = World()
    world.start("a", 0, num_pages=4)
    world.spill("a", 2)
    taken = world.kv.slab.allocate(world.kv.slab.num_free)
    assert world.coordinator.restore("a", 2) == 0
    world.kv.slab.release(taken)
    assert world.coordinator.restore("a", 2) == 2
    (transfer,) = world.take()
    assert len(transfer.copies) == 2
    assert world.coordinator.totals.adopted_restores == 0


def test_what_can_be_adopted_is_adopted_before_a_block_is_taken_for_the_rest() -> None:
    """The only free blocks are those that hold the pages: taking one for page 2 must not lose page 1."""
    world = World()
    world.start("a", 0, num_pages=5)
    world.spill("a", 3)
    slab = world.kv.slab
    lost = DeviceBlockId(slab.lookup(world.coordinator.pages("a").keys[2]))  # type: ignore[arg-type]
    slab.lease(lost)
    slab._drop_key(lost)
    taken = slab.allocate(slab.num_free - 2)
    slab.release([lost])
    assert world.coordinator.restore("a", 3) == 3
    (transfer,) = world.take()
    assert [copy.device_block for copy in transfer.copies] == [lost]
    assert world.coordinator.totals.adopted_restores == 2
    slab.release(taken)


def test_what_was_forgotten_is_not_published_by_copies_that_were_in_flight() -> None:
    for way in Direction:
        world = World()
        tokens = world.start("a", 0, num_pages=4)
        if way is Direction.HOST_TO_DEVICE:
            world.spill("a", 3)
            world.lose_device_copies()
            world.coordinator.restore("a", 3)
        else:
            world.coordinator.reclaim(1)
        (transfer,) = world.take()
        world.coordinator.forget_content()
        world.report([transfer], [transfer])
        assert world.coordinator.find_prefix(world.coordinator.prefix_keys(tokens)).num_pages == 0
        assert not any(world.coordinator.host_pool.lookup_all(world.coordinator.pages("a").keys))
        assert not any(world.kv.slab.lookup_all(world.coordinator.pages("a").keys))


def test_the_root_does_not_change_under_a_request() -> None:
    world = World()
    tokens = world.start("a", 0, num_pages=4)
    before = world.coordinator.prefix_keys(tokens)
    with pytest.raises(InvariantError, match="root changes under requests a"):
        world.coordinator.forget_content(b"other")
    world.coordinator.remove("a")
    world.coordinator.forget_content(b"other")
    assert not set(before) & set(world.coordinator.prefix_keys(tokens))


def test_a_page_is_not_restored_under_its_own_spill() -> None:
    world = World()
    world.start("a", 0, num_pages=4)
    world.coordinator.reclaim(1)
    (transfer,) = world.take()
    world.report(enqueued=[transfer])
    world.lose_device_copies()
    assert world.coordinator.restore("a", 9) == 0
    world.report(completed=[transfer])
    assert world.coordinator.restore("a", 9) == 3


def test_a_request_that_leaves_during_a_restore_frees_the_blocks_when_enqueued() -> None:
    world = World()
    world.start("a", 0, num_pages=4)
    world.spill("a", 3)
    world.lose_device_copies()
    world.coordinator.restore("a", 2)
    (transfer,) = world.take()
    world.coordinator.remove("a")
    world.coordinator.assert_invariants()
    assert world.kv.slab.leases(transfer.copies[0].device_block) == 1
    world.report(enqueued=[transfer])
    assert world.kv.slab.leases(transfer.copies[0].device_block) == 0
    world.report(completed=[transfer])
    assert world.coordinator.host_pool.num_leased == 0


def test_a_report_counts_when_every_worker_gave_it() -> None:
    world = World(num_workers=3)
    world.start("a", 0, num_pages=4)
    world.coordinator.reclaim(1)
    (transfer,) = world.take()
    world.report([transfer], worker=2)
    world.report([transfer], [transfer], worker=0)
    assert world.states("a")[0] is SPILLING
    world.report([transfer], worker=1)
    assert world.states("a")[0] is HOST
    world.report([], [transfer], worker=2)
    assert world.coordinator.num_in_flight == 1
    world.report([], [transfer], worker=1)
    assert world.coordinator.num_in_flight == 0


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([SparseKVWorkerReport(0, (TransferId(9),))], "transfer 9 enqueued, which was never begun"),
        ([SparseKVWorkerReport(0, (TransferId(1), TransferId(1)))], "transfer 1 enqueued twice"),
        ([SparseKVWorkerReport(0, (), (TransferId(1),))], "transfer 1 completed before enqueued"),
        ([SparseKVWorkerReport(0, (TransferId(1),), (TransferId(1), TransferId(1)))], "1 completed, which finished"),
        ([SparseKVWorkerReport(0, (TransferId(1),), (TransferId(1),))] * 2, "transfer 1 enqueued, which finished"),
        ([SparseKVWorkerReport(1, (TransferId(1),))], "worker 1"),
    ],
)
def test_a_report_that_cannot_be_true_names_its_transfer(reports: list[SparseKVWorkerReport], message: str) -> None:
    world = World()
    world.start("a", 0, num_pages=4)
    world.coordinator.reclaim(1)
    world.take()
    *believed, impossible = reports
    for report in believed:
        world.coordinator.apply(report)
    with pytest.raises(ProtocolError, match=message):
        world.coordinator.apply(impossible)


@pytest.mark.parametrize("damage", ["state", "host lease", "pin", "offer", "cursor"])
def test_damage_is_found_by_the_invariants(damage: str) -> None:
    world = World()
    world.start("a", 0, num_pages=4)
    world.coordinator.reclaim(1)
    (transfer,) = world.take()
    world.coordinator.assert_invariants()
    pages = world.coordinator.pages("a")
    if damage == "state":
        pages.state[0] = HOST
    elif damage == "host lease":
        world.coordinator.host_pool.release([transfer.copies[0].host_block])
    elif damage == "pin":
        world.kv.slab.unmark_leaving(transfer.copies[0].device_block)
        world.kv.slab.release([transfer.copies[0].device_block])
    elif damage == "offer":
        world.kv.slab.withdraw([DeviceBlockId(world.kv.resident.blocks("a")[3])], pages.holder)
    else:
        pages.first_resident = 4
    with pytest.raises(InvariantError):
        world.coordinator.assert_invariants()
