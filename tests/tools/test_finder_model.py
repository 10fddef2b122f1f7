"""The training model is the stock model: same parameters, same logits; and its parts agree with each other."""

import pytest
import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from tools.finder.indexer import scores_of
from tools.finder.model import Finder, FinderShape, attend, last_positions, probe_attention
from tools.finder.schedule import FULL

LENGTH = 96


@pytest.fixture
def model(shape: FinderShape) -> Finder:
    return Finder(shape).eval()


def draw_tokens(shape: FinderShape, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, shape.vocab, (batch, LENGTH))


@torch.no_grad()
def test_stock_classes_give_the_same_logits(model: Finder, shape: FinderShape) -> None:
    stock = DeepseekV32ForCausalLM._from_config(DeepseekV32Config(**shape.config()), attn_implementation="eager")
    stock.load_state_dict(model.state_dict(), strict=True)
    tokens = draw_tokens(shape)
    theirs = stock.eval()(tokens).logits
    assert torch.allclose(model.lm_head(model(tokens, shape.topk)[0]), theirs, atol=2e-5)
    # The controls: dense attention and a smaller selection are not the stock model.
    for topk in (0, shape.topk // 2):
        assert not torch.allclose(model.lm_head(model(tokens, topk)[0]), theirs, atol=1e-2)


def test_training_and_evaluation_attend_alike() -> None:
    query, key, value = (torch.randn(2, 4, LENGTH, 32) for _ in range(3))
    # Every row selects itself, others, and positions after it, which do not count.
    own = torch.arange(LENGTH)[None, :, None].expand(2, -1, 1)
    selected = torch.cat([own, torch.rand(2, LENGTH, LENGTH).argsort(-1)[..., :12]], dim=-1)
    duplicate = selected[..., 1:] == own
    selected[..., 1:][duplicate] = LENGTH - 1
    masked = attend(query.requires_grad_(), key, value, selected)
    with torch.no_grad():
        gathered = attend(query, key, value, selected)
        shifted = attend(query, key, value, last_positions(query[:, 0], 13))
    rows = slice(0, LENGTH - 1)
    assert torch.allclose(masked[:, :, rows], gathered[:, :, rows], atol=1e-5)
    assert not torch.allclose(masked[:, :, rows], shifted[:, :, rows], atol=1e-2)


def test_the_selection_is_the_exact_top(model: Finder, shape: FinderShape) -> None:
    indexer = model.blocks[0].self_attn.indexer
    hidden, q_resid = torch.randn(2, LENGTH, shape.hidden), torch.randn(2, LENGTH, shape.q_lora)
    zeros = torch.zeros(LENGTH, shape.rope // 2)
    asked = indexer(hidden, q_resid, zeros + 1, zeros)
    scores = scores_of(asked.queries, asked.weights, asked.keys)
    selected = indexer.select(asked, shape.topk)
    for row in (0, 3, shape.topk, LENGTH - 1):
        visible = scores[:, row, : row + 1]
        best = visible.topk(min(shape.topk, row + 1)).values.sort().values
        for sequence in range(2):
            seen = selected[sequence, row][selected[sequence, row] <= row]
            assert seen.unique().numel() == min(shape.topk, row + 1)
            assert torch.allclose(visible[sequence, seen].sort().values, best[sequence])


def test_the_window_control_sees_the_last_positions_only() -> None:
    window = last_positions(torch.zeros(1, 8, 1), 3)
    assert sorted(window[0, 5].tolist()) == [3, 4, 5]
    assert [position for position in window[0, 1].tolist() if position <= 1] == [1, 0]


def test_the_indexer_loss_moves_indexers_only(model: Finder, shape: FinderShape) -> None:
    probes = torch.tensor([[5, 40], [90, 7]])
    _, loss = model(draw_tokens(shape), 0, probes)
    loss.backward()
    moved = {name for name, values in model.named_parameters() if values.grad is not None and values.grad.any()}
    assert moved
    assert all("indexer" in name for name in moved)


@torch.no_grad()
def test_the_indexer_loss_is_zero_where_the_indexer_says_what_attention_does(model: Finder, shape: FinderShape) -> None:
    indexer = model.blocks[0].self_attn.indexer
    hidden, q_resid = torch.randn(1, LENGTH, shape.hidden), torch.randn(1, LENGTH, shape.q_lora)
    zeros = torch.zeros(LENGTH, shape.rope // 2)
    asked = indexer(hidden, q_resid, zeros + 1, zeros)
    probes = torch.tensor([[50, 95]])
    scores = scores_of(asked.queries, asked.weights, asked.keys)[:, probes[0]]
    future = torch.arange(LENGTH) > probes[0][:, None]
    teacher = scores.masked_fill(future, -torch.inf).softmax(-1)
    assert float(indexer.loss(asked, probes, teacher)) == pytest.approx(0.0, abs=1e-5)
    assert indexer.loss(asked, probes, teacher.flip(1)) > 0.1


def test_probe_attention_is_causal_and_sums_to_one() -> None:
    query, key = torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
    rows = probe_attention(query, key, torch.tensor([[4]]))
    assert float(rows.sum()) == pytest.approx(1.0)
    assert not rows[0, 0, 5:].any()
    whole = (query @ key.transpose(-1, -2)) * 8**-0.5
    assert torch.allclose(rows[0, 0, :5], whole[0, :, 4, :5].softmax(-1).mean(0))


def test_mixed_precision_trains(model: Finder, shape: FinderShape) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        hidden, loss = model(draw_tokens(shape), shape.topk, torch.tensor([[5], [6]]))
        total = model.lm_head(hidden).float().square().mean() + loss
    total.backward()
    assert all(torch.isfinite(values.grad).all() for values in model.parameters() if values.grad is not None)


def test_the_shipped_model_stays_below_twelve_megabytes() -> None:
    with torch.device("meta"):
        numbers = sum(values.numel() for values in Finder(FULL.shape).parameters())
    assert 2 * numbers < 12_000_000
