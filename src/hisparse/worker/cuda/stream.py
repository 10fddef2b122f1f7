"""Page copies on a CUDA stream of their own, beside the forward pass.

Copies submitted in a step are ordered before the computations of the *next* step: the scheduler lets nobody rely on
them earlier (`protocol`: "the tables of this step do not yet show their effect"), and a step that waited for its own
copies could not hide them.
"""

from dataclasses import dataclass

import numpy as np
import torch

from hisparse.errors import InvariantError
from hisparse.geometry import PagedLayout
from hisparse.worker.cuda import driver
from hisparse.worker.cuda.host_memory import CHUNK_BYTES
from hisparse.worker.stream import CopyEvent
from hisparse.worker.views import BlockCopies, PagedCacheView


@dataclass(frozen=True, slots=True)
class CudaCopyEvent:
    """The end of one submission, as a CUDA event."""

    event: torch.cuda.Event

    def query(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """`CopyStream` on a GPU. One end of every copy is on the device, the other in host memory that it can reach.

    Blocks whose rows lie alike at both ends are contiguous, and all of a submission go to the driver in one call.
    Blocks whose row stride differs are one strided copy each. Neither takes a multiprocessor from the model.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        """`chunk_bytes`: the registrations of host memory that no single copy may cross."""
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._last: torch.cuda.Event | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where the copies are, for those who order others with them."""
        return self._stream

    def submit(self, copies: BlockCopies) -> CopyEvent:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if copies.source_blocks.numel():
            self._enqueue(copies)
        event = torch.cuda.Event()
        event.record(self._stream)
        self._last = event
        return CudaCopyEvent(event)

    def begin_step(self) -> None:
        """What is computed from now on comes behind every copy submitted before this call."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)
            self._last = None

    def order_before_compute(self) -> None:
        """Nothing to do: `begin_step` ordered what this step may rely on."""

    def synchronize(self) -> None:
        # The whole device: resolvers copy from the host as well, in the stream of the forward pass.
        torch.cuda.synchronize(self._device)

    def _enqueue(self, copies: BlockCopies) -> None:
        with torch.cuda.device(self._device):
            if copies.source.layout.row_stride == copies.destination.layout.row_stride:
                fragments = contiguous_fragments(copies, self._chunk_bytes)
                copy = driver.copy_batch if driver.copies_in_batches() else driver.copy_singly
                copy(fragments, self._stream.cuda_stream)
            else:
                driver.copy_rectangles(strided_copies(copies, self._chunk_bytes), self._stream.cuda_stream)


def contiguous_fragments(copies: BlockCopies, chunk_bytes: int) -> driver.Fragments:
    """Blocks whose rows lie alike at both ends as contiguous copies, none of which crosses a chunk of the host's.

    Alignment between rows is copied with them.
    """
    source, destination = copies.source, copies.destination
    size = _block_bytes(source.layout)
    if size != _block_bytes(destination.layout):
        raise InvariantError(f"blocks of {source.layout} and of {destination.layout} do not lie alike")
    starts = np.stack([_starts(source, copies.source_blocks), _starts(destination, copies.destination_blocks)])
    ends = starts + size
    host = 0 if _is_host(source) else 1
    # Few blocks cross, so all are cut at the first chunk's end at once, until nothing is left of any.
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    while starts.shape[1]:
        sizes = np.minimum(ends[0] - starts[0], chunk_bytes - starts[host] % chunk_bytes)
        parts.append((starts, sizes))
        is_left = starts[0] + sizes < ends[0]
        starts, ends = (starts + sizes)[:, is_left], ends[:, is_left]
    offsets = np.concatenate([part for part, _ in parts], axis=1)
    return driver.Fragments(
        sources=np.ascontiguousarray(offsets[0] + source.storage.data_ptr()).astype(np.uint64),
        destinations=np.ascontiguousarray(offsets[1] + destination.storage.data_ptr()).astype(np.uint64),
        num_bytes=np.concatenate([sizes for _, sizes in parts]).astype(np.uint64),
    )


def strided_copies(copies: BlockCopies, chunk_bytes: int) -> driver.Rectangles:
    """Blocks as strided copies of whole rows, within chunks. A row that crosses into the next chunk is cut in two."""
    source, destination = copies.source, copies.destination
    strides = (source.layout.row_stride, destination.layout.row_stride)
    host = 0 if _is_host(source) else 1
    starts = np.stack([_starts(source, copies.source_blocks), _starts(destination, copies.destination_blocks)])
    last = starts[host] + _block_bytes((source, destination)[host].layout) - 1
    fits = starts[host] // chunk_bytes == last // chunk_bytes
    width, num_rows = source.layout.row_bytes, source.layout.block_size
    whole = starts[:, fits]
    parts = [(first, to, width, num_rows) for first, to in zip(*whole.tolist(), strict=True)]
    for start in starts[:, ~fits].T.tolist():
        parts += _cut_rows(_Crossing(tuple(start), strides, width, num_rows, host), chunk_bytes)
    columns = [list(column) for column in zip(*parts, strict=True)]
    return driver.Rectangles(
        sources=[offset + source.storage.data_ptr() for offset in columns[0]],
        destinations=[offset + destination.storage.data_ptr() for offset in columns[1]],
        widths=columns[2],
        heights=columns[3],
        source_pitch=strides[0],
        destination_pitch=strides[1],
    )


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A block that lies in several chunks. `starts` and `strides` are (source, destination); `host` says which of
    them is the host's."""

    starts: tuple[int, ...]
    strides: tuple[int, int]
    row_bytes: int
    num_rows: int
    host: int


def _cut_rows(block: _Crossing, chunk_bytes: int) -> list[tuple[int, int, int, int]]:
    """(source offset, destination offset, width, height) of the copies of one block."""
    parts: list[tuple[int, int, int, int]] = []
    row = 0
    while row < block.num_rows:
        first, to = (start + row * stride for start, stride in zip(block.starts, block.strides, strict=True))
        room = chunk_bytes - (first, to)[block.host] % chunk_bytes
        if room < block.row_bytes:
            parts += [(first, to, room, 1), (first + room, to + room, block.row_bytes - room, 1)]
            row += 1
            continue
        # The last row of a chunk needs room for its payload, not for its stride.
        height = min(block.num_rows - row, (room - block.row_bytes) // block.strides[block.host] + 1)
        parts.append((first, to, block.row_bytes, height))
        row += height
    return parts


def _starts(view: PagedCacheView, blocks: torch.Tensor) -> np.ndarray:
    """Byte offset of each block's first row, int64."""
    return np.asarray(blocks.numpy() * view.layout.block_stride + view.layout.offset)


def _block_bytes(layout: PagedLayout) -> int:
    """From the first byte of a block's first row to the last of its last."""
    return (layout.block_size - 1) * layout.row_stride + layout.row_bytes


def _is_host(view: PagedCacheView) -> bool:
    return view.storage.device.type == "cpu"
