"""Ctrl-C as a number to look at, so that it cuts no step of an engine in two."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """Counts Ctrl-C while its context lasts, in place of what Python does with it. Only for the main thread.

    `num`: how often it was pressed since whoever uses this set it to 0.
    """

    def __init__(self) -> None:
        self.num = 0
        self._raises = False

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within, Ctrl-C counts and raises `KeyboardInterrupt` too: for waiting on a person."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._see)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _see(self, number: int, frame: FrameType | None) -> None:
        self.num += 1
        if self._raises:
            raise KeyboardInterrupt
