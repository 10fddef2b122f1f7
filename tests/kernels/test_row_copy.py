"""Rows are copied whole and alone, whatever the alignment of the two allocations."""

import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.geometry import PagedLayout
from hisparse.kernels.row_copy import copy_rows
from hisparse.testing.resolver_cases import LayerRows

BLOCKS, BLOCK_SIZE, ROW = 5, 4, 48


def rows_with(offset: int, stride: int, *, shift: int = 0, tail: int = 0) -> LayerRows:
    """Random rows in an allocation whose start is `shift` bytes into its storage and whose end is `tail` bytes late."""
    layout = PagedLayout(offset, offset + BLOCK_SIZE * stride, stride, ROW, BLOCK_SIZE, BLOCKS)
    num_bytes = BLOCKS * layout.block_stride + tail
    return LayerRows(torch.randint(0, 256, (shift + num_bytes,), dtype=torch.uint8)[shift:], layout)


def copied_slowly(source: LayerRows, destination: LayerRows, pairs: list[tuple[int, int]]) -> torch.Tensor:
    expected = destination.storage.clone()
    for take, put in pairs:
        start, end = source.layout.row_offset(take), destination.layout.row_offset(put)
        expected[end : end + ROW] = source.storage[start : start + ROW]
    return expected


@pytest.mark.parametrize("shift", [0, 1, 4, 8])
@pytest.mark.parametrize(("offset", "stride"), [(0, 48), (16, 128), (3, 50), (4, 52)])
@pytest.mark.parametrize("tail", [0, 5])
def test_named_rows_are_copied_and_nothing_else(offset: int, stride: int, shift: int, tail: int) -> None:
    source, destination = rows_with(offset, stride, shift=shift, tail=tail), rows_with(32, 64)
    pairs = [(4, 19), (19, 0), (7, 5), (7, 6), (0, 11)]
    for take_from, put_to in ((source, destination), (destination, source)):
        expected = copied_slowly(take_from, put_to, pairs)
        assert not torch.equal(put_to.storage, expected)
        takes, puts = torch.tensor(pairs).T
        copy_rows(takes, puts, take_from, put_to)
        assert torch.equal(put_to.storage, expected)


def test_no_rows_are_no_copy() -> None:
    source, destination = rows_with(0, 48), rows_with(0, 48)
    before = destination.storage.clone()
    copy_rows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), source, destination)
    assert torch.equal(destination.storage, before)


def test_rows_of_two_sizes_are_refused() -> None:
    wide = LayerRows(torch.zeros(4096, dtype=torch.uint8), PagedLayout(0, 256, 64, 64, 4, 2))
    with pytest.raises(InvariantError, match="rows of 48 bytes cannot be copied to rows of 64 bytes"):
        copy_rows(torch.tensor([4]), torch.tensor([4]), rows_with(0, 48), wide)


@pytest.mark.parametrize("row", [-1, BLOCKS * BLOCK_SIZE])
def test_a_row_outside_its_allocation_is_refused(row: int) -> None:
    with pytest.raises(IndexError):
        copy_rows(torch.tensor([row]), torch.tensor([4]), rows_with(0, 48), rows_with(0, 48))
    with pytest.raises(IndexError):
        copy_rows(torch.tensor([4]), torch.tensor([row]), rows_with(0, 48), rows_with(0, 48))
