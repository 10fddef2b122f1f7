"""Decode steps as CUDA graphs: captured once per size, replayed with new inputs.

Sizes are buckets, of rows and of the positions that the indexer scores. Buckets of rows are fine, because padding is
computed as other rows are; buckets of positions are coarse, because a request grows through them. Rows that a bucket
has too many are padding: slot -1, which writes nothing that is read, selects nothing and resolves to nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from hisparse.errors import InvariantError
from hisparse.geometry import align_up
from hisparse.kernels.contract import EMPTY
from hisparse.worker.upload import upload

LEAST_WIDTH = 1024
"""The least number of positions that a graph scores: below it, a graph of its own would save nothing."""

ROW_STEP = 8
"""Buckets of rows are its multiples from twice it on, and powers of two below."""

MAX_GRAPHS = 32
"""Graphs that are kept: a replayed graph of a large model is thousands of launches, which take device memory."""

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """`num_rows` decode rows, each of a request of at most `width` tokens. `leased`: some request has a hot lease;
    while none has, nothing can be missed, and a step is launched without what loads and follows."""

    num_rows: int
    width: int
    leased: bool = True


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """The largest step: `max_rows` decode rows of requests of up to `max_tokens` tokens. `fixed_rows`: always pad to
    `max_rows`."""

    max_rows: int
    max_tokens: int
    fixed_rows: bool = False

    def bucket(self, num_rows: int, context: int, *, leased: bool = True) -> DecodeShape:
        """The shape in which a step of `num_rows` rows with at most `context` tokens runs, never beyond the limits.

        Rows: 1, 2, 4, 8, 16, 24, 32, …; width: powers of two. Raises `InvariantError` for a step beyond the limits.
        """
        if not 0 < num_rows <= self.max_rows or not 0 < context <= self.max_tokens:
            raise InvariantError(f"a step of {num_rows} decode rows over {context} tokens is outside {self}")
        fitting = _power_of_two(num_rows) if num_rows <= ROW_STEP else align_up(num_rows, ROW_STEP)
        rows = self.max_rows if self.fixed_rows else min(self.max_rows, fitting)
        return DecodeShape(rows, min(self.max_tokens, max(LEAST_WIDTH, _power_of_two(context))), leased)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows as they are planned: one token of each request."""

    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]

    def padded(self, num_rows: int) -> "DecodeRows":
        """The same rows, followed by padding."""
        missing = num_rows - len(self.tokens)
        return replace(
            self,
            tokens=[*self.tokens, *[0] * missing],
            positions=[*self.positions, *[0] * missing],
            slots=[*self.slots, *[EMPTY] * missing],
        )


DecodeForward = Callable[[torch.Tensor, int], torch.Tensor]
"""Given int64 `[3, n]` (tokens, positions and slots) and a width, computes logits `[n, vocab]`. It only launches."""


class Recent(Generic[Key, Value]):
    """Up to `limit` values by key. One more, and the one that was used least recently is forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[Key, Value] = {}  # in the order of use

    def __len__(self) -> int:
        return len(self._values)

    def get_or_make(self, key: Key, make: Callable[[Key], Value]) -> Value:
        """The value of `key`, by `make(key)` if there is none. What must go for it is forgotten afterwards.

        Afterwards, because a memory pool that the last of several graphs has left cannot take another one.
        """
        value = self._values.pop(key) if key in self._values else make(key)
        self._values[key] = value
        if len(self._values) > self._limit:
            del self._values[next(iter(self._values))]
        return value

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Runs decode steps, by replay if `use_graphs`. All graphs share one memory pool: they never run side by side.

    No more than `MAX_GRAPHS` are kept; a size that was forgotten is captured again when a step has it.
    """

    def __init__(
        self, forward: DecodeForward, limits: DecodeLimits, device: torch.device, *, use_graphs: bool = True
    ) -> None:
        self._forward = forward
        self._limits = limits
        self._device = device
        self._use_graphs = use_graphs
        self._pool = torch.cuda.graph_pool_handle() if use_graphs else None
        self._captured: Recent[DecodeShape, _Captured] = Recent(MAX_GRAPHS)

    @property
    def num_captured(self) -> int:
        """Graphs that are kept now."""
        return len(self._captured)

    def run(self, rows: DecodeRows, *, leased: bool = True) -> torch.Tensor:
        """Logits `[n, vocab]` of n rows. They stay valid until the next call.

        `leased`: as in `DecodeShape`. The forward pass finds the same out by itself while it is captured.
        """
        num_rows = len(rows.tokens)
        shape = self._limits.bucket(num_rows, max(rows.positions) + 1, leased=leased)
        inputs = self._upload(rows.padded(shape.num_rows))
        if not self._use_graphs:
            return self._forward(inputs, shape.width)[:num_rows]
        captured = self._captured.get_or_make(shape, self._capture)
        captured.inputs.copy_(inputs)
        captured.graph.replay()
        return captured.logits[:num_rows]

    def clear(self) -> None:
        """Forget all graphs and their memory."""
        self._captured.clear()

    def _upload(self, rows: DecodeRows) -> torch.Tensor:
        values = [*rows.tokens, *rows.positions, *rows.slots]
        return upload(values, torch.int64, self._device).view(3, -1)

    def _capture(self, shape: DecodeShape) -> _Captured:
        """Capture over padding alone, which changes nothing that anybody reads: also the run that warms up."""
        inputs = self._upload(DecodeRows([], [], []).padded(shape.num_rows))
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            # What a first run compiles, loads or allocates for good cannot be captured.
            for _ in range(2):
                self._forward(inputs, shape.width)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(inputs, shape.width)
        return _Captured(graph, inputs, logits)


def _power_of_two(value: int) -> int:
    """The least power of two at or above `value`."""
    return 1 << (value - 1).bit_length()
