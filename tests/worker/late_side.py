"""A side stream as late as one may be: nothing runs before it is joined. And a resolver that counts its replays."""

from collections.abc import Sequence

import torch

from hisparse.kernels.contract import MissPlan, PagedRows, Resolver, ResolverCounters
from hisparse.kernels.reference import ReferenceResolver
from hisparse.worker import CpuBackend
from hisparse.worker.side import Branch, SideStream, Task


class LateBranch:
    def __init__(self, stream: "LateSideStream", number: int) -> None:
        self._stream = stream
        self._number = number

    def join(self) -> None:
        self._stream.run_through(self._number)


class LateSideStream:
    """Joining a task runs it and those before it: a stream does not overtake itself."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self.num_done = 0

    def launch(self, tasks: Sequence[Task]) -> Sequence[Branch]:
        first = len(self._tasks)
        self._tasks += tasks
        return tuple(LateBranch(self, first + index) for index in range(len(tasks)))

    def run_through(self, number: int) -> None:
        while self.num_done <= number:
            self._tasks[self.num_done]()
            self.num_done += 1


class CountingResolver(ReferenceResolver):
    """`served`: how many followers each replay served."""

    def __init__(self) -> None:
        self.served: list[int] = []

    def replay_plan(
        self,
        plan: MissPlan,
        sources: Sequence[PagedRows],
        destinations: Sequence[PagedRows],
        counters: ResolverCounters,
    ) -> None:
        self.served.append(len(sources))
        super().replay_plan(plan, sources, destinations, counters)


class LateBackend(CpuBackend):
    """The CPU, with both."""

    def __init__(self) -> None:
        super().__init__()
        self.side = LateSideStream()
        self.resolver = CountingResolver()

    def make_side_stream(self) -> SideStream:
        return self.side

    def make_resolver(self) -> Resolver:
        return self.resolver


def rows_of(rows: Sequence[tuple[int, Sequence[int]]], num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and slots, int32, of (slot, positions) pairs, followed by padding up to `num_rows` rows."""
    topk = len(rows[0][1])
    padded = [*rows, *[(-1, [-1] * topk)] * (num_rows - len(rows))]
    positions = torch.tensor([list(chosen) for _, chosen in padded], dtype=torch.int32)
    return positions, torch.tensor([slot for slot, _ in padded], dtype=torch.int32)
