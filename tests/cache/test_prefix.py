"""Prefix keys name exactly what the KV of a page depends on."""

from array import array

import hypothesis.strategies as st
from hypothesis import given

from hisparse.cache.prefix import KEY_BYTES, extend_keys, page_keys, root_key

TOKENS = st.lists(st.integers(0, 3), max_size=40)
ROOT = root_key("model", "float32", 4)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_keys_agree_exactly_as_far_as_whole_pages_do(one: list[int], other: list[int], block_size: int) -> None:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    keys, others = page_keys(one, block_size, ROOT), page_keys(other, block_size, ROOT)
    agree = sum(a == b for a, b in zip(keys, others, strict=False))
    assert agree == min(shared // block_size, len(keys), len(others))
    assert len(keys) == len(one) // block_size
    assert all(len(key) == KEY_BYTES for key in keys)


@given(TOKENS, st.integers(0, 10))
def test_keys_grow_with_the_tokens(tokens: list[int], cut: int) -> None:
    column = array("i", tokens)
    keys: list[bytes] = []
    for num_pages in sorted({min(cut, len(tokens) // 4), len(tokens) // 4}):
        extend_keys(keys, column, 4, num_pages, ROOT)
    assert keys == page_keys(tokens, 4, ROOT)


def test_everything_the_root_names_changes_every_key() -> None:
    roots = [
        root_key("model", "float32", 4),
        root_key("model", "bfloat16", 4),
        root_key("model", "float32", 8),
        root_key("modelfloat32", 4),
        root_key("model", "float32", 4, salt=b"tenant"),
    ]
    keys = [page_keys(range(8), 4, root)[1] for root in roots]
    assert len(set(keys)) == len(roots)
