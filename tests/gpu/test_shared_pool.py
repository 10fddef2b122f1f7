"""Ranks on GPUs share one pinned host pool: rank 0's events order what its peers read, for any number of steps."""

import ctypes
import faulthandler
import mmap
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

import pytest
import torch

from hisparse.engine.tp.driver_files import remove_driver_files
from hisparse.geometry import align_up
from hisparse.protocol import Direction
from hisparse.worker.cuda import CudaBackend
from hisparse.worker.cuda.shared_pool import NUM_EVENTS, CudaPoolSharing, EventHandles
from hisparse.worker.host_order import HostOrder, create_shared_file
from tests.gpu.marks import NEEDS_GPU
from tests.worker.world import BLOCK_SIZE, ELEMENTS, World, make_plan

pytestmark = NEEDS_GPU

NUM_STEPS = 200
NUM_PAGES = 6
SLOT = 1
SLEEP_CYCLES = 20_000_000
"""About ten milliseconds: rank 0's write is far from done when its event is recorded."""
PATIENT_SECONDS = 20.0
"""What a rank waits for another one."""
RUN_SECONDS = 35.0
"""A rank that is not done by then writes where it is to standard error, and ends."""
IMPORT_SECONDS = 20.0
"""What comes before that: a rank's process starts and imports."""
HUGE_PAGE = 2 << 20

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Part:
    """One rank of `num_ranks`. `barrier`: all of them take a step together, as an executor sees to."""

    rank: int
    num_ranks: int
    is_heedless: bool
    barrier: Any
    told: Connection
    events: tuple[Connection, ...]
    files: "Files"


@dataclass(frozen=True)
class Files:
    """Descriptors of the pool and its order, which are handed over while a process starts."""

    pool: int
    order: int

    def __reduce__(self) -> tuple[Callable[..., "Files"], tuple[object, ...]]:
        return _opened, (DupFd(self.pool), DupFd(self.order))


def _opened(pool: Any, order: Any) -> Files:
    return Files(pool.detach(), order.detach())


def be_rank(part: Part) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(RUN_SECONDS, exit=True)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # its pinned memory is little
    try:
        _take_all_steps(part)
        part.told.send("")
    except BaseException as error:
        part.barrier.abort()
        part.told.send(f"rank {part.rank}: {error!r}")


def _take_all_steps(part: Part) -> None:
    """Every rank draws the same steps. In some of them nothing moves, in some nothing is computed, in some neither."""
    device = torch.device("cuda", part.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    order = HostOrder(part.files.order, part.rank, part.num_ranks, PATIENT_SECONDS)
    sharing = CudaPoolSharing(part.files.pool, order, device, _exchange(part))
    world = World(backend=CudaBackend(device), sharing=sharing)
    blocks = world.admit(SLOT, NUM_PAGES)
    if part.is_heedless:
        torch.cuda.Stream.wait_event = lambda *_: None  # type: ignore[method-assign]
    rng, num_writes = random.Random(7), 0
    for _ in range(NUM_STEPS):
        moves, computes = rng.random() < 0.6, rng.random() < 0.6
        block = rng.choice(blocks)
        if moves:
            num_writes += 1
            _spill(world, block, num_writes, is_writer=part.rank == 0, computes=computes)
        else:
            world.step()
        part.barrier.wait(PATIENT_SECONDS)
    assert num_writes > 2 * NUM_EVENTS, "the ring of events was not used up twice"
    occupied = os.fstat(part.files.pool).st_blocks * 512
    # The system may back it with large pages.
    assert occupied <= align_up(world.worker.host_pool.physical_bytes, HUGE_PAGE), "there is more than one copy"
    world.worker.close()
    # Rank 0's events must be there until no peer waits for one.
    part.barrier.wait(PATIENT_SECONDS)


def _spill(world: World, block: int, value: int, *, is_writer: bool, computes: bool) -> None:
    """Fill a page with a number that it never had, spill it, and perhaps read it from the host in the next step."""
    host_block = world.free_host.pop()
    rows = block * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    for handle in world.worker.handles:
        handle.write(rows, torch.full((BLOCK_SIZE, ELEMENTS), float(value)))
    if is_writer and computes:
        torch.cuda._sleep(SLEEP_CYCLES)
    world.step((world.transfer(Direction.DEVICE_TO_HOST, (block, host_block)),))
    if computes:
        world.start()
        world.worker.order_before_compute()
        seen = _read(world, host_block)
        world.worker.finish_step()
        assert (seen == value).all(), f"read {seen.unique().tolist()} instead of write {value}"
    while world.worker.transfers.num_in_flight:
        world.step()
    world.free_host.insert(0, host_block)


def _read(world: World, host_block: int) -> torch.Tensor:
    """A host page in all layers, as kernels read it in the stream of the computations."""
    source = host_block * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    target = world.staging[0] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    seen = []
    for handle in world.worker.handles:
        handle.runtime.load(source, target)
        seen.append(handle.slab.read(target, torch.float32))
    return torch.stack(seen)


def _exchange(part: Part) -> Callable[[EventHandles | None], EventHandles]:
    def exchange(own: EventHandles | None) -> EventHandles:
        if own is None:
            if not part.events[0].poll(PATIENT_SECONDS):
                raise TimeoutError("rank 0 sent no events")
            handles: EventHandles = part.events[0].recv()
            return handles
        for peer in part.events:
            peer.send(own)
        return own

    return exchange


def run(num_ranks: int, *, heedless: bool = False) -> list[str]:
    """What each rank said in the end: nothing, or what was wrong. All have ended by then."""
    context = multiprocessing.get_context("spawn")
    plan = make_plan()
    pool = create_shared_file("test", align_up(plan.num_host_blocks * plan.host.block_stride, mmap.PAGESIZE))
    files = Files(pool, HostOrder.create_file(num_ranks))
    barrier = context.Barrier(num_ranks)
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks - 1)]
    ranks = []
    started_s = time.time()
    for rank in range(num_ranks):
        hear, told = context.Pipe(duplex=False)
        events = (pipes[rank - 1][0],) if rank else tuple(send for _, send in pipes)
        part = Part(rank, num_ranks, heedless and rank > 0, barrier, told, events, files)
        process = context.Process(target=be_rank, args=(part,), daemon=True)
        process.start()
        told.close()
        ranks.append((process, hear))
    until_s = time.monotonic() + IMPORT_SECONDS + RUN_SECONDS
    try:
        return [_last_word(process, hear, until_s) for process, hear in ranks]
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
            remove_driver_files(process.pid or 0, started_s)
        os.close(files.pool)
        os.close(files.order)


def _last_word(process: Any, hear: Connection, until_s: float) -> str:
    try:
        word: str = hear.recv() if hear.poll(max(0.0, until_s - time.monotonic())) else "hangs"
    except EOFError:
        word = "ended without a word"
    process.join(max(0.0, until_s - time.monotonic()))
    return word or ("" if process.exitcode == 0 else f"ended with exit code {process.exitcode} after its last step")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """One process does once what ranks do in every step, so that all kernels are in the cache on disk."""
    with torch.device("cuda"):
        world = World(backend=CudaBackend("cuda"))
        block = world.admit(SLOT, NUM_PAGES)[0]
        _spill(world, block, 1, is_writer=True, computes=True)
        world.worker.close()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_in_200_steps_of_which_many_are_idle_every_rank_reads_what_rank_0_wrote(num_ranks: int) -> None:
    assert run(num_ranks) == [""] * num_ranks


def test_control_a_peer_that_does_not_wait_for_the_event_reads_something_else() -> None:
    assert "instead of write" in run(2, heedless=True)[1]
