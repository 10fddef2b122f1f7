"""The CPU copies exactly the pieces of a run, of all pages, whatever their size, stride and alignment."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.offload import run_copy
from hisparse.offload.run_copy import LARGE_BYTES, copy_run


def check(pages: list[tuple[int, int]], size: int, count: int, strides: tuple[int, int]) -> None:
    """Copy the pages `(source, destination)`, both ways of a stride included, and compare all of the memory."""
    reach = [abs(stride) * (count - 1) for stride in strides]
    ends = [max(page[end] for page in pages) + size + 2 * reach[end] for end in (0, 1)]
    source = np.random.default_rng(1).integers(0, 256, ends[0], dtype=np.uint8)
    destination = np.full(ends[1], 255, dtype=np.uint8)
    expected = destination.copy()
    # A negative stride starts at its far end.
    starts = [[page[end] + (reach[end] if strides[end] < 0 else 0) for page in pages] for end in (0, 1)]
    for start, to in zip(*starts, strict=True):
        for piece in range(count):
            taken = source[start + piece * strides[0] :][:size]
            expected[to + piece * strides[1] :][:size] = taken
    addresses = [
        np.array(begin, dtype=np.uint64) + np.uint64(memory.ctypes.data)
        for begin, memory in zip(starts, (source, destination), strict=True)
    ]
    copy_run(*addresses, size, count, *strides)
    assert np.array_equal(destination, expected)


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 5)), min_size=1, max_size=20),
    st.sampled_from([1, 3, 16, 100]),
    st.integers(1, 5),
    st.tuples(st.integers(-150, 150), st.integers(100, 110)),
    st.randoms(use_true_random=False),
)
def test_pieces_of_any_size_stride_and_order_are_copied_and_nothing_else(
    drawn: list[tuple[int, int]], size: int, count: int, strides: tuple[int, int], random: object
) -> None:
    pages, to = [], 0
    for start, gap in drawn:
        pages.append((start, to + gap))
        to += gap + count * 110
    random.shuffle(pages)  # type: ignore[attr-defined]
    check(pages, size, count, strides)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("page_bytes", [LARGE_BYTES - 4, LARGE_BYTES, LARGE_BYTES + 4, 300 << 10])
def test_large_pages_are_copied_on_both_sides_of_the_limit(page_bytes: int, count: int) -> None:
    size = page_bytes // count
    check([(i * 7, (5 - i) * 3 * page_bytes) for i in range(6)], size, count, (size, -2 * size))


def test_more_than_one_batch_is_copied_whole() -> None:
    num = 2 * run_copy._BATCH_BYTES // 512 + 3
    check([(index * 3, index * 1024) for index in range(num)], 64, 8, (64, 128))


def test_no_pages_are_fine() -> None:
    copy_run(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint64), 8, 1, 0, 0)


@pytest.mark.parametrize(("size", "count"), [(64, 1), (64, 32), (256, 32)])
def test_many_small_fragments_take_no_python_each(size: int, count: int) -> None:
    """A loop in Python takes 800 ns a fragment; with room for a loaded machine, a fifth of that is allowed."""
    num = (8 << 20) // (size * count)
    source, destination = np.ones(8 << 20, dtype=np.uint8), np.zeros(16 << 20, dtype=np.uint8)
    index = np.arange(num, dtype=np.uint64) * np.uint64(size * count)
    ends = (index + np.uint64(source.ctypes.data), index * np.uint64(2) + np.uint64(destination.ctypes.data))
    copy_run(*ends, size, count, size, 2 * size)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        copy_run(*ends, size, count, size, 2 * size)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) / (num * count) < 160e-9
    assert destination.reshape(-1, 2 * size)[:, :size].all()
    assert not destination.reshape(-1, 2 * size)[:, size:].any()
