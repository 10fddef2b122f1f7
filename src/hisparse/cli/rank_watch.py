"""Seeing that a rank has ended while nothing is asked of it, because a line is waited for."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self


class RankEnded(Exception):
    """A rank's process has ended. Whoever asks the ranks for something is told which, and how."""


class RankWatch:
    """Looks after the processes of an engine's ranks while its context lasts. Only for the main thread.

    Where an engine has none, nothing is watched. Whoever waits for a rank's answer sees its end without this.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        """`pids`: the ranks' processes. Only the end of children of this one is seen while a line is waited for."""
        self._pids = pids
        self._raises = False

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within, `RankEnded` is raised as soon as a rank has ended, and at once if one has: for waiting on a person.

        One that ends in the instant before a read that then waits is seen when the context is next entered.
        """
        self._raises = True
        try:
            self._look()
            yield
        finally:
            self._raises = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGCHLD, self._see) if self._pids else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pids:
            signal.signal(signal.SIGCHLD, self._before)

    def _see(self, number: int, frame: FrameType | None) -> None:
        if self._raises:
            self._look()

    def _look(self) -> None:
        if any(map(_has_ended, self._pids)):
            raise RankEnded


def _has_ended(pid: int) -> bool:
    """Whether a process has; the exit code of a child stays for whoever started it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        # Its exit code was asked for already, or another process has started it.
        return not os.path.exists(f"/proc/{pid}")
