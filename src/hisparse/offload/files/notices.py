"""Warnings about what goes wrong with every block alike: one of a kind, not one a block."""

import errno
import logging
import threading
import time

_LOG = logging.getLogger(__name__)
AGAIN_AFTER_S = 600.0
"""A kind of warning that goes on is repeated after this."""

_said: dict[tuple[str, str], float] = {}
_guard = threading.Lock()


def warn_rarely(where: str, kind: str, message: str, *arguments: object) -> None:
    """Log a warning, unless one of its `kind` about the same place was logged in this process a short while ago.

    `message` takes `arguments` as a logger does. Tiers that share a directory say a thing once.
    """
    now = time.monotonic()
    with _guard:
        last = _said.get((where, kind))
        if last is not None and now - last < AGAIN_AFTER_S:
            return
        _said[where, kind] = now
    _LOG.warning(message, *arguments)


def kind_of(error: OSError) -> str:
    """What errors of one kind have in common: "ENOSPC" and the like."""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
