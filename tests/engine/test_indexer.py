"""The selection is exact, its ties are settled, and it does not depend on how rows are cut into blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.engine import indexer
from hisparse.engine.batch import PrefillSegment
from hisparse.engine.indexer import (
    IndexQueries,
    index_scores,
    select_segment,
    select_topk,
    topk_by_key,
    topk_by_score,
)

INF = float("inf")


def naive_topk(scores: list[float], k: int) -> list[int]:
    """Sort by score, then position; take k of what is visible; give them in ascending order."""
    visible = [position for position, score in enumerate(scores) if score != -INF]
    best = sorted(visible, key=lambda position: (-scores[position], position))[:k]
    return sorted(best) + [-1] * (k - len(best))


def select_by_key(scores: torch.Tensor, k: int) -> torch.Tensor:
    """`select_topk` as it is on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer, "topk_by_score", topk_by_key)
        return select_topk(scores, k)


few_values = st.sampled_from([-INF, -2.5, -1.0, -0.0, 0.0, 1e-40, 0.5, 0.5000001, 3.0, 1e30])
any_value = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.just(-INF)


@st.composite
def score_rows(draw: st.DrawFn) -> torch.Tensor:
    """Rows of few values, of any, of one value alone, and causal ones, in which little is visible."""
    context = draw(st.integers(1, 40))
    row = st.one_of(
        st.lists(few_values, min_size=context, max_size=context),
        st.lists(any_value, min_size=context, max_size=context),
        few_values.map(lambda value: [value] * context),
        st.tuples(few_values, st.integers(0, context)).map(lambda r: [r[0]] * r[1] + [-INF] * (context - r[1])),
    )
    return torch.tensor(draw(st.lists(row, min_size=1, max_size=4)))


@settings(max_examples=300, deadline=None)
@given(scores=score_rows(), k=st.integers(1, 45))
def test_selection_equals_a_stable_sort(scores: torch.Tensor, k: int) -> None:
    expected = [naive_topk(line, k) for line in scores.tolist()]
    assert select_topk(scores, k).tolist() == expected
    assert select_by_key(scores, k).tolist() == expected


def test_control_without_settling_ties_the_selection_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randint(0, 3, (20, 400), generator=torch.Generator().manual_seed(0)).float()
    expected = [naive_topk(line, 50) for line in scores.tolist()]
    assert select_topk(scores, 50).tolist() == expected

    def any_of_the_tied(tied: torch.Tensor, lowest: torch.Tensor, k: int) -> torch.Tensor:
        return tied.topk(k, dim=-1).indices.int()

    def last_of_the_tied(tied: torch.Tensor, lowest: torch.Tensor, k: int) -> torch.Tensor:
        return (tied.shape[1] - 1 - settle(tied.flip(1), lowest, k)).int()

    settle = indexer._settle_ties
    for broken in (any_of_the_tied, last_of_the_tied):
        monkeypatch.setattr(indexer, "_settle_ties", broken)
        assert select_topk(scores, 50).tolist() != expected


def test_rows_without_a_tie_at_the_edge_are_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    settle = indexer._settle_ties

    def count(tied: torch.Tensor, lowest: torch.Tensor, k: int) -> torch.Tensor:
        settled.append(tied.shape[0])
        return settle(tied, lowest, k)

    monkeypatch.setattr(indexer, "_settle_ties", count)
    # Tied above the edge, below it, across it, at it but all selected, and all hidden.
    scores = [[2.0, 2, 1, 0], [2.0, 1, 0, 0], [2.0, 1, 1, 0], [1.0, 1, -INF, -INF], [-INF] * 4]
    topk_by_score(torch.tensor(scores), 2)
    assert settled == [1]


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


@pytest.mark.parametrize(("heads", "dim"), [(1, 48), (16, 24), (64, 16)])
def test_a_score_s_bits_depend_neither_on_how_many_keys_there_are_nor_on_tiles(heads: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    asked, keys = torch.randn((40, heads, dim), generator=generator), torch.randn((1600, dim), generator=generator)
    weights = torch.randn((40, heads), generator=generator)
    products = torch.matmul(asked, keys.T).mul_(0.3).relu_()
    whole = torch.matmul(weights.unsqueeze(1), products)[:, 0]
    for context in (1, 17, 25, 511, 513, 1025, 1599, 1600):
        for tile_bytes in (1, indexer.TILE_BYTES):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(indexer, "TILE_BYTES", tile_bytes)
                scores = index_scores(asked, weights, keys[:context], 0.3)
            assert torch.equal(scores, whole[:, :context]), (context, tile_bytes)


def test_no_block_is_much_smaller_than_the_others() -> None:
    assert indexer._even_parts(10, 4) == [(0, 3), (3, 6), (6, 10)]
    for total in range(1, 60):
        sizes = [end - start for start, end in indexer._even_parts(total, 7)]
        assert sum(sizes) == total
        assert max(sizes) <= 7
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("rows_per_block", [1, 7, 64])
def test_blocks_of_any_size_select_the_same_on_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, rows_per_block: int, num_threads: int
) -> None:
    asked, keys = queries(50, 200)
    segment = PrefillSegment(first_row=0, num_rows=50, slot=0, context_end=200)
    whole = select_segment(asked, keys, segment, 0.2, 16)
    sizes: list[int] = []

    def record(scores: torch.Tensor, k: int) -> torch.Tensor:
        sizes.append(scores.shape[0])
        return select_topk(scores, k)

    monkeypatch.setattr(indexer, "select_topk", record)
    monkeypatch.setattr(indexer, "BLOCK_ROWS", rows_per_block)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(select_segment(asked, keys, segment, 0.2, 16), whole)
    finally:
        torch.set_num_threads(before)
    assert max(sizes) <= rows_per_block
    assert sum(sizes) == 50


def test_a_block_s_scores_are_bounded_however_long_the_context() -> None:
    assert indexer._block_rows(16, 8192) == 64
    assert indexer._block_rows(1, 1 << 20) * (4 << 20) <= indexer.BLOCK_BYTES
    assert indexer._block_rows(128, 1 << 30) == 1


def test_a_row_selects_nothing_after_itself_and_everything_before_while_that_is_few() -> None:
    asked, keys = queries(40, 40)
    segment = PrefillSegment(first_row=0, num_rows=40, slot=0, context_end=40)
    selected = select_segment(asked, keys, segment, 0.2, 8)
    assert bool((selected <= torch.arange(40).unsqueeze(1)).all())
    for position in range(8):
        assert selected[position].tolist() == [*range(position + 1), *[-1] * (7 - position)]
