"""Accuracy on fresh text prompts, made from files that training never saw and tokenised as a user's prompt is.

An answer counts if greedy decoding would give exactly its digits. Decoding is not run token by token: the right answer
is appended, and each of its tokens must be the most likely one after those before. The first wrong token would end a
greedy answer's chances anyway, so both ways count the same prompts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hisparse.evaluation.prompts import FinderPrompt, PromptSource
from tools.finder.model import Finder
from tools.finder.schedule import Cell

BATCH_TOKENS = 1 << 17
_PAD = 64
"""Lengths are rounded up to this: few shapes, aligned rows. What is appended comes after everything that counts."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one cell gave. `thirds`: hits and prompts by where the asked fact stands, from first to last third."""

    cell: Cell
    prompts: int
    hits: int
    thirds: tuple[tuple[int, int], ...]

    @property
    def accuracy(self) -> float:
        return self.hits / max(1, self.prompts)

    def as_json(self) -> dict[str, Any]:
        """As it stands in `eval.json`."""
        fields = {"context": self.cell.context, "keys": self.cell.keys, "prompts": self.prompts, "hits": self.hits}
        return {**fields, "accuracy": round(self.accuracy, 4), "by_depth": [list(third) for third in self.thirds]}


class PromptMaker:
    """Makes prompts from the held-out files, and cuts them into tokens."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        """`tokenizer` is of the `tokenizers` library."""
        self._tokenizer = tokenizer
        self._source = PromptSource(lambda text: len(tokenizer.encode(text).ids), seed)

    def prompts(self, cell: Cell, num: int) -> list[FinderPrompt]:
        """`num` prompts of at most `cell.context` tokens, answer included. The same call gives the same prompts."""
        return self._source.prompts(cell.context, cell.keys, num)

    def encode(self, prompts: Sequence[FinderPrompt]) -> list[tuple[list[int], list[int]]]:
        """Token ids of each prompt's text and of its answer, tokenised apart, as prompt and output are."""
        texts = self._tokenizer.encode_batch([prompt.text for prompt in prompts])
        return [
            (text.ids, self._tokenizer.encode(prompt.answer).ids) for text, prompt in zip(texts, prompts, strict=True)
        ]


@torch.no_grad()
def answers_right(model: Finder, pairs: Sequence[tuple[list[int], list[int]]], window: bool = False) -> list[bool]:
    """For each prompt and answer, whether greedy decoding with sparse attention gives the answer.

    `window` lets attention see only the last `topk` tokens instead of the selected ones.
    """
    device = next(model.parameters()).device
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.zeros(len(pairs), -(-length // _PAD) * _PAD, dtype=torch.int64)
    rows = torch.zeros(len(pairs), len(pairs[0][1]), dtype=torch.int64)
    for index, (prompt, answer) in enumerate(pairs):
        tokens[index, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        rows[index] = torch.arange(len(answer)) + len(prompt) - 1
    hidden, _ = model(tokens.to(device), model.shape.topk, window=window)
    asked = hidden.gather(1, rows.to(device)[..., None].expand(-1, -1, hidden.shape[-1]))
    said = model.lm_head(asked).argmax(-1).cpu()
    wanted = torch.tensor([answer for _, answer in pairs])
    return [bool(right) for right in (said == wanted).all(1)]


def run_cell(model: Finder, maker: PromptMaker, cell: Cell, num: int, deadline: float, window: bool = False) -> Outcome:
    """Evaluate `num` prompts of `cell`, or as many as fit before `deadline` (of `time.monotonic`)."""
    prompts = maker.prompts(cell, num)
    pairs = maker.encode(prompts)
    size = max(1, BATCH_TOKENS // cell.context)
    right: list[bool] = []
    for first in range(0, num, size):
        if time.monotonic() > deadline:
            break
        right += answers_right(model, pairs[first : first + size], window)
    by_third: list[list[bool]] = [[], [], []]
    for hit, prompt in zip(right, prompts, strict=False):
        by_third[min(2, int(prompt.depth * 3))].append(hit)
    thirds = tuple((sum(hits), len(hits)) for hits in by_third)
    return Outcome(cell, len(right), sum(right), thirds)


def run_cells(
    model: Finder, maker: PromptMaker, cells: Sequence[Cell], num: int, deadline: float, log: Callable[[str], None]
) -> Iterator[Outcome]:
    """Evaluate `cells` in their order until `deadline`; a cell for which no time is left is not given out."""
    for cell in cells:
        began = time.monotonic()
        outcome = run_cell(model, maker, cell, num, deadline)
        if not outcome.prompts:
            return
        spent = time.monotonic() - began
        log(
            f"context {cell.context:6d}  keys {cell.keys:2d}  {outcome.hits:3d}/{outcome.prompts:3d} = "
            f"{outcome.accuracy:6.1%}  ({spent:.1f} s)"
        )
        yield outcome
