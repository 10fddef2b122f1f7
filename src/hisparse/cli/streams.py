"""Standard streams that are closed, full or gone: what is said there never ends in a traceback."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def open_closed_streams() -> None:
    """Give the process those standard streams that it was started without.

    Input is at its end, what goes to standard errors vanishes, and writing to standard output fails with `EBADF` as it
    would have. The descriptors are taken, so that no file of a run is mistaken for one of them.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def complain(message: str) -> None:
    """Say something on standard error, in one line. Where that cannot be written, nobody can be told."""
    try:
        print("hisparse:", " ".join(message.split()), file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def finish_errors() -> None:
    """Have no unwritten rest on standard error: the interpreter would try once more, and change the exit code."""
    try:
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Send what a stream still holds, and what comes, nowhere."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
