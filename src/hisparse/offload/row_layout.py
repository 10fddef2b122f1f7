"""What lies where in a row of the shared region: canonical pages, or one slot for each worker.

A row holds one chunk: `blocks_per_chunk` consecutive blocks of one request, all layers of them. Rows start on system
pages, so that a row can be written to a file without passing through the page cache.

Canonical: every layer has one area, which all workers share. Each writes the bytes that its mapping names.

            ┌──────── canonical bytes ────────┬─ unused ─┐   two blocks per chunk, three layers
    row 0   │ a0 a1   │ b0 b1   │ c0 c1       │          │   a0: layer a's page of the chunk's block 0
    row 1   │ a0 a1   │ b0 b1   │ c0 c1       │          │
            ↑ offset(0) ↑ offset(1) ↑ offset(2)          row_bytes: a multiple of 4096, the same for every tp

Direct: every worker has a slot of its own, and its pages lie in it as the worker has them.

            ┌───── slot of worker 0 ─────┬───── slot of worker 1 ─────┬─ unused ─┐
    row 0   │ a0 a1   │ b0 b1   │ c0 c1  │ a0 a1   │ b0 b1   │ c0 c1  │          │
    row 1   │ a0 a1   │ b0 b1   │ c0 c1  │ a0 a1   │ b0 b1   │ c0 c1  │          │
            ↑ offset(0, 0)               ↑ offset(0, 1)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hisparse.errors import CapacityError, InputError
from hisparse.geometry import align_up

ROW_ALIGNMENT_BYTES = 4096
"""Rows start on multiples of this, in memory and in files."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where each layer's pages of a chunk lie in a row. Use `canonical` or `direct` to make one.

    `page_bytes[l]`: one block's page of layer l. `num_slots`: slots of workers, 1 where all workers share the pages.
    """

    page_bytes: tuple[int, ...]
    blocks_per_chunk: int
    num_slots: int
    layer_offsets: tuple[int, ...]
    row_bytes: int

    @classmethod
    def canonical(cls, page_bytes: Sequence[int], blocks_per_chunk: int = 1) -> "RowLayout":
        """`page_bytes[l]`: layer l's canonical page. Raises `InputError` for a size below 1."""
        return cls._lay_out(page_bytes, blocks_per_chunk, 1)

    @classmethod
    def direct(cls, page_bytes: Sequence[int], blocks_per_chunk: int, num_workers: int) -> "RowLayout":
        """`page_bytes[l]`: layer l's page of one worker. Raises `InputError` for a size below 1."""
        return cls._lay_out(page_bytes, blocks_per_chunk, num_workers)

    @classmethod
    def _lay_out(cls, page_bytes: Sequence[int], blocks_per_chunk: int, num_slots: int) -> "RowLayout":
        sizes = (*page_bytes, blocks_per_chunk, num_slots)
        if not page_bytes or min(sizes) < 1:
            raise InputError(
                f"a row of {num_slots} slots of {blocks_per_chunk} blocks with pages of {list(page_bytes)} bytes "
                "holds nothing: every size must be at least 1"
            )
        *offsets, slot_bytes = accumulate((size * blocks_per_chunk for size in page_bytes), initial=0)
        row_bytes = align_up(slot_bytes * num_slots, ROW_ALIGNMENT_BYTES)
        return cls(tuple(page_bytes), blocks_per_chunk, num_slots, tuple(offsets), row_bytes)

    @property
    def slot_bytes(self) -> int:
        """From one worker's slot to the next; all of the row that is used, where workers share it."""
        return self.layer_offsets[-1] + self.page_bytes[-1] * self.blocks_per_chunk

    @property
    def used_bytes(self) -> int:
        """What of a row is data."""
        return self.slot_bytes * self.num_slots

    def offset(self, layer: int, slot: int = 0) -> int:
        """Byte of a row at which a layer's page of the chunk's first block starts, in the slot of a worker.

        Raises `InputError` when there is no such layer or slot.
        """
        if not 0 <= layer < len(self.page_bytes) or not 0 <= slot < self.num_slots:
            raise InputError(
                f"layer {layer} in slot {slot} is not in a row of {len(self.page_bytes)} layers, {self.num_slots} slots"
            )
        return slot * self.slot_bytes + self.layer_offsets[layer]

    def num_rows_in(self, budget_bytes: int) -> int:
        """Rows that a budget carries. Raises `CapacityError` when it carries none."""
        if budget_bytes < self.row_bytes:
            raise CapacityError(
                f"{budget_bytes} bytes hold no row of the shared region: one takes {self.row_bytes} bytes"
            )
        return budget_bytes // self.row_bytes

    def view(self, rows: np.ndarray, layer: int, slot: int = 0) -> np.ndarray:
        """A layer's pages of every chunk: uint8 `[num_rows, blocks_per_chunk, page_bytes]`, strided, no copy.

        `rows`: uint8 `[num_rows, row_bytes]`, as `SharedRegion.rows` has them.
        """
        start, size = self.offset(layer, slot), self.page_bytes[layer]
        area = rows[:, start : start + size * self.blocks_per_chunk]
        return np.lib.stride_tricks.as_strided(
            area, (len(rows), self.blocks_per_chunk, size), (rows.strides[0], size, 1), writeable=rows.flags.writeable
        )
