"""What runs beside the forward pass is forked from it and joined to it, launched or captured."""

from collections.abc import Callable, Sequence

import pytest
import torch

from hisparse.worker.side import InlineSideStream, SideStream, Task
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

LONG = 100_000_000
"""Cycles: some 50 ms, far longer than the host takes to launch what follows."""


@pytest.fixture
def side(on_cuda: torch.device) -> SideStream:
    from hisparse.worker.cuda.side import CudaSideStream

    return CudaSideStream(on_cuda)


def sleep_and_fill(target: torch.Tensor) -> Task:
    def task() -> None:
        torch.cuda._sleep(LONG)
        target.fill_(7)

    return task


# Order.


def test_what_follows_a_join_sees_what_the_task_did(side: SideStream) -> None:
    target = torch.zeros(1000)
    torch.cuda.synchronize()
    (branch,) = side.launch([sleep_and_fill(target)])
    too_early = target.clone()
    branch.join()
    seen = target.clone()
    assert bool((too_early == 0).all()), "the control: who does not join reads what was there before"
    assert bool((seen == 7).all())


def test_a_task_sees_what_was_computed_before_the_fork(side: SideStream) -> None:
    source, target = torch.zeros(1000), torch.zeros(1000)
    torch.cuda.synchronize()
    sleep_and_fill(source)()
    (branch,) = side.launch([lambda: target.copy_(source)])
    branch.join()
    assert bool((target == 7).all())


def test_tasks_of_one_launch_are_joined_one_by_one(side: SideStream) -> None:
    first, second = torch.zeros(1000), torch.zeros(1000)
    torch.cuda.synchronize()
    branches = side.launch([lambda: first.fill_(7), sleep_and_fill(second)])
    branches[0].join()
    seen = [first.clone(), second.clone()]
    branches[1].join()
    seen.append(second.clone())
    assert [values.unique().tolist() for values in seen] == [[7], [0], [7]]


def test_a_branch_may_be_joined_again(side: SideStream) -> None:
    target = torch.zeros(1000)
    for _ in range(3):
        target.zero_()
        branch, other = side.launch([sleep_and_fill(target), lambda: None])
        branch.join()
        branch.join()
        assert bool((target == 7).all())
        other.join()


def test_events_are_used_again(on_cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from hisparse.worker.cuda.side import CudaSideStream

    made: list[torch.cuda.Event] = []
    intact = torch.cuda.Event

    def counted() -> torch.cuda.Event:
        made.append(intact())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", counted)
    side = CudaSideStream(on_cuda)
    for _ in range(20):
        for branch in side.launch([lambda: None, lambda: None]):
            branch.join()
    assert len(made) == 3


# Graphs.


def graph_of(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def replay_ms(side: SideStream) -> float:
    """How long a graph takes of which half is computed and half is a task beside it."""

    def step() -> None:
        (branch,) = side.launch([lambda: torch.cuda._sleep(LONG)])
        torch.cuda._sleep(LONG)
        branch.join()

    step()  # loads what a capture could not
    graph = graph_of(step)
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def test_in_a_graph_a_task_runs_beside_what_is_computed(side: SideStream) -> None:
    assert replay_ms(side) < 0.75 * replay_ms(InlineSideStream())


def test_a_side_stream_serves_captures_and_launches_in_turn(side: SideStream) -> None:
    source, targets = torch.zeros(1000), [torch.zeros(1000) for _ in range(3)]

    def tasks() -> Sequence[Task]:
        return [lambda target=target: target.copy_(source) for target in targets]

    def step() -> None:
        source.add_(1)
        for branch in side.launch(tasks()):
            branch.join()
        source.add_(1)

    graphs = []
    for _ in range(2):
        step()
        graphs.append(graph_of(step))
    for graph in (*graphs, None, *graphs):
        before = source.clone()
        if graph is None:
            step()
        else:
            graph.replay()
        for target in targets:
            assert torch.equal(target, before + 1)
        assert torch.equal(source, before + 2)
