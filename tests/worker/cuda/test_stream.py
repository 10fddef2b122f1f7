"""How blocks become copies: every row exactly once, and no copy across two registrations of host memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import InvariantError
from hisparse.geometry import BlockGeometry
from hisparse.worker.cuda.stream import contiguous_fragments, strided_copies
from hisparse.worker.views import BlockCopies, PagedCacheView, all_layers

NUM_BLOCKS = 6


def make_copies(row_bytes: int, host_stride: int, num_rows: int, *, spill: bool) -> BlockCopies:
    """Four blocks each way. The slab's end is on the `meta` device: any that is not the CPU stands for a GPU."""
    slab, host = BlockGeometry(1, num_rows, row_bytes, row_bytes), BlockGeometry(1, num_rows, row_bytes, host_stride)
    on_device = PagedCacheView.over(
        torch.empty(NUM_BLOCKS * slab.block_stride, dtype=torch.uint8, device="meta"), all_layers(slab, NUM_BLOCKS)
    )
    on_host = PagedCacheView.over(
        torch.zeros(NUM_BLOCKS * host.block_stride, dtype=torch.uint8), all_layers(host, NUM_BLOCKS)
    )
    slab_blocks, host_blocks = torch.tensor([5, 1, 3, 2]), torch.tensor([1, 2, 5, 4])
    if spill:
        return BlockCopies(on_device, on_host, slab_blocks, host_blocks)
    return BlockCopies(on_host, on_device, host_blocks, slab_blocks)


def expected_bytes(copies: BlockCopies) -> dict[int, int]:
    """{destination offset: source offset} of every byte of every row."""
    source, destination = copies.source.layout, copies.destination.layout
    moved: dict[int, int] = {}
    for from_block, to_block in zip(copies.source_blocks.tolist(), copies.destination_blocks.tolist(), strict=True):
        for row in range(source.block_size):
            first = source.row_offset(from_block * source.block_size + row)
            to = destination.row_offset(to_block * source.block_size + row)
            moved.update({to + byte: first + byte for byte in range(source.row_bytes)})
    return moved


def assert_within_chunk(start: int, num_bytes: int, chunk_bytes: int) -> None:
    assert start // chunk_bytes == (start + num_bytes - 1) // chunk_bytes


def offset(address: int, view: PagedCacheView) -> int:
    return address - view.storage.data_ptr()


@given(
    row_words=st.integers(1, 6),
    num_rows=st.integers(1, 5),
    chunk_words=st.integers(1, 40),
    spill=st.booleans(),
)
def test_contiguous_fragments_are_the_blocks_cut_at_chunks(
    row_words: int, num_rows: int, chunk_words: int, spill: bool
) -> None:
    chunk = 16 * chunk_words
    copies = make_copies(16 * row_words, 16 * row_words, num_rows, spill=spill)
    fragments = contiguous_fragments(copies, chunk)
    moved: dict[int, int] = {}
    for source, destination, size in zip(
        *(column.tolist() for column in (fragments.sources, fragments.destinations, fragments.num_bytes)), strict=True
    ):
        first, to = offset(source, copies.source), offset(destination, copies.destination)
        assert_within_chunk(to if spill else first, size, chunk)
        moved.update({to + byte: first + byte for byte in range(size)})
    assert fragments.num_bytes.sum() == len(moved), "a byte was copied twice"
    assert moved == expected_bytes(copies)


@given(
    row_words=st.integers(1, 6),
    gap_words=st.integers(1, 4),
    num_rows=st.integers(1, 5),
    chunk_words=st.integers(1, 40),
    spill=st.booleans(),
)
def test_strided_copies_are_the_rows_cut_at_chunks(
    row_words: int, gap_words: int, num_rows: int, chunk_words: int, spill: bool
) -> None:
    row_bytes, chunk = 16 * row_words, 16 * chunk_words
    if chunk < row_bytes:
        return
    copies = make_copies(row_bytes, row_bytes + 16 * gap_words, num_rows, spill=spill)
    moved: dict[int, int] = {}
    total = 0
    shapes = strided_copies(copies, chunk)
    columns = (shapes.sources, shapes.destinations, shapes.widths, shapes.heights)
    for source, destination, width, height in zip(*columns, strict=True):
        first, to = offset(source, copies.source), offset(destination, copies.destination)
        host_start, host_pitch = (to, shapes.destination_pitch) if spill else (first, shapes.source_pitch)
        assert_within_chunk(host_start, (height - 1) * host_pitch + width, chunk)
        for row in range(height):
            for byte in range(width):
                moved[to + row * shapes.destination_pitch + byte] = first + row * shapes.source_pitch + byte
        total += height * width
    assert total == len(moved), "a byte was copied twice"
    assert moved == expected_bytes(copies)


def test_blocks_that_do_not_lie_alike_are_no_contiguous_copies() -> None:
    with pytest.raises(InvariantError, match="do not lie alike"):
        contiguous_fragments(make_copies(32, 48, 2, spill=True), 1 << 20)
