"""From logits to tokens: greedy, or sampled with temperature, top-k and top-p.

A sampled token depends on the request's seed, the number of tokens it has generated, and its logits: never on the
other requests of the batch, on the device, or on a random state that a preemption would lose. So the same request
gives the same text in any company, and a recomputed one continues as if nothing had happened.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hisparse.errors import BackendError, InputError

MIN_TEMPERATURE = 1e-6
"""The least that is not greedy. Scores are divided by it, and far smaller ones would leave the range of a float64."""

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request chooses its tokens and when it stops.

    `temperature` 0 is greedy; what is between it and `MIN_TEMPERATURE` is refused. `top_k` 0 and `top_p` 1 do not
    filter. `stop`: a tuple of strings that end the text, and are not part of it; a single string is refused, because
    it is a sequence of strings itself. `stop_token_ids`: tokens that end it, beside the model's own, which `ignore_eos`
    turns off. At most `max_tokens` tokens are generated. Raises `InputError` when out of
    range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max tokens {self.max_tokens} must be at least 1")
        if not math.isfinite(self.temperature) or self.temperature < 0 or 0 < self.temperature < MIN_TEMPERATURE:
            raise InputError(f"temperature {self.temperature} must be 0 (greedy), or at least {MIN_TEMPERATURE}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p {self.top_p} must be above 0 and at most 1")
        if self.top_k < 0:
            raise InputError(f"top-k {self.top_k} must be 0 (no limit) or above")
        if isinstance(self.stop, str):
            raise InputError(f"stop {self.stop!r} is one string: give a tuple of strings, ({self.stop!r},)")
        if any(not text for text in self.stop):
            raise InputError("a stop string is empty: it would stop before the first token")
        if any(token < 0 for token in self.stop_token_ids):
            raise InputError(f"stop tokens {self.stop_token_ids} must not be negative")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], steps: Sequence[int], names: Sequence[str] = ()
) -> list[int]:
    """Choose one token for each row.

    `logits`: float `[n, vocab]`; `params[i]`, `steps[i]` (tokens that the request has generated before this one) and,
    for messages, `names[i]` belong to row i. Ties go to the lowest token. Raises `BackendError` for a row that has a
    NaN or an infinity, or nothing but -inf: a single token is excluded with that.
    """
    if logits.shape[0] != len(params) or len(params) != len(steps):
        raise InputError(f"{logits.shape[0]} rows of logits for {len(params)} requests at {len(steps)} steps")
    tokens = _best(logits, steps, names)
    for row, (param, step) in enumerate(zip(params, steps, strict=True)):
        if not param.is_greedy:
            tokens[row] = _draw(logits[row], param, step)
    return tokens


def _best(logits: torch.Tensor, steps: Sequence[int], names: Sequence[str]) -> list[int]:
    """The likeliest token of each row.

    A NaN wins every comparison, so the winner tells of the whole row. It is read back with its index, for which the
    device is waited for anyway: every index is a float64 exactly.
    """
    best = logits.argmax(dim=-1, keepdim=True)
    read: list[list[float]] = torch.cat((best.double(), logits.gather(-1, best).double()), dim=-1).tolist()
    for row, (_, logit) in enumerate(read):
        if not math.isfinite(logit):
            raise BackendError(
                f"{names[row] if names else 'a request'}, output token {steps[row]}: the model gave logits that are no "
                f"numbers ({logit}): its weights are damaged, or too large for this dtype"
            )
    return [int(token) for token, _ in read]


def _draw(logits: torch.Tensor, params: SamplingParams, step: int) -> int:
    """Invert the cumulative distribution, in token order, at the request's own uniform number.

    Token order and not order of probability: two tokens of nearly equal probability would otherwise change places,
    and with them the outcome, when the last bit of a logit changes.
    """
    probabilities = _filtered(logits.double() / params.temperature, params).softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    threshold = uniform(params.seed, step) * cumulative[-1]
    return int(torch.searchsorted(cumulative, threshold, right=True).item())


def _filtered(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """`scores` with -inf for what top-k, and then top-p among the rest, exclude. The best token always stays."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    keep = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        ranked = scores[keep].softmax(dim=-1)
        before = ranked.cumsum(dim=-1) - ranked
        keep = keep[before < params.top_p]
    return torch.full_like(scores, -torch.inf).index_copy(0, keep, scores[keep])


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on both arguments only: SplitMix64 (Steele, Lea, Flood 2014), 53 bits of it."""
    return (_splitmix64(_splitmix64(seed & _MASK64) ^ (step & _MASK64)) >> 11) / (1 << 53)


def _splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
