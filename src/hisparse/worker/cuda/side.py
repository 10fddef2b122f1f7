"""Launches on a CUDA stream beside the forward pass, as parallel branches of a graph where one is captured."""

from collections.abc import Sequence

import torch

from hisparse.worker.side import Branch, Task

_HIGH_PRIORITY = -1


class CudaBranch:
    """The end of one task, as an event that its stream lends. The stream has it back once the branch is joined."""

    __slots__ = ("_event", "_side")

    def __init__(self, side: "CudaSideStream", event: torch.cuda.Event) -> None:
        self._side = side
        self._event: torch.cuda.Event | None = event

    def join(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            self._side.join(event)


class CudaSideStream:
    """`SideStream` on a GPU.

    Forks and joins are events, so a capture that starts before the fork and ends after the join takes the tasks into
    its graph. Every event is recorded just before it is waited for: one that was last recorded in another capture, or
    in none, is never waited for. So events are reused as soon as they were joined, because a wait that is queued is
    for the recording that it found.

    `stream`: where the tasks run. Its blocks are few and go first: they wait for the link, and what computes has
    enough blocks to fill a multiprocessor later.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
        self._device = device
        self._fork = torch.cuda.Event()
        self._idle: list[torch.cuda.Event] = []

    def launch(self, tasks: Sequence[Task]) -> Sequence[Branch]:
        self._fork.record(torch.cuda.current_stream(self._device))
        self.stream.wait_event(self._fork)
        branches = []
        with torch.cuda.stream(self.stream):
            for task in tasks:
                task()
                event = self._idle.pop() if self._idle else torch.cuda.Event()
                event.record(self.stream)
                branches.append(CudaBranch(self, event))
        return tuple(branches)

    def join(self, event: torch.cuda.Event) -> None:
        """Have the current stream wait for a branch's event, and take the event back."""
        torch.cuda.current_stream(self._device).wait_event(event)
        self._idle.append(event)
