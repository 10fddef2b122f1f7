"""What one forward pass computes: tokens of several requests laid side by side. Pure; no model, no cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hisparse.errors import InvariantError


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """The tokens of one request in one step.

    `token_ids` continue the request at position `start`; everything before has been computed. `is_decode`: one
    token, whose selected rows are resolved through the request's hot lease; otherwise the tokens are a prefill chunk,
    whose rows on host are staged. `wants_logits`: the logits after the last token are wanted.
    """

    slot: int
    token_ids: Sequence[int]
    start: int
    wants_logits: bool
    is_decode: bool


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Consecutive rows of a batch that are one request's prefill chunk.

    Rows `first_row … first_row+num_rows-1` are the tokens at positions `context_end-num_rows … context_end-1`.
    """

    first_row: int
    num_rows: int
    slot: int
    context_end: int

    @property
    def rows(self) -> slice:
        """Query rows of the segment."""
        return slice(self.first_row, self.first_row + self.num_rows)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over T tokens: first `num_decode` decode rows, each of a request of its own, then segments.

    `token_ids`, `positions`, `slots`: int64 `[T]`. `logit_rows`: int64 `[n]`, the rows whose logits are wanted;
    `logit_items`: for each of them, the index of its item in what `build_batch` was given.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    num_decode: int
    segments: tuple[PrefillSegment, ...]
    logit_rows: torch.Tensor
    logit_items: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed forward."""
        return int(self.token_ids.shape[0])


def build_batch(items: Sequence[ScheduledTokens], device: torch.device | str = "cpu") -> StepBatch:
    """Lay out a step's tokens, decode rows first; within each kind the order of `items` is kept.

    Raises `InvariantError` for an empty step, an item without tokens, a decode item that is not one token with a
    past, or a slot that appears twice.
    """
    _check(items)
    order = sorted(range(len(items)), key=lambda index: not items[index].is_decode)
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[PrefillSegment] = []
    logit_rows: list[int] = []
    logit_items: list[int] = []
    for index in order:
        item = items[index]
        count, end = len(item.token_ids), item.start + len(item.token_ids)
        if not item.is_decode:
            segments.append(PrefillSegment(len(token_ids), count, item.slot, end))
        token_ids.extend(item.token_ids)
        positions.extend(range(item.start, end))
        slots.extend([item.slot] * count)
        if item.wants_logits:
            logit_rows.append(len(token_ids) - 1)
            logit_items.append(index)

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return StepBatch(
        token_ids=column(token_ids),
        positions=column(positions),
        slots=column(slots),
        num_decode=sum(item.is_decode for item in items),
        segments=tuple(segments),
        logit_rows=column(logit_rows),
        logit_items=tuple(logit_items),
    )


def _check(items: Sequence[ScheduledTokens]) -> None:
    if not items:
        raise InvariantError("a step without tokens has no batch")
    seen: set[int] = set()
    for item in items:
        if not item.token_ids or item.start < 0:
            raise InvariantError(f"slot {item.slot}: {len(item.token_ids)} tokens from position {item.start}")
        if item.is_decode and (len(item.token_ids) != 1 or item.start == 0):
            raise InvariantError(f"slot {item.slot}: a decode row is one token with a past, not {item!r}")
        if item.slot in seen:
            raise InvariantError(f"slot {item.slot} appears twice in a step")
        seen.add(item.slot)
