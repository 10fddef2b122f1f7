"""Is what HiSparse generated what it should be? Compared with two other runs of the same prompts.

- *stock*: transformers `generate`, none of our KV code, one request at a time;
- *resident*: this engine with a slab that holds everything, so that nothing is spilled, resolved or staged.

In float32 the tokens of all three must be equal. In 16-bit dtypes absorbed and expanded attention round
differently, so there the tokens must equal the resident run's. In all of them the logits stay within `logit_bound`
of stock's, for as long as both have chosen the same tokens.

Packed rows are rounded in all three: the resident run stores them alike, and stock's attention is given numbers that
were rounded alike. The tokens must equal the resident run's.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import transformers

from hisparse.config import KVDtype
from hisparse.engine.config import EngineConfig
from hisparse.engine.engine import Engine
from hisparse.engine.models import LoadedModel
from hisparse.engine.result import RequestResult
from hisparse.engine.sampler import SamplingParams
from hisparse.engine.stock import StockRun, stock_generate, stock_model
from hisparse.errors import InvariantError

LOGIT_BOUNDS = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.3}
"""How far logits may be from stock's: root mean square of the difference over that of stock's logits, for the median
token. The median, because in 16 bits one rounded index or router score now and then exchanges a selected row or an
expert, and that token's logits with it; unrelated logits would differ by a factor of about 1.4."""

TOKEN_LOGIT_BOUND = 1e-2
"""The same for each single token, in float32. Two rows whose index scores agree to the last bits may change places at
the end of a selection of thousands there as well; the least of the selected rows then moves logits by about 1e-4."""


PACKED_LOGIT_BOUND = 1e-2
"""The least bound where rows are packed. Latents of which only the last bits differ now and then round to two fp8
numbers, a sixteenth apart, and every layer passes that on: random float32 models of 2, 4 and 6 layers differ by 1e-6,
4e-4 and 3e-3. A lost lowest bit of fp8 would differ by 7e-2 in two layers."""


def logit_bound(dtype: torch.dtype, kv_dtype: KVDtype) -> float:
    """How far a median token's logits may be from stock's, for attention in `dtype` over rows of `kv_dtype`."""
    return LOGIT_BOUNDS[dtype] if kv_dtype == "auto" else max(LOGIT_BOUNDS[dtype], PACKED_LOGIT_BOUND)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a request first differs from a reference: `position` counts output tokens from 0."""

    request_id: str
    reference: str
    position: int
    expected: int | None
    found: int | None


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """`identical`: every token is what it should be and every logit within its bound.

    `max_logit_diff`: the largest difference of a logit from stock's over the tokens on which both agree.
    `relative_logit_diff`: the difference that `logit_bound` bounds. `resident_logit_diff`: the largest difference
    from the resident run.
    """

    reference: str
    identical: bool
    max_logit_diff: float
    relative_logit_diff: float
    resident_logit_diff: float
    mismatches: tuple[Mismatch, ...]


def verify(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    config: EngineConfig,
    results: Sequence[RequestResult],
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> VerifyResult:
    """Compare `results` (from an engine with `keep_logits`) with both references.

    `progress(what, done, total)` is told of every finished request. The model must carry no hooks.
    """
    for result in results:
        if len(result.logits) != len(result.output_ids):
            raise InvariantError(f"{result.request_id} kept {len(result.logits)} logits: run with keep_logits")
    resident = _resident_runs(loaded, prompts, params, config, progress)
    dtype = attention_dtype(loaded, config.kv_dtype)
    exact = dtype is torch.float32 and config.kv_dtype == "auto"
    model = stock_model(loaded, config.kv_dtype)
    mismatches: list[Mismatch] = []
    stock_diff = resident_diff = 0.0
    relative: list[float] = []
    for index, result in enumerate(results):
        twin = resident[index]
        mismatches += _compare(result, twin.output_ids[: len(result.output_ids)], "resident")
        resident_diff = max(resident_diff, _logit_diff(result, twin.output_ids, twin.logits)[0])
        if result.output_ids:
            stock = _stock_run(model, prompts[index], params[index], len(result.output_ids))
            if exact:
                mismatches += _compare(result, stock.tokens, "stock")
            largest, by_token = _logit_diff(result, stock.tokens, tuple(stock.logits))
            stock_diff = max(stock_diff, largest)
            relative += by_token
        progress("stock", index + 1, len(results))
    relative_diff = statistics.median(relative) if relative else 0.0
    in_bounds = relative_diff <= logit_bound(dtype, config.kv_dtype)
    if exact:
        in_bounds = in_bounds and max(relative, default=0.0) <= TOKEN_LOGIT_BOUND
    return VerifyResult(
        reference=_reference(config.kv_dtype),
        identical=not mismatches and in_bounds,
        max_logit_diff=stock_diff,
        relative_logit_diff=relative_diff,
        resident_logit_diff=resident_diff,
        mismatches=tuple(mismatches),
    )


def attention_dtype(loaded: LoadedModel, kv_dtype: KVDtype) -> torch.dtype:
    """The dtype whose rounding tells attention here from stock's: on a GPU packed rows are read in bfloat16."""
    on_gpu = loaded.model.device.type == "cuda"
    return torch.bfloat16 if kv_dtype != "auto" and on_gpu else loaded.dtype


def _reference(kv_dtype: KVDtype) -> str:
    rounded = "" if kv_dtype == "auto" else f" with rows rounded as {kv_dtype}"
    return f"transformers {transformers.__version__} generate{rounded}, and this engine with everything resident"


def _resident_runs(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    config: EngineConfig,
    progress: Callable[[str, int, int], None],
) -> list[RequestResult]:
    everything = replace(config, slab_bytes=None, keep_logits=True, copy_delay=0, offload=None)
    with Engine(loaded, everything) as engine:
        for prompt, param in zip(prompts, params, strict=True):
            engine.add_request(prompt, param)
        done = 0
        for output in engine.run():
            done += sum(token.finish_reason is not None for token in output.tokens)
            progress("resident", done, len(prompts))
        if engine.stats().spills:
            raise InvariantError(f"the resident run spilled {engine.stats().spills} pages")
        return engine.results()


def _stock_run(model: object, prompt: Sequence[int], params: SamplingParams, num_tokens: int) -> StockRun:
    """As many tokens as the engine generated; where it stopped is the engine's rule, not the reference's."""
    return stock_generate(model, prompt, params, num_tokens)


def _compare(result: RequestResult, expected: Sequence[int], reference: str) -> list[Mismatch]:
    found = result.output_ids
    for position in range(max(len(expected), len(found))):
        want = expected[position] if position < len(expected) else None
        got = found[position] if position < len(found) else None
        if want != got:
            return [Mismatch(result.request_id, reference, position, want, got)]
    return []


def _logit_diff(
    result: RequestResult, tokens: Sequence[int], logits: Sequence[torch.Tensor]
) -> tuple[float, list[float]]:
    """The largest difference, and the relative one of every token, up to and including the first that differs.

    Until then both saw the same input.
    """
    count = 0
    for ours, theirs in zip(result.output_ids, tokens, strict=False):
        count += 1
        if ours != theirs:
            break
    if not count:
        return 0.0, []
    expected = torch.stack(list(logits[:count])).float()
    difference = torch.stack(list(result.logits[:count])).to(expected.device) - expected
    relative = difference.square().mean(1).sqrt() / expected.square().mean(1).sqrt()
    return float(difference.abs().max()), relative.tolist()
