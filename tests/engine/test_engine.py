"""The engine as its users see it: requests come, stop, wait or are refused, and the model is theirs again after."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hisparse.engine import Engine, EngineConfig, FinishReason, LoadedModel, SamplingParams
from hisparse.errors import CapacityError, InputError, InvariantError
from tests.engine.parity import GREEDY, Case, prompt, run, slab_bytes, stock

SAMPLED = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.95, top_k=50, seed=3)
BLOCK = 16


def config(**changes: Any) -> EngineConfig:
    """Requests of up to 512 tokens over a slab that holds everything."""
    options: dict[str, Any] = {
        "max_tokens": 512,
        "host_pool_bytes": 8 << 20,
        "block_size": BLOCK,
        "max_running": 3,
        "chunk_tokens": 128,
        "debug": True,
    }
    return EngineConfig(**(options | changes))


def small(loaded: LoadedModel, **changes: Any) -> EngineConfig:
    """The least slab that runs one request, and eight blocks more."""
    return config(slab_bytes=slab_bytes(loaded, BLOCK, 8), **changes)


def finish(engine: Engine) -> None:
    for _ in engine.run():
        pass


def expected(loaded: LoadedModel, ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return stock(loaded.name, ids, GREEDY, num_tokens).tokens


# Preemption.


@pytest.mark.parametrize("tight", ["indexer pool", "host pool"])
def test_a_preempted_request_computes_again_and_says_the_same(tiny: LoadedModel, tight: str) -> None:
    prompts = [prompt(seed, 190) for seed in range(3)]
    if tight == "indexer pool":
        options = small(tiny, indexer_tokens=27 * BLOCK)
    else:
        page = slab_bytes(tiny, BLOCK, 1) - slab_bytes(tiny, BLOCK, 0)
        options = small(tiny, host_pool_bytes=13 * page)
    with Engine(tiny, options) as engine:
        for ids in prompts:
            engine.add_request(ids, SamplingParams(max_tokens=40))
        finish(engine)
        results, stats = engine.results(), engine.stats()
    assert stats.preemptions > 0
    assert stats.rows.unreachable == 0
    assert [result.output_ids for result in results] == [expected(tiny, ids, 40) for ids in prompts]


def test_a_sampled_request_that_was_preempted_draws_the_same_tokens(tiny: LoadedModel) -> None:
    prompts = [prompt(seed, 190) for seed in range(3)]
    params = replace(SAMPLED, max_tokens=40)
    outputs = []
    for options in (config(), small(tiny, indexer_tokens=27 * BLOCK)):
        with Engine(tiny, options) as engine:
            for ids in prompts:
                engine.add_request(ids, params)
            finish(engine)
            outputs.append([result.output_ids for result in engine.results()])
    assert engine.stats().preemptions > 0
    assert outputs[0] == outputs[1]


# Refusals.


def test_what_can_never_fit_is_refused_with_the_host_pool_that_would_do(tiny: LoadedModel) -> None:
    page = slab_bytes(tiny, BLOCK, 1) - slab_bytes(tiny, BLOCK, 0)
    params = SamplingParams(max_tokens=60)
    with Engine(tiny, small(tiny, host_pool_bytes=4 * page)) as engine:
        with pytest.raises(CapacityError, match=r"need a host pool of \d+ bytes .* it has \d+") as refused:
            engine.add_request(prompt(1, 400), params)
        needed = int(str(refused.value).split("host pool of ")[1].split()[0])
    with (
        Engine(tiny, small(tiny, host_pool_bytes=needed - page)) as engine,
        pytest.raises(CapacityError, match="host pool"),
    ):
        engine.add_request(prompt(1, 400), params)
    with Engine(tiny, small(tiny, host_pool_bytes=needed)) as engine:
        engine.add_request(prompt(1, 400), params)
        finish(engine)
        assert engine.results()[0].output_ids == expected(tiny, prompt(1, 400), 60)


@pytest.mark.parametrize(
    ("ids", "params", "said"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([1, 256], GREEDY, "token id 256 is outside the vocabulary of 256"),
        ([-1], GREEDY, "token id -1 is outside"),
        ([1] * 500, SamplingParams(max_tokens=20), "may grow to 519 tokens; the limit is 512"),
    ],
)
def test_a_refused_request_leaves_no_trace(
    tiny: LoadedModel, ids: Sequence[int], params: SamplingParams, said: str
) -> None:
    with Engine(tiny, small(tiny)) as engine:
        with pytest.raises(InputError, match=said):
            engine.add_request(ids, params)
        assert engine.results() == []
        engine.add_request(prompt(2, 100), SamplingParams(max_tokens=6))
        finish(engine)
        assert engine.results()[0].output_ids == expected(tiny, prompt(2, 100), 6)


def test_more_positions_than_the_model_has_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(InputError, match="it has 131072 positions"):
        Engine(tiny, config(max_tokens=131073))


# Prefixes.


@pytest.mark.parametrize("budget", ["large", "small"])
def test_a_prompt_that_was_seen_before_is_not_computed_again(tiny: LoadedModel, budget: str) -> None:
    ids = prompt(3, 200)
    options = config() if budget == "large" else small(tiny)
    with Engine(tiny, options) as engine:
        computed = []
        for _ in range(2):
            engine.add_request(ids, SamplingParams(max_tokens=8))
            computed.append(sum(output.prefill_tokens for output in engine.run()))
        results = engine.results()
    assert computed == [200, 200 - 12 * BLOCK]
    assert [result.output_ids for result in results] == [expected(tiny, ids, 8)] * 2


def test_an_equal_beginning_is_shared_and_the_rest_is_not(tiny: LoadedModel) -> None:
    first = prompt(3, 200)
    second = first[:100] + prompt(4, 90)
    with Engine(tiny, small(tiny)) as engine:
        engine.add_request(first, SamplingParams(max_tokens=8))
        finish(engine)
        engine.add_request(second, SamplingParams(max_tokens=8))
        assert sum(output.prefill_tokens for output in engine.run()) == 190 - 6 * BLOCK
        assert engine.results()[1].output_ids == expected(tiny, second, 8)


def test_equal_prompts_at_once_share_host_pages_and_stay_right(tiny: LoadedModel) -> None:
    """The second to leave finds its bytes on the host already, and leaves without a copy."""
    case = Case((prompt(7, 230),) * 3, max_tokens=30, spare_blocks=12, chunk=1000, copy_delay=1)
    outcome = run(tiny, case)
    assert outcome.stats.rows.unreachable == 0
    assert outcome.tokens == [expected(tiny, prompt(7, 230), 30)] * 3


# Ends.


def text_of(loaded: LoadedModel, ids: tuple[int, ...], num_tokens: int) -> str:
    return loaded.tokenizer.decode(expected(loaded, ids, num_tokens))


def test_a_stop_string_ends_the_text_before_it(tiny: LoadedModel) -> None:
    ids = prompt(8, 90)
    whole = text_of(tiny, ids, 24)
    stop = whole[10:13]
    with Engine(tiny, small(tiny)) as engine:
        engine.add_request(ids, SamplingParams(max_tokens=24, stop=("never said", stop)))
        streamed = "".join(token.text for output in engine.run() for token in output.tokens)
        (result,) = engine.results()
    assert result.finish_reason is FinishReason.STOP
    assert streamed == result.text == whole[: whole.index(stop)]


@pytest.mark.parametrize("kind", ["stop token", "end of text"])
def test_a_stop_token_ends_the_text_and_is_no_part_of_it(tiny: LoadedModel, kind: str) -> None:
    ids = prompt(8, 90)
    tokens = expected(tiny, ids, 24)
    last = tokens[9]
    at = tokens.index(last)
    loaded = tiny if kind == "stop token" else replace(tiny, eos_token_ids=(last,))
    params = SamplingParams(max_tokens=24, stop_token_ids=(last,) if kind == "stop token" else ())
    with Engine(loaded, small(tiny)) as engine:
        engine.add_request(ids, params)
        engine.add_request(ids, SamplingParams(max_tokens=24, ignore_eos=True))
        finish(engine)
        stopped, other = engine.results()
    assert stopped.output_ids == tokens[: at + 1]
    assert stopped.text == tiny.tokenizer.decode(tokens[:at])
    assert stopped.finish_reason is FinishReason.STOP
    assert other.output_ids == tokens
    assert other.finish_reason is FinishReason.LENGTH


def test_streamed_text_joins_to_the_result(tiny: LoadedModel) -> None:
    streamed: dict[str, str] = {}
    with Engine(tiny, small(tiny)) as engine:
        for seed in range(3):
            engine.add_request(prompt(seed, 60 + seed), SamplingParams(max_tokens=20))
        for output in engine.run():
            for token in output.tokens:
                streamed[token.request_id] = streamed.get(token.request_id, "") + token.text
        results = engine.results()
    assert streamed == {result.request_id: result.text for result in results}
    assert [result.text for result in results] == [text_of(tiny, prompt(seed, 60 + seed), 20) for seed in range(3)]


@pytest.mark.parametrize("when", ["waiting", "running", "finished"])
def test_an_aborted_request_keeps_its_text_and_gives_its_blocks_back(tiny: LoadedModel, when: str) -> None:
    params = SamplingParams(max_tokens=12)
    with Engine(tiny, small(tiny, max_running=1)) as engine:
        first = engine.add_request(prompt(1, 150), params)
        second = engine.add_request(prompt(2, 150), params)
        while not engine.results()[0].output_ids:
            engine.step()
        if when == "finished":
            finish(engine)
        engine.abort(second if when == "waiting" else first)
        finish(engine)
        results = engine.results()
        assert engine.scheduler.kv.use().resident == 0
    whole = [expected(tiny, prompt(seed, 150), 12) for seed in (1, 2)]
    lengths = {"waiting": (12, 0), "running": (1, 12), "finished": (12, 12)}[when]
    assert [result.output_ids for result in results] == [
        tokens[:length] for tokens, length in zip(whole, lengths, strict=True)
    ]


# Sampling.


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_company(tiny: LoadedModel) -> None:
    ids = prompt(9, 140)
    alone = run(tiny, Case((ids,), max_tokens=16, params=SAMPLED))
    again = run(
        tiny, Case((prompt(1, 50), ids, prompt(2, 170)), max_tokens=16, params=SAMPLED, chunk=33, spare_blocks=9)
    )
    other = run(tiny, Case((ids,), max_tokens=16, params=replace(SAMPLED, seed=4)))
    assert alone.tokens[0] == again.tokens[1] == stock(tiny.name, ids, SAMPLED, 16).tokens
    assert alone.tokens != other.tokens


# Numbers.


def test_what_was_counted_agrees_with_what_was_moved(tiny: LoadedModel) -> None:
    ids = prompt(4, 300)
    options = config(slab_bytes=slab_bytes(tiny, BLOCK, 0), max_running=1)
    with Engine(tiny, options) as engine:
        engine.add_request(ids, SamplingParams(max_tokens=10))
        finish(engine)
        stats, plan = engine.stats(), engine.plan
        shared = engine.scheduler.coordinator.totals.shared_spills
    row = plan.model.row.row_bytes
    assert stats.restores == 0
    assert stats.spills > 0 == shared
    assert stats.moved.device_to_host_bytes == stats.spills * plan.device.payload_bytes
    assert stats.rows.miss > 0
    # Every leader's miss is loaded by its followers too, and both models have as many followers for each leader.
    per_leader = plan.model.num_layers // len(plan.model.leaders)
    assert stats.moved.host_to_device_bytes == stats.rows.miss * row * per_leader
    selected = sum(min(position + 1, plan.model.index_topk) for position in range(309)) * len(plan.model.leaders)
    assert stats.rows.resident + stats.rows.hot + stats.rows.miss == selected
    assert stats.kv.device_bytes <= options.slab_bytes
    assert stats.kv.total_bytes == (stats.kv.pages_resident + stats.kv.pages_host) * plan.device.payload_bytes
    assert stats.kv.host_bytes == stats.kv.pages_host * plan.host.payload_bytes


def test_a_slab_that_holds_everything_moves_nothing(tiny: LoadedModel) -> None:
    outcome = run(tiny, Case(tuple(prompt(seed, 200) for seed in range(3)), spare_blocks=None))
    assert outcome.stats.spills == outcome.stats.rows.miss == outcome.stats.rows.hot == 0
    assert outcome.stats.moved.host_to_device_bytes == outcome.stats.moved.device_to_host_bytes == 0


def test_times_are_in_order(tiny: LoadedModel) -> None:
    with Engine(tiny, small(tiny)) as engine:
        engine.add_request(prompt(1, 60), SamplingParams(max_tokens=1))
        engine.add_request(prompt(2, 60), SamplingParams(max_tokens=4))
        assert engine.results()[0].ttft_s is None
        finish(engine)
        one, four = engine.results()
    assert one.ttft_s is not None
    assert one.ttft_s > 0
    assert one.tpot_s is None
    assert four.tpot_s is not None
    assert four.tpot_s > 0


# Its end.


def test_after_close_the_model_is_stock_again_and_the_engine_is_not_opened_twice(tiny: LoadedModel) -> None:
    ids = torch.tensor([prompt(5, 50)])
    before_attention = tiny.config._attn_implementation
    with torch.no_grad():
        before = tiny.model(ids).logits
    engine = Engine(tiny, small(tiny))
    with engine:
        engine.add_request(prompt(5, 50), SamplingParams(max_tokens=2))
        finish(engine)
        assert tiny.config._attn_implementation != before_attention
    engine.close()
    assert tiny.config._attn_implementation == before_attention
    with torch.no_grad():
        assert torch.equal(tiny.model(ids).logits, before)
    with pytest.raises(InvariantError, match="closed"), engine:
        pass


def test_an_engine_whose_budget_is_refused_leaves_the_model_alone(tiny: LoadedModel) -> None:
    with pytest.raises(CapacityError, match="the least that runs one request is"):
        Engine(tiny, config(slab_bytes=slab_bytes(tiny, BLOCK, -1)))
    with torch.no_grad():
        tiny.model(torch.tensor([prompt(5, 50)]))


def test_aborting_an_unknown_request_is_told_apart_from_a_fault(tiny: LoadedModel) -> None:
    with Engine(tiny, small(tiny)) as engine, pytest.raises(InputError, match="no request 'nobody'"):
        engine.abort("nobody")


def test_after_a_failed_step_an_engine_can_only_be_closed(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("out of memory")

    with Engine(tiny, small(tiny)) as engine:
        engine.add_request(prompt(5, 50), SamplingParams(max_tokens=2))
        monkeypatch.setattr(engine.runner, "run", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
        with pytest.raises(InvariantError, match="a step of this engine failed"):
            engine.step()
    with pytest.raises(InvariantError, match="closed"):
        engine.step()
