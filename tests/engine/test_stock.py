"""The reference is stock: only ties are settled, only inside its indexers, and it leaves the loaded model alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hisparse.engine.hooks import DsaModelRunner
from hisparse.engine.models import LoadedModel
from hisparse.engine.sampler import SamplingParams, sample
from hisparse.engine.stock import LowestPositionTies, round_latents, stock_generate, stock_model
from hisparse.kernels.fp8_rows import pack_rows, unpack_rows

PROMPT = list(b"Equal scores are common where a rectifier has cut them off at zero.")
GREEDY = SamplingParams()


def tied_scores() -> tuple[torch.Tensor, torch.Tensor]:
    """Scores `[50, 90]` of four values, and the sorted 20 positions that a stable sort selects of each row."""
    scores = torch.randint(0, 4, (50, 90), generator=torch.Generator().manual_seed(0)).float()
    return scores, scores.sort(dim=-1, descending=True, stable=True).indices[:, :20].sort().values


def test_inside_the_rule_equal_scores_go_to_the_lowest_position() -> None:
    scores, expected = tied_scores()
    with LowestPositionTies():
        chosen = scores.topk(20, dim=-1)
    assert torch.equal(chosen.indices.sort().values, expected)
    assert torch.equal(chosen.values, scores.topk(20, dim=-1).values)


def test_control_without_the_rule_topk_chooses_otherwise() -> None:
    scores, expected = tied_scores()
    assert not torch.equal(scores.topk(20, dim=-1).indices.sort().values, expected)


def test_rounded_latents_are_what_packed_rows_say() -> None:
    rows = torch.randn(40, 576) * torch.logspace(-3, 3, 40).unsqueeze(1)
    rows[:, 7:512:128] *= 2.0 ** torch.arange(40).unsqueeze(1).remainder(12)  # the others are small beside it
    said = unpack_rows(pack_rows(rows))[:, :512]
    assert torch.equal(round_latents(rows[:, :512]), said)
    assert not torch.equal(rows[:, :512], said)
    assert not round_latents(torch.zeros(1, 512)).any()


def test_the_rule_may_ask_for_as_many_as_there_are() -> None:
    with LowestPositionTies():
        assert sorted(torch.zeros((2, 5)).topk(5).indices[1].tolist()) == [0, 1, 2, 3, 4]


def test_only_the_indexer_sees_the_rule(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ruled: list[tuple[int, ...]] = []
    stock = torch.topk

    def spy(scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ruled.append(tuple(scores.shape))
        return stock(scores, *args, **kwargs)

    monkeypatch.setattr("hisparse.engine.stock.torch.topk", spy)
    model = stock_model(tiny)
    with torch.no_grad():
        model(torch.tensor([PROMPT]))
    routers = [shape for shape in ruled if shape[-1] == tiny.config.n_routed_experts]
    indexers = [shape for shape in ruled if shape == (1, len(PROMPT), len(PROMPT))]
    assert len(indexers) == len(tiny.geometry.leaders)
    assert len(routers) == sum(kind == "sparse" for kind in tiny.config.mlp_layer_types), "the router's own calls"


def test_the_reference_does_not_carry_the_hooks_of_the_loaded_model(
    tiny: LoadedModel, make_worker: Callable[[LoadedModel], Any]
) -> None:
    with torch.no_grad():
        expected = tiny.model(torch.tensor([PROMPT])).logits
        with DsaModelRunner(tiny, make_worker(tiny)):
            reference = stock_model(tiny)
            assert reference.config._attn_implementation == "eager"
            torch.testing.assert_close(reference(torch.tensor([PROMPT])).logits, expected, atol=1e-6, rtol=0)


def test_generation_gives_one_row_of_logits_per_token_and_takes_the_best(tiny: LoadedModel) -> None:
    run = stock_generate(stock_model(tiny), PROMPT, GREEDY, 6)
    assert run.logits.shape == (6, 256)
    assert run.logits.dtype == torch.float32
    assert tuple(run.logits.argmax(-1).tolist()) == run.tokens


def test_a_sampled_reference_draws_with_our_sampler_from_its_own_logits(tiny: LoadedModel) -> None:
    params = SamplingParams(temperature=2.0, top_k=50, seed=11)
    run = stock_generate(stock_model(tiny), PROMPT, params, 8)
    assert list(run.tokens) == sample(run.logits, [params] * 8, range(8))
    assert run.tokens != stock_generate(stock_model(tiny), PROMPT, GREEDY, 8).tokens


def test_generation_stops_after_an_end_token(tiny: LoadedModel) -> None:
    model = stock_model(tiny)
    tokens = stock_generate(model, PROMPT, GREEDY, 8).tokens
    end = tokens[3]
    assert stock_generate(model, PROMPT, GREEDY, 8, end_tokens=[end]).tokens == tokens[: tokens.index(end) + 1]


def test_chunks_of_the_reference_prefill_change_nothing_that_matters(tiny: LoadedModel) -> None:
    prompt = PROMPT * 5
    run = stock_generate(stock_model(tiny), prompt, GREEDY, 1)
    with torch.no_grad():
        whole = stock_model(tiny)(torch.tensor([prompt])).logits[0, -1:]
    torch.testing.assert_close(run.logits, whole, atol=2e-5, rtol=0)
