"""What is said of a rank that ended, failed or hangs: its name, what it was doing, and its last words."""

import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from hisparse.engine.tp.messages import Failed, FailureKind
from hisparse.engine.tp.rank_spec import RankSpec
from hisparse.errors import BackendError, HiSparseError, InputError, RankError

LAST_WORDS_BYTES = 12000
"""Enough for the stacks of a crashed process, behind which are its many modules."""
JOIN_SECONDS = 2.0
"""A process that closed its channel has ended by then."""


class RankFault(HiSparseError, RuntimeError):
    """A rank failed, and neither its caller nor the machine is to blame. The message has its traceback."""


@dataclass(slots=True)
class Rank:
    """One rank as its parent sees it. `started_s`: when, in Unix seconds. `phase`: what it said that it does.

    `failure`: why it ended, if it said so. `words`: the file that has its standard output and errors.
    """

    spec: RankSpec
    process: BaseProcess
    started_s: float
    channel: Connection
    lifeline: Connection
    words: int
    phase: str = "starts"
    failure: Failed | None = None

    @property
    def last_words(self) -> str:
        """The end of what the process wrote."""
        size = os.fstat(self.words).st_size
        start = max(0, size - LAST_WORDS_BYTES)
        return os.pread(self.words, size - start, start).decode(errors="replace").strip()

    @property
    def is_over(self) -> bool:
        """Whether it failed or ended."""
        return self.failure is not None or not self.process.is_alive()

    @property
    def was_killed(self) -> bool:
        """Whether the process ended without a word."""
        return self.failure is None and not self.process.is_alive()


def culprit(ranks: Sequence[Rank]) -> Rank:
    """The rank that failed by itself, while others only lost it: one that was killed, else the first that failed."""

    def failed_at_s(rank: Rank) -> float:
        if rank.failure is not None:
            return rank.failure.at_s
        return 0.0 if rank.was_killed else math.inf

    return min(ranks, key=failed_at_s)


def describe(rank: Rank) -> Exception:
    """The exception to raise for a rank that is over."""
    failure = rank.failure
    if failure is None:
        return RankError(ended_how(rank))
    if failure.kind is FailureKind.INPUT:
        return InputError(f"{rank.spec.name}: {failure.text}")
    if failure.kind is FailureKind.BACKEND:
        return BackendError(f"{rank.spec.name}: {failure.text}")
    return RankFault(f"{rank.spec.name} (process {rank.process.pid}) failed; before, it {rank.phase}{said(rank)}")


def ended_how(rank: Rank) -> str:
    """A line on a process that ended without saying why, and what it said before."""
    rank.process.join(JOIN_SECONDS)
    code = rank.process.exitcode
    if code is None:
        how = "closed its channel"
    elif code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit code {code}"
    return f"{rank.spec.name} (process {rank.process.pid}) {how}; before, it {rank.phase}{said(rank)}"


def said(rank: Rank) -> str:
    """Its last words, as the end of a sentence."""
    words = rank.last_words
    return f". Its last words:\n{words}" if words else ", and said nothing"
