"""Copies of scattered rows between two paged allocations, in plain torch."""

import math
from dataclasses import dataclass

import torch

from hisparse.errors import InvariantError
from hisparse.geometry import PagedLayout
from hisparse.kernels.contract import PagedRows

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class _RowMatrix:
    """A layer's rows as a matrix of words whose line `i` starts at byte `i * unit`.

    `unit` divides the start of every row of the layer, so each row is one line and one flat index selects it; torch
    copies whole lines several times faster than it follows a (block, row) pair of indices. Lines overlap where rows
    of other layers lie between; only lines that are rows are ever touched.
    """

    words: torch.Tensor
    layout: PagedLayout
    unit: int

    def lines(self, physical_rows: torch.Tensor) -> torch.Tensor:
        """The line of each physical row, int64, on the device of the matrix."""
        layout = self.layout
        block = torch.div(physical_rows, layout.block_size, rounding_mode="floor")
        row = physical_rows - block * layout.block_size
        start = layout.offset + block * layout.block_stride + row * layout.row_stride
        return torch.div(start, self.unit, rounding_mode="floor").to(self.words.device)


def copy_rows(
    source_rows: torch.Tensor, destination_rows: torch.Tensor, source: PagedRows, destination: PagedRows
) -> None:
    """Copy `source_rows[i]` of `source` to `destination_rows[i]` of `destination`, payload bytes only.

    Both are int64 `[n]` physical rows on one device, which need not be that of either allocation. Destination rows
    are distinct. Raises `InvariantError` when the two layouts disagree on the size of a row, and `IndexError` for a
    row outside its allocation.
    """
    if source.layout.row_bytes != destination.layout.row_bytes:
        raise InvariantError(
            f"rows of {source.layout.row_bytes} bytes cannot be copied to rows of {destination.layout.row_bytes} bytes"
        )
    word_bytes = min(_word_bytes(source), _word_bytes(destination))
    take, put = _matrix(source, word_bytes), _matrix(destination, word_bytes)
    values = take.words.index_select(0, take.lines(source_rows))
    put.words.index_copy_(0, put.lines(destination_rows), values.to(put.words.device))


def _unit(layout: PagedLayout) -> int:
    return math.gcd(layout.offset, layout.block_stride, layout.row_stride)


def _word_bytes(rows: PagedRows) -> int:
    """The widest word that every row of the layer starts on and is made of."""
    common = math.gcd(_unit(rows.layout), rows.layout.row_bytes, rows.storage.storage_offset(), max(_WORDS))
    return max(word for word in _WORDS if common % word == 0)


def _matrix(rows: PagedRows, word_bytes: int) -> _RowMatrix:
    layout, storage = rows.layout, rows.storage
    unit = _unit(layout)
    whole = storage[: storage.numel() - storage.numel() % word_bytes].view(_WORDS[word_bytes])
    num_lines = (layout.end_bytes - layout.row_bytes) // unit + 1
    words = whole.as_strided((num_lines, layout.row_bytes // word_bytes), (unit // word_bytes, 1))
    return _RowMatrix(words, layout, unit)
