"""A worker follows its commands, in stream order, whatever the copies' delay; and insists on their order."""

import random

import pytest
import torch

from hisparse.errors import BackendError, InvariantError, ProtocolError
from hisparse.protocol import DeviceBlockId, Direction, SparseKVOffloadCommand, Table, TableUpdate
from hisparse.worker import CopyDelay, CopyStream, CpuBackend, CpuStream, HiSparseWorker
from hisparse.worker.host_memory import HostMemory
from tests.worker.world import BLOCK_SIZE, LEADER_OF, NUM_SLOTS, MakeWorld, World, make_plan

SLOW = CopyDelay(seed=11, max_polls=30)


class UnorderedStream(CpuStream):
    """A stream that forgets that a forward pass comes behind its copies."""

    def order_before_compute(self) -> None:
        pass


class UnorderedBackend(CpuBackend):
    def make_stream(self) -> CopyStream:
        return UnorderedStream(SLOW)


# The step.


def test_a_step_reports_what_was_enqueued_at_once_and_what_completed_when_it_is_seen(make_world: MakeWorld) -> None:
    world = make_world(CpuBackend(SLOW))
    (block,) = world.admit(0, 1)
    spill = world.transfer(Direction.DEVICE_TO_HOST, (block, 5))
    report = world.step(transfers=(spill,))
    assert (report.worker, report.enqueued, report.completed) == (0, (spill.transfer_id,), ())
    later = [world.step() for _ in range(100)]
    assert [transfer_id for report in later for transfer_id in report.completed] == [spill.transfer_id]
    assert all(not report.enqueued for report in later)


def test_without_delay_a_transfer_is_enqueued_and_completed_in_one_report(world: World) -> None:
    (block,) = world.admit(0, 1)
    spill = world.transfer(Direction.DEVICE_TO_HOST, (block, 5))
    report = world.step(transfers=(spill,))
    assert report.enqueued == report.completed == (spill.transfer_id,)


def test_a_report_carries_the_worker_s_rank(world: World) -> None:
    with HiSparseWorker(world.plan, world.staging, rank=3) as worker:
        worker.start_step(SparseKVOffloadCommand(1))
        assert worker.finish_step().worker == 3


@pytest.mark.parametrize("step", [4, 3, 0])
def test_steps_only_go_forward(world: World, step: int) -> None:
    worker = world.worker
    worker.start_step(SparseKVOffloadCommand(4))
    worker.finish_step()
    with pytest.raises(ProtocolError, match=f"step {step} came after step 4"):
        worker.start_step(SparseKVOffloadCommand(step))
    worker.start_step(SparseKVOffloadCommand(6))


def test_a_step_cannot_start_before_the_last_finished_nor_finish_unstarted(world: World) -> None:
    worker = world.worker
    with pytest.raises(ProtocolError, match="no step to finish"):
        worker.finish_step()
    worker.start_step(SparseKVOffloadCommand(1))
    with pytest.raises(ProtocolError, match="step 2 started before step 1 finished"):
        worker.start_step(SparseKVOffloadCommand(2))


def test_a_repeated_transfer_is_named(world: World) -> None:
    (block,) = world.admit(0, 1)
    spill = world.transfer(Direction.DEVICE_TO_HOST, (block, 5))
    world.step(transfers=(spill,))
    with pytest.raises(ProtocolError, match=f"transfer {spill.transfer_id} "):
        world.start(transfers=(spill,))


# Stream order.


def spill_and_reuse(world: World) -> None:
    """Spill slot 0's first pages, and in the very next step have slot 1 overwrite their device blocks."""
    blocks = world.admit(0, 3)
    host = world.spill(0, {0: blocks[0], 1: blocks[1]})
    world.start(updates=(*world.on_host(0, host), TableUpdate(Table.RESIDENT, 1, 0, tuple(blocks[:2]))))
    world.fill(1, 2 * BLOCK_SIZE)
    world.assert_decodes(0, [0, 3, 5, 11])
    world.worker.finish_step()


def test_a_spilled_block_is_reused_and_its_page_read_before_the_copy_is_seen_to_be_done(make_world: MakeWorld) -> None:
    world = make_world(CpuBackend(SLOW))
    spill_and_reuse(world)
    assert world.worker.transfers.num_in_flight == 1


def test_without_stream_order_the_same_steps_read_wrong_bytes(make_world: MakeWorld) -> None:
    with pytest.raises(AssertionError, match="layer 0"):
        spill_and_reuse(make_world(UnorderedBackend()))


def test_a_restored_page_is_read_in_the_step_after_its_enqueue(make_world: MakeWorld) -> None:
    world = make_world(CpuBackend(SLOW))
    blocks = world.admit(0, 2)
    host = world.spill(0, {0: blocks[0]})
    world.step(updates=world.on_host(0, host))
    target = world.free_device.pop()
    world.step(transfers=(world.transfer(Direction.HOST_TO_DEVICE, (target, host[0])),))
    world.start(
        updates=(TableUpdate(Table.RESIDENT, 0, 0, (target,)), TableUpdate(Table.HOST, 0, 0, (0,))),
    )
    world.assert_decodes(0, [0, 1, 2, 3])
    counters = world.worker.counters()
    assert counters["miss"] == 0
    page = len(LEADER_OF) * BLOCK_SIZE * 48
    assert (counters["host_to_device_bytes"], counters["device_to_host_bytes"]) == (page, page)


def test_host_writes_can_be_waited_for(make_world: MakeWorld) -> None:
    world = make_world(CpuBackend(SLOW))
    blocks = world.admit(0, 1)
    host = world.spill(0, {0: blocks[0]})
    page = host[0] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    view = world.worker.host_pool.layer(2)
    assert int(view.read(page, torch.uint8).count_nonzero()) == 0
    world.worker.wait_host_writes()
    assert torch.equal(view.read(page, torch.float32), world.truth(0, torch.arange(BLOCK_SIZE), 2))


# Slots.


def test_a_slot_that_changed_hands_is_not_served_from_its_former_hot_rows(world: World) -> None:
    blocks = world.admit(0, 2)
    host = world.spill(0, {0: blocks[0]})
    world.step(updates=world.on_host(0, host))
    world.assert_decodes(0, [0, 1, 2, 3])
    lease = tuple(world.worker.tables[Table.HOT][0].tolist())
    # Slot 0 is lent to another request, with the same hot blocks and the same host block holding other tokens.
    world.fill_host(host[0], slot=2)
    world.step(resets=(0,), updates=(TableUpdate(Table.HOST, 0, 0, (host[0],)), TableUpdate(Table.HOT, 0, 0, lease)))
    for layer, got in enumerate(world.decode(0, torch.arange(4))):
        assert torch.equal(got, world.truth(2, torch.arange(4), layer))


def test_the_check_of_a_slot_that_changed_hands_fails_without_the_reset(world: World) -> None:
    blocks = world.admit(0, 2)
    host = world.spill(0, {0: blocks[0]})
    world.step(updates=world.on_host(0, host))
    world.assert_decodes(0, [0, 1, 2, 3])
    world.fill_host(host[0], slot=2)
    world.step()
    # Truth of slot 0, which the host no longer holds: these are hot rows.
    world.assert_decodes(0, [0, 1, 2, 3])


def test_a_slot_with_another_hot_lease_forgets_the_rows_of_the_first(world: World) -> None:
    blocks = world.admit(0, 2)
    host = world.spill(0, {0: blocks[0]})
    world.step(updates=world.on_host(0, host))
    world.assert_decodes(0, [0, 1, 2, 3])
    lease = tuple(world.free_device.pop() for _ in range(world.plan.hot_blocks))
    world.step(updates=(TableUpdate(Table.HOT, 0, 0, lease),))
    world.assert_decodes(0, [0, 1, 2, 3])


# Many steps.


@pytest.mark.parametrize("seed", range(6))
def test_requests_decode_their_own_bytes_through_random_spills_restores_and_reuse(
    make_world: MakeWorld, seed: int
) -> None:
    world = make_world(CpuBackend(CopyDelay(seed, max_polls=seed)), seed=seed)
    rng = random.Random(seed)
    resident: dict[int, dict[int, int]] = {}
    host: dict[int, dict[int, int]] = {slot: {} for slot in range(NUM_SLOTS)}
    for slot in range(NUM_SLOTS):
        resident[slot] = dict(enumerate(world.admit(slot, 5)))
    for _ in range(25):
        slot = rng.randrange(NUM_SLOTS)
        if resident[slot] and (len(resident[slot]) > 3 or rng.random() < 0.6):
            page = rng.choice(list(resident[slot]))
            host[slot] |= (moved := world.spill(slot, {page: resident[slot][page]}))
            world.free_device.insert(0, resident[slot].pop(page))
            updates = world.on_host(slot, moved)
        else:
            page = rng.choice(list(host[slot]))
            target, source = world.free_device.pop(), host[slot].pop(page)
            world.step(transfers=(world.transfer(Direction.HOST_TO_DEVICE, (target, source)),))
            resident[slot][page] = target
            world.free_host.insert(0, source)
            updates = (TableUpdate(Table.RESIDENT, slot, page, (target,)), TableUpdate(Table.HOST, slot, page, (0,)))
        world.start(updates=updates)
        for other in rng.sample(range(NUM_SLOTS), NUM_SLOTS):
            world.assert_decodes(other, sorted(rng.sample(range(20), 4)))
        world.worker.finish_step()
    counters = world.worker.counters()
    assert counters["unreachable"] == counters["status"] == 0
    assert min(counters[name] for name in ("resident", "hot", "miss")) > 0
    # Selections are conserved: every one was served in one way.
    served = counters["resident"] + counters["hot"] + counters["miss"]
    assert served == 25 * NUM_SLOTS * 4 * len(set(LEADER_OF))


# The end.


def test_a_closed_worker_gives_its_memory_back_and_refuses_to_go_on(world: World) -> None:
    world.admit(0, 2)
    before = world.worker.counters()
    handle = world.worker.handles[0]
    world.worker.close()
    world.worker.close()
    with pytest.raises(InvariantError, match="slab was closed"):
        handle.gather(torch.tensor([9]))
    with pytest.raises(InvariantError, match="worker 0 was closed"):
        world.step()
    with pytest.raises(InvariantError, match="host pool was closed"):
        _ = world.worker.host_pool.storage
    assert world.worker.counters() == before


def test_closing_with_copies_in_flight_lets_them_land_first(make_world: MakeWorld) -> None:
    world = make_world(CpuBackend(SLOW))
    blocks = world.admit(0, 1)
    world.spill(0, {0: blocks[0]})
    assert world.worker.transfers.num_in_flight == 1
    world.worker.close()


@pytest.mark.parametrize("staging", [(3,), (3, 30), (0, 3), (3, 3)])
def test_a_staging_lease_that_is_not_the_plan_s_is_refused(staging: tuple[int, ...]) -> None:
    with pytest.raises(InvariantError, match="staging"):
        HiSparseWorker(make_plan(), tuple(map(DeviceBlockId, staging)))


class NoDevice(CpuBackend):
    """A backend whose host memory can be had and whose device memory cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.host: HostMemory | None = None

    def allocate_host(self, num_bytes: int) -> HostMemory:
        self.host = super().allocate_host(num_bytes)
        return self.host

    def allocate_device(self, num_bytes: int) -> torch.Tensor:
        raise BackendError("no device memory")


def test_a_worker_that_cannot_start_gives_back_the_host_memory_it_had() -> None:
    backend = NoDevice()
    with pytest.raises(BackendError, match="no device memory"):
        HiSparseWorker(make_plan(), (DeviceBlockId(3), DeviceBlockId(4)), backend=backend)
    assert backend.host is not None
    with pytest.raises(InvariantError, match="after its release"):
        _ = backend.host.storage
