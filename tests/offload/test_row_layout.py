"""Rows of the region: canonical areas that do not depend on tp, and slots that no two workers share."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import CapacityError, InputError
from hisparse.offload.row_layout import RowLayout

PAGES = st.lists(st.integers(1, 5000), min_size=1, max_size=4)


def covered(layout: RowLayout) -> np.ndarray:
    """How often each byte of a row belongs to a page."""
    rows = np.zeros((2, layout.row_bytes), dtype=np.uint8)
    for slot in range(layout.num_slots):
        for layer in range(len(layout.page_bytes)):
            layout.view(rows, layer, slot)[1] += 1
    assert not rows[0].any(), "a view of one row must not reach into another"
    return rows[1]


@given(PAGES, st.integers(1, 4), st.integers(1, 4))
def test_pages_cover_the_used_part_of_a_row_once(pages: list[int], blocks: int, workers: int) -> None:
    for layout in (RowLayout.canonical(pages, blocks), RowLayout.direct(pages, blocks, workers)):
        count = covered(layout)
        assert (count[: layout.used_bytes] == 1).all()
        assert not count[layout.used_bytes :].any()
        assert layout.used_bytes == sum(pages) * blocks * layout.num_slots
        assert layout.row_bytes % 4096 == 0
        assert layout.row_bytes - layout.used_bytes < 4096


def test_the_blocks_of_a_chunk_lie_side_by_side_in_their_layers_area() -> None:
    layout = RowLayout.canonical([100, 40], blocks_per_chunk=3)
    rows = np.arange(2 * layout.row_bytes, dtype=np.uint32).reshape(2, -1)
    flat = rows.astype(np.uint8)
    view = layout.view(flat, layer=1)
    assert view.shape == (2, 3, 40)
    assert np.shares_memory(view, flat)
    assert np.array_equal(view[1, 2], flat[1, 300 + 80 : 300 + 120])
    assert layout.offset(1) == 300


def test_slots_of_workers_follow_each_other() -> None:
    layout = RowLayout.direct([100, 40], blocks_per_chunk=2, num_workers=3)
    assert [layout.offset(1, slot) for slot in range(3)] == [200, 480, 760]


def test_a_budget_carries_whole_rows_and_at_least_one() -> None:
    layout = RowLayout.canonical([5000])
    assert layout.row_bytes == 8192
    assert layout.num_rows_in(3 * 8192 + 8191) == 3
    with pytest.raises(CapacityError, match="8191 bytes hold no row of the shared region: one takes 8192 bytes"):
        layout.num_rows_in(8191)


def test_rows_that_hold_nothing_and_places_that_are_not_there_are_refused() -> None:
    for pages, blocks, workers in (([], 1, 1), ([0], 1, 1), ([1], 0, 1), ([1], 1, 0)):
        with pytest.raises(InputError, match="every size must be at least 1"):
            RowLayout.direct(pages, blocks, workers)
    layout = RowLayout.direct([1, 2], 1, 2)
    for layer, slot in ((2, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(InputError, match="is not in a row of 2 layers, 2 slots"):
            layout.offset(layer, slot)
