"""Verification compares with two other runs, and says where a wrong token is and how far a wrong logit is off."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hisparse.engine import Engine, EngineConfig, LoadedModel, RequestResult, SamplingParams
from hisparse.engine.verify import LOGIT_BOUNDS, VerifyResult, verify
from hisparse.errors import InvariantError
from tests.engine.parity import prompt, slab_bytes

PROMPTS = [prompt(seed, 130 + seed) for seed in range(2)]
NUM_TOKENS = 8
PARAMS = [SamplingParams(max_tokens=NUM_TOKENS), SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=2)]


class Run:
    """An engine's results, and what verification says of them once they were tampered with."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.config = EngineConfig(
            max_tokens=256, slab_bytes=slab_bytes(loaded, 16, 2), host_pool_bytes=4 << 20, block_size=16,
            keep_logits=True, copy_delay=2,
        )  # fmt: skip
        with Engine(loaded, self.config) as engine:
            for ids, params in zip(PROMPTS, PARAMS, strict=True):
                engine.add_request(ids, params)
            for _ in engine.run():
                pass
            self.results = engine.results()
            assert engine.stats().spills > 0

    def verify(self, results: Sequence[RequestResult]) -> VerifyResult:
        return verify(self.loaded, PROMPTS, PARAMS, self.config, results)

    def tampered(self, request: int, **changes: Any) -> VerifyResult:
        results = list(self.results)
        results[request] = replace(results[request], **changes)
        return self.verify(results)


@pytest.fixture(scope="module")
def outcome(tiny: LoadedModel) -> Run:
    return Run(tiny)


def test_a_sound_run_is_identical_and_says_what_it_was_compared_with(outcome: Run) -> None:
    told: list[tuple[str, int, int]] = []
    result = verify(
        outcome.loaded, PROMPTS, PARAMS, outcome.config, outcome.results, lambda *progress: told.append(progress)
    )
    assert result.identical
    assert result.mismatches == ()
    assert 0 < result.max_logit_diff < 2e-5
    assert result.resident_logit_diff < 2e-5
    assert result.relative_logit_diff <= LOGIT_BOUNDS[torch.float32]
    assert "transformers" in result.reference
    assert told[-1] == ("stock", 2, 2)
    assert ("resident", 2, 2) in told


@pytest.mark.parametrize("request_index", [0, 1])
def test_a_changed_token_is_found_where_it_is(outcome: Run, request_index: int) -> None:
    tokens = list(outcome.results[request_index].output_ids)
    right, tokens[5] = tokens[5], (tokens[5] + 1) % 256
    result = outcome.tampered(request_index, output_ids=tuple(tokens))
    assert not result.identical
    assert {mismatch.reference for mismatch in result.mismatches} == {"resident", "stock"}
    for mismatch in result.mismatches:
        assert mismatch.request_id == outcome.results[request_index].request_id
        assert (mismatch.position, mismatch.expected, mismatch.found) == (5, right, tokens[5])


def test_one_wrong_logit_shows_in_the_largest_difference(outcome: Run) -> None:
    logits = [row.clone() for row in outcome.results[0].logits]
    logits[3][17] += 0.5
    result = outcome.tampered(0, logits=tuple(logits))
    assert result.max_logit_diff == pytest.approx(0.5, abs=1e-4)
    assert result.resident_logit_diff == pytest.approx(0.5, abs=1e-4)
    assert not result.identical


def test_wrong_logits_under_right_tokens_are_not_identical(outcome: Run) -> None:
    results = [replace(each, logits=tuple(row * 1.01 for row in each.logits)) for each in outcome.results]
    result = outcome.verify(results)
    assert result.mismatches == ()
    assert not result.identical
    assert result.relative_logit_diff == pytest.approx(0.01, rel=0.01)


def test_logits_are_compared_only_while_both_saw_the_same_text(outcome: Run) -> None:
    tokens = list(outcome.results[0].output_ids)
    tokens[2] = (tokens[2] + 1) % 256
    logits = [*outcome.results[0].logits[:3], *(row + 9 for row in outcome.results[0].logits[3:])]
    result = outcome.tampered(0, output_ids=tuple(tokens), logits=tuple(logits))
    assert not result.identical
    assert result.max_logit_diff < 2e-5


def test_a_run_that_was_interrupted_is_compared_as_far_as_it_came(outcome: Run) -> None:
    first = outcome.results[0]
    cut = {"output_ids": first.output_ids[:3], "logits": first.logits[:3], "finish_reason": None}
    assert outcome.tampered(0, **cut).identical
    assert outcome.tampered(0, output_ids=(), logits=(), finish_reason=None).identical


def test_results_without_logits_are_refused(outcome: Run) -> None:
    with pytest.raises(InvariantError, match="kept 0 logits: run with keep_logits"):
        outcome.tampered(0, logits=())


def test_a_resident_run_that_spills_is_no_reference(outcome: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = EngineConfig.plan

    def plan(config: EngineConfig, model: Any) -> Any:
        return sound(replace(config, slab_bytes=outcome.config.slab_bytes), model)

    monkeypatch.setattr(EngineConfig, "plan", plan)
    with pytest.raises(InvariantError, match=r"the resident run spilled \d+ pages"):
        outcome.verify(outcome.results)
