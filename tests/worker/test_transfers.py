"""Transfers move whole blocks, and tell enqueued from completed."""

from collections.abc import Iterator

import pytest
import torch

from hisparse.errors import ProtocolError
from hisparse.geometry import RowFormat, device_blocks, host_blocks
from hisparse.protocol import DeviceBlockId, Direction, HostBlockId, PageCopy, SparseKVPageTransfer, TransferId
from hisparse.worker import CopyDelay, CpuStream, HostPool, PagedCacheView, TransferEngine
from hisparse.worker.host_memory import AnonymousMapping
from hisparse.worker.views import all_layers

ROW = RowFormat("float32", 48)
DEVICE = device_blocks(ROW, num_layers=2, block_size=4)
HOST = host_blocks(ROW, num_layers=2, block_size=4)
NUM_BLOCKS = 9
ROWS_PER_BLOCK = 8
PAGE_BYTES = 2 * 4 * 48

SPILL, RESTORE = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE


class Bench:
    """A transfer engine between a slab whose block b is full of b and an empty host pool."""

    def __init__(self, delay: CopyDelay | None = None) -> None:
        self.stream = CpuStream(delay if delay is not None else CopyDelay())
        self.pool = HostPool(HOST, NUM_BLOCKS, AnonymousMapping)
        slab = torch.zeros(NUM_BLOCKS * DEVICE.block_stride, dtype=torch.uint8)
        self.device = PagedCacheView.over(slab, all_layers(DEVICE, NUM_BLOCKS))
        self.host = self.pool.pages()
        self.engine = TransferEngine(self.stream, self.device, self.host, DEVICE)
        for block in range(1, NUM_BLOCKS):
            self.fill(block, float(block))

    def fill(self, device_block: int, value: float) -> None:
        rows = device_block * ROWS_PER_BLOCK + torch.arange(ROWS_PER_BLOCK)
        self.device.write(rows, torch.full((ROWS_PER_BLOCK, 12), value))

    @staticmethod
    def value(view: PagedCacheView, block: int) -> float:
        """What every element of a block is."""
        rows = block * ROWS_PER_BLOCK + torch.arange(ROWS_PER_BLOCK)
        (value,) = view.read(rows, torch.float32).unique().tolist()
        return float(value)


def transfer(number: int, direction: Direction, *pairs: tuple[int, int]) -> SparseKVPageTransfer:
    """`pairs` of (device block, host block)."""
    copies = tuple(PageCopy(DeviceBlockId(device), HostBlockId(host)) for device, host in pairs)
    return SparseKVPageTransfer(TransferId(number), direction, copies)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.pool.close()


@pytest.fixture
def slow() -> Iterator[Bench]:
    bench = Bench(CopyDelay(seed=3, max_polls=40))
    yield bench
    bench.pool.close()


def test_a_spill_fills_its_host_blocks_and_no_other(bench: Bench) -> None:
    bench.engine.enqueue([transfer(1, SPILL, (3, 7), (8, 2))])
    bench.engine.poll()
    assert [bench.value(bench.host, block) for block in range(NUM_BLOCKS)] == [0, 0, 8, 0, 0, 0, 0, 3, 0]


def test_a_restore_brings_back_what_was_spilled(bench: Bench) -> None:
    bench.engine.enqueue([transfer(1, SPILL, (3, 7))])
    bench.engine.enqueue([transfer(2, RESTORE, (5, 7))])
    bench.stream.synchronize()
    assert bench.value(bench.device, 5) == 3.0


def test_directions_that_alternate_in_one_command_keep_their_order(bench: Bench) -> None:
    bench.engine.enqueue([transfer(1, SPILL, (3, 7)), transfer(2, RESTORE, (3, 1)), transfer(3, SPILL, (3, 2))])
    bench.stream.synchronize()
    # Host block 1 was empty, so block 3 was 3 at first and 0 afterwards.
    assert (bench.value(bench.host, 7), bench.value(bench.host, 2)) == (3.0, 0.0)


def test_enqueued_is_told_once_and_before_completed(slow: Bench) -> None:
    slow.engine.enqueue([transfer(1, SPILL, (3, 7))])
    slow.engine.enqueue([transfer(2, SPILL, (4, 6))])
    assert slow.engine.take_enqueued() == (1, 2)
    assert slow.engine.take_enqueued() == ()
    assert slow.engine.poll() == ()
    assert slow.engine.num_in_flight == 2
    done = [transfer_id for _ in range(200) for transfer_id in slow.engine.poll()]
    assert done == [1, 2]
    assert slow.engine.num_in_flight == 0


def test_a_block_is_reused_behind_its_spill_and_the_host_gets_the_old_bytes(slow: Bench) -> None:
    slow.engine.enqueue([transfer(1, SPILL, (3, 7))])
    slow.stream.order_before_compute()
    slow.fill(3, 99.0)
    slow.stream.synchronize()
    assert slow.value(slow.host, 7) == 3.0


def test_a_block_that_is_reused_without_stream_order_spoils_the_host_page(slow: Bench) -> None:
    slow.engine.enqueue([transfer(1, SPILL, (3, 7))])
    slow.fill(3, 99.0)
    slow.stream.synchronize()
    assert slow.value(slow.host, 7) == 99.0


def test_waiting_for_host_writes_lands_them_and_completion_is_still_reported(slow: Bench) -> None:
    slow.engine.enqueue([transfer(1, SPILL, (3, 7)), transfer(2, SPILL, (4, 6)), transfer(3, RESTORE, (5, 7))])
    assert slow.value(slow.host, 7) == 0.0
    slow.engine.wait_host_writes()
    assert (slow.value(slow.host, 7), slow.value(slow.host, 6)) == (3.0, 4.0)
    assert slow.value(slow.device, 5) == 5.0, "a restore behind the last host write was waited for"
    assert slow.engine.poll() == (1, 2)
    slow.engine.wait_host_writes()


def test_bytes_are_counted_by_direction_in_payload(bench: Bench) -> None:
    bench.engine.enqueue([transfer(1, SPILL, (3, 7), (4, 6)), transfer(2, RESTORE, (5, 1))])
    assert bench.engine.device_to_host_bytes == 2 * PAGE_BYTES
    assert bench.engine.host_to_device_bytes == PAGE_BYTES


def test_a_transfer_without_pages_is_acknowledged_like_any_other(bench: Bench) -> None:
    bench.engine.enqueue([transfer(1, SPILL)])
    assert bench.engine.take_enqueued() == (1,)
    assert bench.engine.poll() == (1,)


@pytest.mark.parametrize("again", [5, 4, 0])
def test_an_id_that_was_passed_is_named_and_refused(bench: Bench, again: int) -> None:
    bench.engine.enqueue([transfer(5, SPILL, (3, 7))])
    bench.engine.poll()
    with pytest.raises(ProtocolError, match=f"transfer {again} came after transfer 5"):
        bench.engine.enqueue([transfer(again, SPILL, (4, 6))])
    bench.engine.enqueue([transfer(6, SPILL, (4, 6))])


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (transfer(2, SPILL, (0, 7)), "transfer 2 names device block 0"),
        (transfer(2, SPILL, (9, 7)), "transfer 2 names device block 9"),
        (transfer(2, RESTORE, (3, 0)), "transfer 2 names host block 0"),
        (transfer(2, RESTORE, (3, -1)), "transfer 2 names host block -1"),
        (transfer(2, SPILL, (4, 7)), "transfer 2 writes block 7"),
        (transfer(2, RESTORE, (4, 6), (4, 5)), "transfer 2 writes block 4"),
        (transfer(1, SPILL, (4, 6)), "transfer 1 came after transfer 1"),
    ],
)
def test_a_command_with_a_bad_transfer_enqueues_none_of_it(
    bench: Bench, bad: SparseKVPageTransfer, complaint: str
) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        bench.engine.enqueue([transfer(1, SPILL, (3, 7)), bad])
    assert bench.engine.take_enqueued() == ()
    assert bench.stream.num_outstanding == 0
    bench.engine.enqueue([transfer(1, SPILL, (3, 7))])
