"""Sending to ranks: whole messages, and never for longer than there is time."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import FrameType

SMALL_BYTES = 32 << 10
"""A channel takes so much without a reader: a rank that answered everything but two or three requests has room."""


class Outbox:
    """What is on its way to ranks. One thread uses it."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def post(self, channels: Sequence[Connection], message: object) -> None:
        """Send a message to each channel, the large ones behind the caller's back. `wait` comes before the next one.

        A channel whose other end is gone is passed over: that a process ended is seen elsewhere.
        """
        encoded = bytes(ForkingPickler.dumps(message))
        if len(encoded) <= SMALL_BYTES:
            for channel in channels:
                _send(channel, encoded)
            return
        self._threads = [threading.Thread(target=_send, args=(channel, encoded), daemon=True) for channel in channels]
        for thread in self._threads:
            thread.start()

    def wait(self, until_s: float) -> bool:
        """Whether all of it was taken, by `until_s` of `time.monotonic` at the latest."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, Ctrl-C waits for the end: half a message would spoil a channel, and a rank alone in a step would hang.

    Python hands signals to the main thread alone, so no other one is interrupted.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if pressed:
            usual(*pressed[0])


def _send(channel: Connection, encoded: bytes) -> None:
    with suppress(OSError):
        channel.send_bytes(encoded)
