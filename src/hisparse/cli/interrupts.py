"""Ctrl-C, and the signals that end a process, which do what Ctrl-C does and leave with an exit code of their own."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

EXIT_INTERRUPTED = 130
"""What a command returns for either; `exit_code` then says which it was."""

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_ended_by: signal.Signals | None = None


def heed_endings() -> None:
    """From here on SIGTERM and SIGHUP do what Ctrl-C does at the time, once. Only for the main thread of a command.

    Those that whoever started the process has it ignore, as `nohup` does, stay ignored.
    """
    global _ended_by
    _ended_by = None
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A command in the background. What Ctrl-C does has to exist all the same.
        signal.signal(signal.SIGINT, _end_unless_ctrl_c)
    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def ignore_endings() -> None:
    """All is said and the exit code is known: no signal has the interpreter complain while it ends."""
    for number in (signal.SIGINT, *_ENDINGS):
        signal.signal(number, signal.SIG_IGN)


def is_told_to_end() -> bool:
    """Whether SIGTERM or SIGHUP came."""
    return _ended_by is not None


def exit_code() -> int:
    """Of a command that was interrupted: 130 by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP."""
    return EXIT_INTERRUPTED if _ended_by is None else 128 + _ended_by


def describe() -> str:
    """By what a command was interrupted, for a message."""
    return "interrupted" if _ended_by is None else f"ended by {_ended_by.name}"


def _end(number: int, frame: FrameType | None) -> None:
    global _ended_by
    if _ended_by is None:
        _ended_by = signal.Signals(number)
        # Whoever has Ctrl-C wait, because half of what is being done would be worse, has this wait too.
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):
            interrupt(number, frame)


def _end_unless_ctrl_c(number: int, frame: FrameType | None) -> None:
    if number != signal.SIGINT:
        raise KeyboardInterrupt


class Interrupts:
    """Counts Ctrl-C while its context lasts, in place of what Python does with it, so that it cuts no step of an engine
    in two. Only for the main thread.

    `num`: how often it was pressed since whoever uses this set it to 0.
    """

    def __init__(self) -> None:
        self.num = 0
        self._raises = False

    @property
    def leaves(self) -> bool:
        """Whether the user is to leave: Ctrl-C came twice, or the process was told to end."""
        return self.num >= 2 or is_told_to_end()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within, Ctrl-C counts and raises `KeyboardInterrupt` too: for waiting on a person."""
        self._raises = True
        try:
            if is_told_to_end():
                raise KeyboardInterrupt
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
