"""A rank's end of the channel to its parent, for all its threads, and its warnings, which go to the parent's log."""

import logging
import threading
from multiprocessing.connection import Connection
from typing import Any

from hisparse.engine.tp.messages import Logged


class ParentChannel:
    """Answers of the main thread, and what any thread has to say."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def recv(self) -> Any:
        """The next request. Raises `EOFError` when the parent is gone. For the main thread."""
        return self._connection.recv()

    def send(self, message: object) -> None:
        """Say something, as a whole."""
        with self._lock:
            self._connection.send(message)

    def say(self, message: object) -> None:
        """The same for one that ends: it is heard, or not."""
        try:
            self.send(message)
        except (OSError, ValueError, TypeError, AttributeError):
            print("the parent could not be told", flush=True)

    def forward_warnings(self) -> None:
        """Have the library's warnings, and worse, written to the parent's log from here on."""
        logging.getLogger("hisparse").addHandler(_Forward(self))


class _Forward(logging.Handler):
    def __init__(self, channel: ParentChannel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send(Logged(record.name, record.levelno, self.format(record)))
        except Exception:
            self.handleError(record)
