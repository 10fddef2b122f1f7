"""Giving pinned memory back when the process ends, by `close`, at exit or on SIGTERM, and never waiting for ever.

The kernel unpins what a dying process still has pinned, and a process with hundreds of gigabytes then hangs in exit
for minutes, unkillable. So it is done before, while the process can still be watched.

A process that handles SIGTERM itself is left to do so: it may want to finish what runs, and needs its memory for it.
It then ends as any other, and what runs at exit does the rest.
"""

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger(__name__)

TEARDOWN_SECONDS = 20.0
"""What `run_all` waits for at most."""

_lock = threading.RLock()
_actions: dict[int, Callable[[], None]] = {}
_next_key = 0
_is_installed = False


def add(action: Callable[[], None]) -> int:
    """Have `action` run at exit, and on a SIGTERM that would end the process. Returns the key for `remove`.

    The first call in the main thread installs the handler, unless the process has one or ignores the signal.
    """
    global _next_key
    with _lock:
        _install()
        _next_key += 1
        _actions[_next_key] = action
        return _next_key


def remove(key: int) -> None:
    """Forget an action: what it would do was done. Unknown keys are ignored."""
    with _lock:
        _actions.pop(key, None)


def run_all(seconds: float = TEARDOWN_SECONDS) -> bool:
    """Run and forget all actions, at once and for `seconds` at most. False when time ran out; then they go on."""
    deadline = time.monotonic() + seconds
    threads = [threading.Thread(target=_run, args=(action,), daemon=True) for action in _take_all()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    finished = not any(thread.is_alive() for thread in threads)
    if not finished:
        logger.warning("host memory was not unpinned within %.0f s; the system does it at exit", seconds)
    return finished


def _run_at_exit() -> None:
    """One after the other, because an interpreter that ends starts no threads."""
    for action in _take_all():
        _run(action)


def _take_all() -> list[Callable[[], None]]:
    with _lock:
        actions = list(_actions.values())
        _actions.clear()
    return actions


def _run(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        logger.exception("host memory could not be given back")


def _install() -> None:
    global _is_installed
    if _is_installed or threading.current_thread() is not threading.main_thread():
        return
    _is_installed = True
    atexit.register(_run_at_exit)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    run_all()
    # Die of the signal, as whoever sent it expects to see.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
