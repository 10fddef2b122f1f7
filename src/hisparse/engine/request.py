"""One request and what the scheduler knows of it."""

import operator
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from hisparse.engine.reuse import ReusedTokens
from hisparse.engine.sampler import SamplingParams
from hisparse.errors import InputError
from hisparse.residency import RequestPages


class RequestStatus(Enum):
    """WAITING has no slot and no blocks; RUNNING has both; FINISHED has neither any more."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    """A stop string or token, or the end of text."""
    LENGTH = "length"
    """`max_tokens` tokens were generated."""


@dataclass(slots=True, eq=False)
class Request:
    """`tokens`: prompt and output, only ever appended to. `num_computed`: tokens whose KV is in the cache.

    The scheduler changes `status`, `slot`, `num_computed`, `capacity` (tokens that the leased pages cover),
    `free_until` (while fewer tokens are computed, a decode holds all that it needs now and in the next step),
    `next_seal` (the token count at which the next page is full), `footprint` (device blocks it is promised),
    `prefix_keys` (of `tokens` as they stand while WAITING), `asks_tiers` (its next pages may come from below the
    pools), `tiers_failed` (a load failed, so it never asks again), `reused` (where its prompt came from since it was
    last admitted), `is_counted` (that was added to the total) and `admitted`, when it ran for the first time; `pages`
    are its records at the coordinator while RUNNING. The engine changes `tokens`, the times (seconds, monotonic) and
    `finish_reason`.
    """

    request_id: str
    params: SamplingParams
    tokens: "array[int]"
    num_prompt: int
    status: RequestStatus = RequestStatus.WAITING
    slot: int = -1
    num_computed: int = 0
    capacity: int = 0
    free_until: int = 0
    next_seal: int = 0
    holds_hot: bool = False
    footprint: int = 0
    prefix_keys: list[bytes] | None = None
    pages: RequestPages | None = None
    asks_tiers: bool = False
    tiers_failed: bool = False
    reused: ReusedTokens = field(default_factory=ReusedTokens)
    is_counted: bool = False
    finish_reason: FinishReason | None = None
    logits: list[torch.Tensor] = field(default_factory=list)
    arrival: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def max_length(self) -> int:
        """Tokens whose KV the request can come to need. The last token generated is never computed."""
        return self.num_prompt + self.params.max_tokens - 1

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt :].tolist()

    def prompt_tokens(self, start: int, end: int) -> int:
        """How many of the positions `start` … `end`-1 belong to the prompt."""
        return max(0, min(end, self.num_prompt) - start)

    def has_pages(self, num_pages: int, block_size: int) -> None:
        """All the pages that it has are full: `num_pages`, none of which it has to compute."""
        self.num_computed = self.capacity = num_pages * block_size
        self.next_seal = self.num_computed + block_size


def checked_prompt(prompt_ids: Sequence[int] | torch.Tensor, vocab_size: int) -> "array[int]":
    """Token ids as a request keeps them. Raises `InputError` for what is no non-empty run of ids of the vocabulary."""
    if isinstance(prompt_ids, str):
        raise InputError("the prompt is text, and token ids are wanted: give what the tokenizer's encode makes of it")
    if isinstance(prompt_ids, torch.Tensor):
        if prompt_ids.dim() != 1:
            raise InputError(f"the prompt is a tensor of shape {list(prompt_ids.shape)}; it must have one dimension")
        prompt_ids = prompt_ids.tolist()
    ids = _integers(prompt_ids, "the prompt")
    if not ids:
        raise InputError("the prompt is empty: it needs at least one token")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InputError(f"token id {token} is outside the vocabulary of {vocab_size}")
    return array("i", ids)


def check_stop_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InputError` for a stop token that the model cannot generate."""
    for token in _integers(params.stop_token_ids, "stop_token_ids"):
        if not 0 <= token < vocab_size:
            raise InputError(f"stop token {token} is outside the vocabulary: its tokens are 0 to {vocab_size - 1}")


def _integers(values: Iterable[object], what: str) -> list[int]:
    try:
        values = list(values)
    except TypeError:
        raise InputError(f"{what} must be a sequence of token ids, not {values!r}") from None
    ids: list[int] = []
    for value in values:
        try:
            ids.append(operator.index(value))  # type: ignore[arg-type]
        except TypeError:
            raise InputError(f"{what} has {value!r} among its token ids, which must be integers") from None
    return ids
