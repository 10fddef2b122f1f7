"""The stream that copies of pages go through: what every backend offers, and the CPU's."""

import random
from collections import deque
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hisparse.errors import InputError
from hisparse.worker.views import BlockCopies


class Copies(Protocol):
    """Copies that wait for their turn on a `CpuStream`."""

    def run(self) -> None:
        """Move the bytes."""
        ...


@runtime_checkable
class WaitingCopies(Copies, Protocol):
    """Copies that somebody else makes: `run` waits for them."""

    @property
    def is_ready(self) -> bool:
        """Whether `run` would return at once."""
        ...


class CopyEvent(Protocol):
    """The end of one submission."""

    def query(self) -> bool:
        """Whether the copies are seen to be done. Never waits. Once true, always true."""
        ...

    def wait(self) -> None:
        """Block the CPU until the copies are done."""
        ...


class CopyStream(Protocol):
    """Copies in the order in which they were submitted, ordered with the forward passes around them."""

    def submit(self, copies: BlockCopies) -> CopyEvent:
        """Put copies in the stream, behind earlier copies and behind what was computed before this call."""
        ...

    def begin_step(self) -> None:
        """Called once before the step's own copies are submitted.

        Whatever is computed after this call sees the bytes of every copy submitted before it.
        """
        ...

    def order_before_compute(self) -> None:
        """Whatever is computed after this call sees the bytes of every copy of earlier steps.

        Called at each access of a cache, so it must be cheap when nothing was submitted since the last call.
        """
        ...

    def synchronize(self) -> None:
        """Block the CPU until every copy is done."""
        ...


@dataclass(frozen=True, slots=True)
class CopyDelay:
    """How late the CPU's copies are. Drawn from `seed`, so that a run can be repeated.

    Bytes move at the first poll or up to `max_polls` later, and up to `max_polls` polls after that the copy is seen
    to be done. With 0, both happen at the next poll.
    """

    seed: int = 0
    max_polls: int = 0

    def __post_init__(self) -> None:
        if self.max_polls < 0:
            raise InputError(f"a copy delay of {self.max_polls} polls is in the past: it must be at least 0")


class _Submission:
    """One entry of a `CpuStream`, and its event. The bytes of `copies` move at most once; then it is None."""

    def __init__(self, stream: "CpuStream", copies: Copies, moves_at: int, seen_at: int) -> None:
        self._stream = stream
        self.copies: Copies | None = copies
        self._polls = 0
        self._moves_at = moves_at
        self._seen_at = seen_at

    def query(self) -> bool:
        self._polls += 1
        if self._polls >= self._moves_at:
            self._stream.try_to_move_through(self)
        return self.copies is None and self._polls >= self._seen_at

    def wait(self) -> None:
        self._stream.move_through(self)
        self._polls = max(self._polls, self._seen_at)


class CpuStream:
    """Copies that happen late, as those of a device do, but at moments that a seed decides.

    The CPU computes at once, so stream order means: copies still outstanding are made when something computed after
    them is about to look (`order_before_compute`). That moves their bytes and says nothing about their events: a copy
    whose effect is relied on may well not be known to have completed.
    """

    def __init__(self, delay: CopyDelay) -> None:
        self._max_polls = delay.max_polls
        self._random = random.Random(delay.seed)
        self._outstanding: deque[_Submission] = deque()

    @property
    def num_outstanding(self) -> int:
        """Submissions whose bytes have not moved."""
        return len(self._outstanding)

    def submit(self, copies: Copies) -> CopyEvent:
        moves_at = 1 + self._random.randint(0, self._max_polls)
        seen_at = moves_at + self._random.randint(0, self._max_polls)
        submission = _Submission(self, copies, moves_at, seen_at)
        self._outstanding.append(submission)
        return submission

    def begin_step(self) -> None:
        """Nothing yet: copies stay late until something looks."""

    def order_before_compute(self) -> None:
        while self._outstanding:
            self._move_next()

    def synchronize(self) -> None:
        for submission in tuple(self._outstanding):
            submission.wait()

    def move_through(self, submission: _Submission) -> None:
        """Make every copy up to and including `submission`: a stream does not overtake itself."""
        while submission.copies is not None:
            self._move_next()

    def try_to_move_through(self, submission: _Submission) -> None:
        """As `move_through`, as far as that goes without waiting for anybody."""
        while submission.copies is not None:
            first = self._outstanding[0].copies
            if isinstance(first, WaitingCopies) and not first.is_ready:
                return
            self._move_next()

    def _move_next(self) -> None:
        submission = self._outstanding.popleft()
        if submission.copies is not None:
            submission.copies.run()
            submission.copies = None
