"""The selection is exact, its ties are settled, and it does not depend on how rows are cut into blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.engine import indexer
from hisparse.engine.batch import PrefillSegment
from hisparse.engine.indexer import IndexQueries, index_scores, select_segment, select_topk

INF = float("inf")


def naive_topk(scores: list[float], k: int) -> list[int]:
    """Sort by score, then position; take k of what is visible; give them in ascending order."""
    visible = [position for position, score in enumerate(scores) if score != -INF]
    best = sorted(visible, key=lambda position: (-scores[position], position))[:k]
    return sorted(best) + [-1] * (k - len(best))


few_values = st.sampled_from([-INF, -2.5, -1.0, -0.0, 0.0, 1e-40, 0.5, 0.5000001, 3.0, 1e30])
any_value = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.just(-INF)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), rows=st.integers(1, 4), context=st.integers(1, 40), k=st.integers(1, 45))
def test_selection_equals_a_stable_sort(data: st.DataObject, rows: int, context: int, k: int) -> None:
    row = st.lists(few_values, min_size=context, max_size=context) | st.lists(
        any_value, min_size=context, max_size=context
    )
    scores = data.draw(st.lists(row, min_size=rows, max_size=rows))
    expected = [naive_topk(line, k) for line in torch.tensor(scores).tolist()]
    assert select_topk(torch.tensor(scores), k).tolist() == expected


def test_control_the_other_tie_rule_gives_another_selection() -> None:
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    highest = 3 - select_topk(scores.flip(1), 2)
    assert select_topk(scores, 2).tolist() == [[0, 1]]
    assert sorted(highest[0].tolist()) == [0, 3]


def test_minus_zero_ties_with_zero() -> None:
    assert select_topk(torch.tensor([[-0.0, 0.0, 0.0]]), 1).tolist() == [[0]]


def test_positions_that_are_not_visible_are_never_selected() -> None:
    scores = torch.tensor([[0.5, -INF, -3.0, -INF]])
    selected = select_topk(scores, 3)
    assert selected.tolist() == [[0, 2, -1]]
    assert selected.dtype == torch.int32


def queries(rows: int, context: int) -> tuple[IndexQueries, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    asked = IndexQueries(
        queries=torch.randn((rows, 16, 24), generator=generator),
        weights=torch.randn((rows, 16), generator=generator),
        keys=torch.empty(rows, 24),
    )
    return asked, torch.randn((context, 24), generator=generator)


def test_scores_follow_their_formula() -> None:
    asked, keys = queries(5, 33)
    dots = torch.einsum("thd,sd->ths", asked.queries.double(), keys.double())
    expected = (asked.weights.double().unsqueeze(-1) * (0.3 * dots).relu()).sum(1)
    scores = index_scores(asked.queries, asked.weights, keys, 0.3).double()
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows_per_block", [1, 7, 64])
def test_blocks_of_any_size_select_the_same(monkeypatch: pytest.MonkeyPatch, rows_per_block: int) -> None:
    asked, keys = queries(50, 200)
    segment = PrefillSegment(first_row=0, num_rows=50, slot=0, context_end=200)
    whole = select_segment(asked, keys, segment, 0.2, 16)
    monkeypatch.setattr(indexer, "SCORE_BLOCK_BYTES", rows_per_block * 4 * 16 * 200)
    assert torch.equal(select_segment(asked, keys, segment, 0.2, 16), whole)


def test_a_row_selects_nothing_after_itself_and_everything_before_while_that_is_few() -> None:
    asked, keys = queries(40, 40)
    segment = PrefillSegment(first_row=0, num_rows=40, slot=0, context_end=40)
    selected = select_segment(asked, keys, segment, 0.2, 8)
    assert bool((selected <= torch.arange(40).unsqueeze(1)).all())
    for position in range(8):
        assert selected[position].tolist() == [*range(position + 1), *[-1] * (7 - position)]
