"""How a rank notices that its parent is gone, or wants it to end, whatever it is doing."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, lifeline: Connection, end: Callable[[], None]) -> None:
    """Have a thread call `end`, which does not return, once process `parent` is gone or says something over `lifeline`.

    The thread waits for nothing else, so it can do so while the main thread waits for a rank that is no more. The
    process is watched itself too: children that it forked keep their copies of the lifeline's other end open.
    """
    watched: list[Connection | int] = [lifeline]
    try:
        watched.append(os.pidfd_open(parent))
    except ProcessLookupError:
        end()
    except OSError:  # a system that does not offer it has the lifeline
        pass

    def watch() -> None:
        wait(watched)
        end()

    threading.Thread(target=watch, name="hisparse-lifeline", daemon=True).start()


def die_with_parent() -> None:
    """Have the system kill this process when the thread that started it ends: for one that runs no Python any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
