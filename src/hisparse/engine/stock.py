"""The independent reference: stock transformers `generate`, one request at a time, none of our KV code.

Only one thing is laid down: equal index scores go to the lowest position, as ours do. Stock `topk` breaks such ties
as it pleases, and scores that pass a ReLU tie often in small models; without the rule a difference would say
nothing. The rule is written independently of the engine's selection, by a stable sort.

Where the engine packs its rows, the reference rounds its own: attention reads the numbers that fp8 and its scales can
say, by arithmetic that knows nothing of bytes. What is left of a difference is then none of the rounding's.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, LogitsProcessor

from hisparse.config import KVDtype
from hisparse.engine.models import LoadedModel
from hisparse.engine.sampler import SamplingParams, sample

PREFILL_CHUNK = 256
"""`generate`'s own chunked prefill: the stock indexer holds `[chunk, heads, context]` float32 scores at once."""


@dataclass(frozen=True, slots=True)
class StockRun:
    """What the reference generated: `tokens`, and float32 `[len(tokens), vocab]` logits, one row per token."""

    tokens: tuple[int, ...]
    logits: torch.Tensor


class LowestPositionTies(TorchFunctionMode):
    """Inside, `Tensor.topk` over the last dimension gives ties to the lowest index, in descending order of value.

    Rows whose boundary is not tied keep what `topk` chose: there the chosen set is the only one.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.topk:
            return func(*args, **(kwargs or {}))
        return _topk_lowest(*args, **(kwargs or {}))


def _topk_lowest(scores: torch.Tensor, k: int, dim: int = -1) -> Any:
    length = scores.shape[-1]
    wide = torch.topk(scores, min(k + 1, length), dim=dim)
    values, indices = wide.values[..., :k].clone(), wide.indices[..., :k].clone()
    if k < length:
        tied = wide.values[..., k - 1] == wide.values[..., k]
        ordered = scores[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], indices[tied] = ordered.values[..., :k], ordered.indices[..., :k]
    return torch.return_types.topk((values, indices))


class _Sampled(LogitsProcessor):
    """Lets `generate` pick greedily what our sampler draws, so that both sides are compared on the same draw."""

    def __init__(self, params: SamplingParams, prompt_tokens: int) -> None:
        self._params = params
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = int(input_ids.shape[1]) - self._prompt_tokens
        token = sample(scores, [self._params], [step])[0]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token], device=scores.device), 0.0)


def stock_model(loaded: LoadedModel, kv_dtype: KVDtype = "auto") -> Any:
    """A second model of the untouched stock classes with eager attention, over the same weight tensors.

    `loaded.model` may carry hooks; this one has none. The tie rule is active inside its indexers only. Its attention
    sees latents and rotated keys as `kv_dtype` stores them.
    """
    config = copy.deepcopy(loaded.config)
    model = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype, attn_implementation="eager")
    model.load_state_dict(loaded.model.state_dict(), strict=True, assign=True)
    model.to(loaded.model.device)
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            _settle_ties(layer.self_attn.indexer)
        if kv_dtype == "fp8_ds_mla":
            _round_rows(layer.self_attn)
    return model.eval()


def _settle_ties(indexer: Any) -> None:
    stock_forward = indexer.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        with LowestPositionTies():
            selected: torch.Tensor = stock_forward(*args, **kwargs)
        return selected

    indexer.forward = forward


def _round_rows(attention: Any) -> None:
    """What the cache holds stays as it is; it is rounded where it is read, which comes to the same."""
    stock_expand = attention.expand_kv

    def expand_kv(latents: torch.Tensor, rope_keys: torch.Tensor) -> Any:
        return stock_expand(round_latents(latents), rope_keys.to(torch.bfloat16).to(rope_keys.dtype))

    attention.expand_kv = expand_kv


def round_latents(latents: torch.Tensor) -> torch.Tensor:
    """Latents `[..., 512]`, each the nearest multiple of a 448th of the largest in its 128 that e4m3 can say.

    Three bits behind the leading one, and none finer than 2^-9.
    """
    groups = latents.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    scaled = groups / scale.where(scale > 0, 1.0)
    exponent = torch.frexp(scaled).exponent.clamp(min=-5)
    rounded = torch.ldexp(torch.ldexp(scaled, 4 - exponent).round(), exponent - 4)
    result: torch.Tensor = (rounded * scale).flatten(-2).to(latents.dtype)
    return result


def stock_generate(
    model: Any, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int, end_tokens: Sequence[int] = ()
) -> StockRun:
    """Generate up to `max_tokens` tokens after `prompt_ids` with `model` (from `stock_model`).

    Stops after a token of `end_tokens` (which is then the last of `tokens`); `params` decides how tokens are chosen,
    and its stop fields are left to the caller.
    """
    ids = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=model.device)
    processors = [] if params.is_greedy else [_Sampled(params, ids.shape[1])]
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=processors,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(end_tokens) or None,
            pad_token_id=0,
            prefill_chunk_size=PREFILL_CHUNK,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = output.sequences[0, ids.shape[1] :].tolist()
    return StockRun(tuple(tokens), torch.cat(list(output.logits)).float())
