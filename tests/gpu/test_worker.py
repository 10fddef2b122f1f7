"""A worker on a GPU: the same world as on the CPU, with copies that really are late."""

import random
import time
from collections.abc import Iterator

import pytest
import torch

from hisparse.config import CachePlan
from hisparse.errors import BackendError
from hisparse.geometry import RowFormat
from hisparse.kernels.contract import Selection
from hisparse.protocol import Direction, Table, TableUpdate
from hisparse.worker.runtime import ONE_LAUNCH_ROWS
from tests.gpu.marks import NEEDS_GPU
from tests.gpu.waiting import nothing_waits
from tests.worker.late_side import rows_of
from tests.worker.world import BLOCK_SIZE, MAX_TOKENS, NUM_SLOTS, TOPK, World, make_plan

pytestmark = NEEDS_GPU

ALIKE = RowFormat("float32", 4 * 32)
"""Rows of 128 bytes, which lie alike in slab and host pool."""


@pytest.fixture
def world(on_cuda: torch.device) -> Iterator[World]:
    from hisparse.worker.cuda import CudaBackend

    world = World(CudaBackend())
    yield world
    world.worker.close()


def test_resident_rows_are_read_in_place(world: World) -> None:
    world.admit(1, 4)
    world.assert_decodes(1, [0, 5, 15, -1])
    assert world.worker.counters()["resident"] == 3 * 2


def test_a_spilled_page_is_read_from_the_host_in_the_step_after_it_was_enqueued(world: World) -> None:
    blocks = world.admit(0, 4)
    world.admit(2, 3)
    host = world.spill(0, {0: blocks[0], 2: blocks[2]})
    world.start(updates=world.on_host(0, host))
    world.assert_decodes(0, [0, 9, 13, -1])
    world.worker.finish_step()
    counters = world.worker.counters()
    assert counters["unreachable"] == 0
    assert counters["miss"] == 2 * 2
    assert counters["device_to_host_bytes"] == 2 * world.plan.device.payload_bytes


def test_a_page_may_be_overwritten_in_the_step_after_its_spill_was_enqueued(world: World) -> None:
    blocks = world.admit(0, 4)
    host = world.spill(0, {0: blocks[0]})
    world.start(updates=(*world.on_host(0, host), TableUpdate(Table.RESIDENT, 1, 0, (blocks[0],))))
    world.fill(1, BLOCK_SIZE)
    world.assert_decodes(0, [0, 1, 2, 3])
    world.worker.finish_step()


def test_a_restored_page_is_read_from_the_slab(world: World) -> None:
    blocks = world.admit(0, 4)
    host = world.spill(0, {1: blocks[1]})
    new = world.free_device.pop()
    world.step(updates=world.on_host(0, host))
    world.step(transfers=(world.transfer(Direction.HOST_TO_DEVICE, (new, host[1])),))
    world.start(updates=(TableUpdate(Table.RESIDENT, 0, 1, (new,)), TableUpdate(Table.HOST, 0, 1, (0,))))
    world.assert_decodes(0, [4, 5, 6, 7])
    world.worker.finish_step()
    assert world.worker.counters()["miss"] == 0


def test_a_transfer_is_reported_as_enqueued_at_once_and_as_completed_when_it_is_done(world: World) -> None:
    (block,) = world.admit(0, 1)
    torch.cuda._sleep(200_000_000)
    spill = world.transfer(Direction.DEVICE_TO_HOST, (block, 5))
    report = world.step(transfers=(spill,))
    assert (report.enqueued, report.completed) == ((spill.transfer_id,), ())
    world.worker.wait_host_writes()
    assert world.step().completed == (spill.transfer_id,)
    rows = 5 * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device="cpu")
    written = world.worker.host_pool.layer(3).read(rows, torch.float32)
    assert torch.equal(written, world.truth(0, torch.arange(BLOCK_SIZE), 3).cpu())


def test_a_slot_lent_again_reads_nothing_of_the_request_before(world: World) -> None:
    blocks = world.admit(0, 4)
    host = world.spill(0, {page: blocks[page] for page in range(3)})
    world.start(updates=world.on_host(0, host))
    world.assert_decodes(0, [0, 4, 8, 12])
    world.worker.finish_step()
    world.step(resets=(0,))
    world.admit(0, 2)
    world.assert_decodes(0, [0, 4, 7, -1])


def test_a_prefill_pass_stages_host_rows(world: World) -> None:
    blocks = world.admit(0, 4)
    host = world.spill(0, {0: blocks[0], 1: blocks[1]})
    world.start(updates=world.on_host(0, host))
    positions = torch.tensor([[0, 5, 9, -1], [5, 7, 13, 14]], dtype=torch.int32)
    for layer, handle in enumerate(world.worker.handles):
        rows = handle.stage(positions, torch.zeros(2, dtype=torch.int64))
        assert rows.shape == (2, 4)
        assert torch.equal(handle.gather(rows), world.expected(0, positions, layer))
    world.worker.finish_step()


# Followers, whose copies run ahead.

FOLLOWED = (0, 0, 0, 0, 4, 4)
MANY = ONE_LAUNCH_ROWS + 1
NUM_TOKENS = 5 * BLOCK_SIZE


@pytest.fixture
def followed(on_cuda: torch.device) -> Iterator[World]:
    """A leader with three followers and one with one. Every slot has five pages, four of them on the host."""
    from hisparse.worker.cuda import CudaBackend

    world = World(CudaBackend(), plan=make_plan(leader_of=FOLLOWED, max_running=MANY))
    for slot in range(NUM_SLOTS):
        world.admit_on_host(slot, NUM_TOKENS // BLOCK_SIZE)
    yield world
    world.worker.close()


def selection_of(num_rows: int) -> Selection:
    """The first positions of every slot, and padding."""
    return Selection(*rows_of([(slot, range(TOPK)) for slot in range(NUM_SLOTS)], num_rows))


@pytest.mark.parametrize("num_rows", [NUM_SLOTS, MANY])
def test_a_graph_replayed_on_changing_selections_gives_every_layer_its_bytes_without_a_wait(
    followed: World, num_rows: int
) -> None:
    selection = selection_of(num_rows)
    followed.forward(selection)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathered = followed.forward(selection)
    rng = random.Random(num_rows)
    drawn = [[sorted(rng.sample(range(NUM_TOKENS), TOPK)) for _ in range(NUM_SLOTS)] for _ in range(40)]
    chosen, seen = torch.tensor(drawn, dtype=torch.int32), []
    with nothing_waits():
        for step in range(len(drawn)):
            selection.positions[:NUM_SLOTS].copy_(chosen[step])
            # Every fourth step is not replayed: captured and launched ones use the same events.
            if step % 4 == 3:
                layers = followed.forward(selection)
            else:
                graph.replay()
                layers = gathered
            seen.append([layer[:NUM_SLOTS].clone() for layer in layers])
    for step, layers in enumerate(seen):
        for layer, got in enumerate(layers):
            for slot in range(NUM_SLOTS):
                expected = followed.truth(slot, chosen[step, slot], layer)
                assert torch.equal(got[slot], expected), f"step {step}, layer {layer}, slot {slot}"
    counters = followed.worker.counters()
    assert counters["miss"] > 40
    assert counters["bytes"] == counters["miss"] // 2 * 48 * len(FOLLOWED)
    assert counters["unreachable"] == counters["status"] == 0


@pytest.mark.parametrize("num_rows", [NUM_SLOTS, MANY])
def test_followers_rows_arrive_while_their_leader_s_layer_computes(followed: World, num_rows: int) -> None:
    from hisparse.worker.cuda.side import CudaSideStream

    selection = selection_of(num_rows)
    followed.forward(selection)
    selection.positions[:NUM_SLOTS] += TOPK  # all of them misses
    handles, side = followed.worker.handles, followed.worker.handles[0].runtime.context.side
    assert isinstance(side, CudaSideStream)
    torch.cuda.synchronize()
    rows = handles[0].resolve(selection)
    torch.cuda._sleep(400_000_000)
    computed = torch.cuda.Event()
    computed.record()
    deadline = time.monotonic() + 10
    while not side.stream.query() and time.monotonic() < deadline:
        pass
    assert side.stream.query()
    assert not computed.query(), "the copies were over before what the leader's layer computed"
    for layer in (1, 2, 3):
        handles[layer].load_followed()
        got = handles[layer].gather(rows)
        for slot in range(NUM_SLOTS):
            assert torch.equal(got[slot], followed.truth(slot, selection.positions[slot], layer))


def test_rows_that_lie_alike_on_both_sides_travel_as_well(on_cuda: torch.device) -> None:
    from hisparse.worker.cuda import CudaBackend

    plan: CachePlan = make_plan(ALIKE)
    assert plan.host.row_stride == plan.device.row_stride
    world = World(CudaBackend(), plan=plan)
    with world.worker as worker:
        pages = worker.slab.pages().rows(torch.int64)
        pages.random_()
        world.step(transfers=(world.transfer(Direction.DEVICE_TO_HOST, (3, 7)),))
        worker.wait_host_writes()
        assert torch.equal(worker.host_pool.pages().rows(torch.int64)[7], pages[3].cpu())


def test_positions_without_a_block_are_counted_and_padding_is_not(world: World) -> None:
    world.admit(0, 1)
    slots, positions = torch.tensor([0, -1, 0, 1]), torch.tensor([1, 0, MAX_TOKENS, 0])
    rows = world.worker.tables.physical_rows(Table.RESIDENT, slots, positions)
    assert (rows == 0).tolist() == [False, True, True, True]
    assert world.worker.tables.num_missing() == 2


def test_a_worker_that_is_closed_gives_its_memory_back(on_cuda: torch.device) -> None:
    from hisparse.worker.cuda import CudaBackend

    world = World(CudaBackend())
    world.admit(0, 2)
    host = world.worker.host_pool.storage
    assert host.is_pinned()
    world.worker.close()
    assert not host.is_pinned()


def test_a_slab_beyond_the_gpu_s_memory_is_one_clear_line() -> None:
    from hisparse.worker.cuda import CudaBackend

    with pytest.raises(BackendError, match=r"bytes are free\. Make its budget smaller"):
        CudaBackend().allocate_device(1 << 46)
