"""Decode steps as CUDA graphs: captured once per size, replayed with new inputs.

Sizes are buckets, of rows and of the positions that the indexer scores. Rows that a bucket has too many are padding:
slot -1, which writes to the null block, selects nothing and resolves to nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hisparse.errors import InvariantError
from hisparse.kernels.contract import EMPTY
from hisparse.worker.upload import upload

LEAST_WIDTH = 1024
"""The least number of positions that a graph scores: below it, a graph of its own would save nothing."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """`num_rows` decode rows, each of a request of at most `width` tokens."""

    num_rows: int
    width: int


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """The largest step: `max_rows` decode rows of requests of up to `max_tokens` tokens. `fixed_rows`: always pad to
    `max_rows`."""

    max_rows: int
    max_tokens: int
    fixed_rows: bool = False

    def bucket(self, num_rows: int, context: int) -> DecodeShape:
        """The size at which a step of `num_rows` rows with at most `context` tokens runs: powers of two up to the
        limits. Raises `InvariantError` for a step beyond them."""
        if not 0 < num_rows <= self.max_rows or not 0 < context <= self.max_tokens:
            raise InvariantError(f"a step of {num_rows} decode rows over {context} tokens is outside {self}")
        rows = self.max_rows if self.fixed_rows else min(self.max_rows, _power_of_two(num_rows))
        return DecodeShape(rows, min(self.max_tokens, max(LEAST_WIDTH, _power_of_two(context))))


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


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Runs decode steps, by replay if `use_graphs`. All graphs share one memory pool: they never run side by side."""

    def __init__(
        self, forward: DecodeForward, limits: DecodeLimits, device: torch.device, *, use_graphs: bool = True
    ) -> None:
        self._forward = forward
        self._limits = limits
        self._device = device
        self._use_graphs = use_graphs
        self._pool = torch.cuda.graph_pool_handle() if use_graphs else None
        self._captured: dict[DecodeShape, _Captured] = {}

    @property
    def num_captured(self) -> int:
        """Graphs captured so far."""
        return len(self._captured)

    def run(self, rows: DecodeRows) -> torch.Tensor:
        """Logits `[n, vocab]` of n rows. They stay valid until the next call."""
        num_rows = len(rows.tokens)
        shape = self._limits.bucket(num_rows, max(rows.positions) + 1)
        inputs = self._upload(rows.padded(shape.num_rows))
        if not self._use_graphs:
            return self._forward(inputs, shape.width)[:num_rows]
        captured = self._captured.get(shape)
        if captured is None:
            captured = self._captured[shape] = self._capture(shape)
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
