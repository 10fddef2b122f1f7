"""Work beside the forward pass: forked from it, joined by whoever needs its results."""

from collections.abc import Callable, Sequence
from typing import Protocol

Task = Callable[[], None]
"""Something that only launches: on a GPU, on torch's current stream."""


class Branch(Protocol):
    """The end of one task that runs beside the forward pass."""

    def join(self) -> None:
        """Whatever is computed after this call sees what the task did. Never waits on the CPU; repeating it is free.

        The first call is made in the stream from which the task was forked, and counts for that stream alone.
        """
        ...


class SideStream(Protocol):
    """Tasks beside the forward pass, in the order in which they were launched."""

    def launch(self, tasks: Sequence[Task]) -> Sequence[Branch]:
        """Fork: run the tasks behind all that was computed before this call. One branch each, all to be joined."""
        ...


class DoneBranch:
    """A branch that ended before anybody could look."""

    def join(self) -> None:
        """Nothing to wait for."""


class InlineSideStream:
    """Where computing is synchronous, beside means at once."""

    def launch(self, tasks: Sequence[Task]) -> Sequence[Branch]:
        for task in tasks:
            task()
        return tuple(DoneBranch() for _ in tasks)
