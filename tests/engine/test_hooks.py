"""The hooked model against stock `generate`: the same tokens and logits, however requests share a forward."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hisparse.engine.batch import ScheduledTokens, build_batch
from hisparse.engine.hooks import DsaModelRunner
from hisparse.engine.models import LoadedModel, load_model
from hisparse.engine.sampler import SamplingParams, sample
from hisparse.engine.stock import StockRun, stock_generate, stock_model
from hisparse.errors import InvariantError
from hisparse.protocol import Table

GREEDY = SamplingParams()
STAGING_ROWS = 512
FLOAT32_BOUND = 2e-5
BFLOAT16_BOUND = 0.4
BFLOAT16_EXCESS = 1.25
"""Absorbed and expanded MLA round differently in bfloat16, and a score that changes side at the boundary of the
selection, or of the router, changes a whole row. So single logits have no useful bound: stated is the root mean square
over all positions. Ours differ from stock's by less than stock's differ from the float32 logits, which is at most 0.4
of the logits' own size; and ours are at most 1.25 times as far from the float32 logits as stock's are."""

TEXT = (
    "A cache keeps what was computed so that it need not be computed again; the art is to know what will be asked for "
    "next. Rows that the indexer selects are read, the others wait where memory is cheap. "
) * 6
PROMPTS = [list(TEXT[start : start + length].encode()) for start, length in ((0, 403), (57, 31), (11, 257))]


class Driver:
    """Feeds requests through a runner the way a scheduler does, with chunks of a given size."""

    def __init__(self, runner: DsaModelRunner, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        self.runner = runner
        self.params = params
        self.tokens = [list(prompt) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.computed = [0] * len(prompts)
        self.logits: list[list[torch.Tensor]] = [[] for _ in prompts]

    def step(self, chunk: int, requests: Sequence[int]) -> None:
        """Advance each of `requests`: by a chunk of its prompt, or by one token."""
        items = []
        for slot in requests:
            start = self.computed[slot]
            is_decode = start >= self.prompt_lengths[slot]
            ids = self.tokens[slot][start : start + chunk]
            done = start + len(ids) == len(self.tokens[slot])
            items.append(ScheduledTokens(slot, ids, start, wants_logits=done, is_decode=is_decode))
            self.computed[slot] += len(ids)
        batch = build_batch(items)
        logits = self.runner.run(batch)
        for row, item in zip(logits, batch.logit_items, strict=True):
            slot = items[item].slot
            step = len(self.tokens[slot]) - self.prompt_lengths[slot]
            self.logits[slot].append(row)
            self.tokens[slot].extend(sample(row.unsqueeze(0), [self.params], [step]))

    def finish(self, chunk: int, num_tokens: int) -> None:
        """Run until every request has `num_tokens` tokens; requests start one step after another, so that most
        steps mix decode rows with chunks."""
        turn = 0
        while unfinished := [slot for slot in range(len(self.tokens)) if len(self.logits[slot]) < num_tokens]:
            turn += 1
            self.step(chunk, [slot for slot in unfinished if slot < turn])

    def generated(self, slot: int) -> tuple[int, ...]:
        return tuple(self.tokens[slot][self.prompt_lengths[slot] :])


@pytest.fixture
def runner(tiny: LoadedModel, make_worker: Callable[[LoadedModel], Any]) -> Iterator[DsaModelRunner]:
    with DsaModelRunner(tiny, make_worker(tiny)) as runner:
        yield runner


def references(
    loaded: LoadedModel, params: SamplingParams, num_tokens: int, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[StockRun]:
    model = stock_model(loaded)
    return [stock_generate(model, prompt, params, num_tokens) for prompt in prompts]


def largest_difference(driver: Driver, expected: Sequence[StockRun]) -> float:
    return max(
        float((torch.stack(rows) - run.logits).abs().max()) for rows, run in zip(driver.logits, expected, strict=True)
    )


@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_requests_that_share_a_forward_generate_what_stock_generates_alone(
    tiny: LoadedModel, runner: DsaModelRunner, chunk: int
) -> None:
    prompts, num_tokens = (PROMPTS, 24) if chunk > 1 else ([prompt[:40] for prompt in PROMPTS], 4)
    driver = Driver(runner, prompts, GREEDY)
    driver.finish(chunk, num_tokens)
    expected = references(tiny, GREEDY, num_tokens, prompts)
    assert [driver.generated(slot) for slot in range(3)] == [run.tokens for run in expected]
    assert largest_difference(driver, expected) <= FLOAT32_BOUND


def test_sampled_requests_draw_the_same_tokens_as_stock(tiny: LoadedModel, runner: DsaModelRunner) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5)
    driver = Driver(runner, PROMPTS, params)
    driver.finish(chunk=100, num_tokens=12)
    expected = references(tiny, params, 12)
    assert [driver.generated(slot) for slot in range(3)] == [run.tokens for run in expected]
    assert driver.generated(0) != references(tiny, GREEDY, 12, PROMPTS[:1])[0].tokens, "the draw made no difference"


def hosted_positions() -> torch.Tensor:
    """Four pages of 32 positions in five are on host; the last 64 positions of the first prompt never are."""
    hosted = (torch.arange(1024) // 32 % 5 != 0).repeat(4, 1)
    hosted[:, 320:] = False
    return hosted


def test_rows_on_host_change_no_bit_of_the_logits(tiny: LoadedModel, make_worker: Callable[[LoadedModel], Any]) -> None:
    outcomes = []
    for evicts in (False, True):
        worker = make_worker(tiny)
        with DsaModelRunner(tiny, worker) as runner:
            driver = Driver(runner, PROMPTS[:1], GREEDY)
            for _ in range(4):
                driver.step(80, [0])
            if evicts:
                worker.evict(hosted_positions())
            driver.finish(chunk=50, num_tokens=12)
            outcomes.append(torch.stack(driver.logits[0]))
    assert torch.equal(*outcomes)


def test_control_one_host_row_with_one_wrong_element_is_seen(
    tiny: LoadedModel, make_worker: Callable[[LoadedModel], Any]
) -> None:
    outcomes = []
    for damage in (0.0, 1.0):
        worker = make_worker(tiny)
        with DsaModelRunner(tiny, worker) as runner:
            driver = Driver(runner, PROMPTS[:1], GREEDY)
            for _ in range(4):
                driver.step(80, [0])
            worker.evict(hosted_positions())
            selected = runner.worker.handles[0].host[0, 32:320:32]
            selected[..., 0] += damage
            driver.finish(chunk=100, num_tokens=12)
            outcomes.append(torch.stack(driver.logits[0]))
    assert not torch.equal(*outcomes)


def test_control_a_swapped_pair_of_rows_is_caught_by_the_comparison_with_stock(
    tiny: LoadedModel, runner: DsaModelRunner
) -> None:
    driver = Driver(runner, PROMPTS[:1], GREEDY)
    for _ in range(4):
        driver.step(100, [0])
    storage = runner.worker.handles[0].storage
    first, second = runner.worker.tables.rows[Table.RESIDENT][0, :400].view(2, 200)
    storage[torch.cat([first, second])] = storage[torch.cat([second, first])]
    driver.finish(chunk=100, num_tokens=4)
    expected = stock_generate(stock_model(tiny), PROMPTS[0], GREEDY, 4)
    assert largest_difference(driver, [expected]) > 100 * FLOAT32_BOUND


def test_a_follower_loads_what_its_leader_resolved_once_per_decode_step(
    make_worker: Callable[[LoadedModel], Any],
) -> None:
    loaded = load_model("builtin:tiny-glm")
    worker = make_worker(loaded)
    with DsaModelRunner(loaded, worker) as runner:
        driver = Driver(runner, PROMPTS[1:2], GREEDY)
        driver.step(1000, [0])
        assert [handle.loads for handle in worker.handles] == [0, 0, 0, 0]
        driver.step(1, [0])
        driver.step(1, [0])
    assert [handle.loads for handle in worker.handles] == [0, 2, 0, 2]


def all_logits(loaded: LoadedModel, worker: Any, prompt: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after every token of a prompt, ours and those of stock."""
    batch = build_batch([ScheduledTokens(0, prompt, 0, wants_logits=True, is_decode=False)])
    batch = replace(batch, logit_rows=torch.arange(len(prompt)))
    with DsaModelRunner(loaded, worker) as runner, torch.no_grad():
        ours = runner.run(batch)
        return ours, stock_model(loaded)(torch.tensor([prompt])).logits[0].float()


def rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())


def test_in_bfloat16_we_are_as_close_to_the_exact_logits_as_stock_is(
    tiny: LoadedModel, make_worker: Callable[[LoadedModel], Any]
) -> None:
    rounded = load_model(tiny.name, "bfloat16")
    ours, stock = all_logits(rounded, make_worker(rounded), PROMPTS[0])
    _, exact = all_logits(tiny, make_worker(tiny), PROMPTS[0])
    assert 0 < rms(ours - stock) <= rms(stock - exact)
    assert rms(ours - exact) <= BFLOAT16_EXCESS * rms(stock - exact)
    assert rms(stock - exact) <= BFLOAT16_BOUND * rms(exact)


def test_a_step_that_wants_no_logits_computes_none(runner: DsaModelRunner) -> None:
    batch = build_batch([ScheduledTokens(0, PROMPTS[0][:10], 0, wants_logits=False, is_decode=False)])
    assert runner.run(batch).shape == (0, 256)


def test_uninstalling_leaves_the_stock_model(tiny: LoadedModel, make_worker: Callable[[LoadedModel], Any]) -> None:
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        before = tiny.model(ids).logits
        with DsaModelRunner(tiny, make_worker(tiny)) as runner:
            with pytest.raises(InvariantError, match="without its runner"):
                tiny.model(ids, attention_mask=torch.zeros(1, 1, 1, 1))
            with pytest.raises(InvariantError, match="another runner"):
                DsaModelRunner(tiny, runner.worker)
        runner.uninstall()
        assert torch.equal(tiny.model(ids).logits, before)
