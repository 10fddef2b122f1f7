"""Blocks that travel between slab and pinned host memory arrive whole and in order, whichever copy carries them."""

from collections.abc import Iterator

import pytest
import torch

from hisparse.geometry import BlockGeometry
from hisparse.worker.cuda import driver
from hisparse.worker.cuda.host_memory import PinnedMapping, PinRequest
from hisparse.worker.cuda.stream import CudaStream
from hisparse.worker.views import BlockCopies, PagedCacheView, all_layers
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

CHUNK = 1 << 16
NUM_BLOCKS = 40
EQUAL = (1152, 1152)
SPACED = (656, 768)


class Ends:
    """A slab and a host pool of random bytes; host registrations of 64 KiB, so that blocks cross them."""

    def __init__(self, strides: tuple[int, int], rows: int = 16, num_blocks: int = NUM_BLOCKS) -> None:
        row_bytes, host_stride = strides
        device, host = BlockGeometry(5, rows, row_bytes, row_bytes), BlockGeometry(5, rows, row_bytes, host_stride)
        chunk = CHUNK if num_blocks == NUM_BLOCKS else 1 << 30
        self.stream = CudaStream(torch.device("cuda", 0), chunk)
        self.slab = PagedCacheView.over(
            torch.randint(0, 256, (num_blocks * device.block_stride,), dtype=torch.uint8, device="cuda:0"),
            all_layers(device, num_blocks),
        )
        self.memory = PinnedMapping(PinRequest(num_blocks * host.block_stride, 0, chunk_bytes=chunk))
        self.host = PagedCacheView.over(self.memory.storage, all_layers(host, num_blocks))
        self.host.storage.random_(0, 256)

    def copies(self, *, spill: bool, num: int = 20) -> BlockCopies:
        total = self.slab.layout.num_blocks - 1
        slab_blocks, host_blocks = 1 + torch.randperm(total)[:num], 1 + torch.randperm(total)[:num]
        if spill:
            return BlockCopies(self.slab, self.host, slab_blocks, host_blocks)
        return BlockCopies(self.host, self.slab, host_blocks, slab_blocks)

    def blocks(self, view: PagedCacheView) -> torch.Tensor:
        return view.rows(torch.int64).cpu().clone()

    def assert_copied(self, copies: BlockCopies, before: torch.Tensor) -> None:
        """The destination holds the source's blocks where it should, and `before` everywhere else."""
        source = copies.source.rows(torch.int64).cpu()
        before[copies.destination_blocks] = source[copies.source_blocks]
        assert torch.equal(copies.destination.rows(torch.int64).cpu(), before)


@pytest.fixture(params=[EQUAL, SPACED], ids=["rows alike", "rows spaced"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    yield ends
    ends.stream.synchronize()
    ends.memory.release()


@pytest.mark.parametrize("in_batches", [True, False])
@pytest.mark.parametrize("spill", [True, False], ids=["to host", "to device"])
def test_blocks_arrive_and_nothing_else_changes(
    ends: Ends, spill: bool, in_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_batches:
        monkeypatch.setattr(driver, "copies_in_batches", lambda: False)
    elif not driver.copies_in_batches():
        pytest.skip("this driver has no batched copy")
    copies = ends.copies(spill=spill)
    before = ends.blocks(copies.destination)
    event = ends.stream.submit(copies)
    event.wait()
    assert event.query()
    ends.assert_copied(copies, before)


def test_a_block_that_is_not_copied_is_seen_to_be_missing(ends: Ends) -> None:
    copies = ends.copies(spill=True)
    before = ends.blocks(copies.destination)
    with pytest.raises(AssertionError):
        ends.assert_copied(copies, before)


def test_a_copy_comes_behind_what_was_computed_before_it(ends: Ends) -> None:
    copies = ends.copies(spill=True)
    torch.cuda._sleep(100_000_000)
    ends.slab.storage.fill_(7)
    event = ends.stream.submit(copies)
    assert not event.query(), "the copy did not wait for the computation"
    event.wait()
    assert (ends.host.rows(torch.uint8)[copies.destination_blocks] == 7).all()


@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "control: not ordered"])
def test_the_next_step_does_not_overwrite_blocks_under_their_copies(is_ordered: bool) -> None:
    ends = Ends(EQUAL, rows=64, num_blocks=1200)
    try:
        copies = ends.copies(spill=True, num=1100)
        ends.slab.storage.fill_(1)
        ends.stream.submit(copies)
        if is_ordered:
            ends.stream.begin_step()
        ends.slab.storage.fill_(2)
        ends.stream.synchronize()
        kept = (ends.host.rows(torch.int64)[copies.destination_blocks] == 0x0101010101010101).all()
        assert bool(kept) is is_ordered
    finally:
        ends.memory.release()


def test_submitting_never_waits_for_the_device(ends: Ends, no_synchronisation: None) -> None:
    copies = ends.copies(spill=True)
    torch.cuda._sleep(200_000_000)
    event = ends.stream.submit(copies)
    assert not event.query()
