"""Threads that do I/O, with a queue that loads may jump, and a deadline after which a transfer counts as failed.

A thread inside a system call cannot be called back. So a transfer has two ends: its *verdict*, which the deadline
brings at the latest, and itself, which is done once nothing touches its buffer any more.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from mmap import mmap

from hisparse.offload.files.block_file import HEADER_BYTES
from hisparse.offload.files.notices import warn_rarely

_LOG = logging.getLogger(__name__)
_GRACE_S = 0.1


class OverdueError(Exception):
    """A transfer's deadline passed while it was under way. Never leaves the tier: it ends as a miss."""


class Transfer(Future[bool]):
    """A store or load under way. Done once its buffer is the caller's again; False is a miss, or nothing kept.

    `verdict` is its result as soon as that is certain, by the deadline at the latest. It comes before the transfer is
    done only where a system call hangs: then it is False, and the buffer must stay untouched until this is done.
    """

    def __init__(self, run: Callable[["Transfer", memoryview], bool], deadline_s: float) -> None:
        super().__init__()
        self.verdict: Future[bool] = Future()
        self._run = run
        self._deadline = time.monotonic() + deadline_s
        self._guard = threading.Lock()
        self._is_begun = False
        self._has_verdict = False

    @property
    def deadline(self) -> float:
        """When the verdict is due, in seconds of the monotonic clock."""
        return self._deadline

    def check(self) -> None:
        """Raise `OverdueError` once the deadline has passed or the verdict fell."""
        if self._has_verdict or time.monotonic() >= self._deadline:
            raise OverdueError

    def work(self, page: memoryview) -> None:
        """Do it, in a thread of the pool. `page` is that thread's aligned header page."""
        with self._guard:
            if self._has_verdict:
                return
            self._is_begun = True
            run = self._run
            del self._run  # With it goes the buffer: whoever keeps the transfer does not keep that.
        try:
            result = run(self, page)
        except (OSError, OverdueError) as error:
            _LOG.debug("a transfer failed: %s", error)
            result = False
        except Exception:
            _LOG.exception("a transfer failed in a way that it should not")
            result = False
        self._decide(result)
        self.set_result(self.verdict.result())

    def expire(self) -> None:
        """Let the verdict fall as False. A transfer that no thread has begun is done with that."""
        with self._guard:
            is_begun = self._is_begun
            falls = not self._has_verdict
            self._has_verdict = True
        if falls:
            self.verdict.set_result(False)
            if not is_begun:
                del self._run
                self.set_result(False)

    def _decide(self, result: bool) -> None:
        with self._guard:
            falls = not self._has_verdict
            self._has_verdict = True
        if falls:
            self.verdict.set_result(result)


def finished(result: bool) -> Transfer:
    """A transfer that was over before it began."""
    transfer = Transfer(lambda *_: result, 0.0)
    transfer.verdict.set_result(result)
    transfer.set_result(result)
    return transfer


class IoThreads:
    """A fixed number of threads. They are daemons: a call that hangs does not keep the process from ending."""

    def __init__(self, num_threads: int, deadline_s: float, max_queued: int) -> None:
        self._deadline_s = deadline_s
        self._max_queued = max_queued
        self._ready = threading.Condition()
        self._urgent: deque[Transfer] = deque()
        self._patient: deque[Transfer] = deque()
        self._live: deque[Transfer] = deque()
        """Every transfer in the order of its deadline; the watchdog drops those that are done."""
        self._is_open = True
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(num_threads)]
        self._watchdog = threading.Thread(target=self._watch, daemon=True)
        for thread in (*self._threads, self._watchdog):
            thread.start()

    def submit(self, run: Callable[[Transfer, memoryview], bool], *, urgent: bool) -> Transfer:
        """Queue a transfer, before all that are not urgent if it is. Refused, as False, when closed or full."""
        transfer = Transfer(run, self._deadline_s)
        with self._ready:
            queue = self._urgent if urgent else self._patient
            is_accepted = self._is_open and len(queue) < self._max_queued
            if is_accepted:
                queue.append(transfer)
                self._live.append(transfer)
                self._ready.notify()
        if not is_accepted:
            transfer.expire()
        return transfer

    def close(self, deadline_s: float) -> bool:
        """Finish what is queued, at most `deadline_s` seconds long; the rest fails. Whether no thread hangs."""
        until = time.monotonic() + deadline_s
        with self._ready:
            self._is_open = False
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._ready:
            left = [*self._live]
        for transfer in left:
            transfer.expire()
        self._over.set()
        # Whoever was between two system calls sees its verdict and ends at once.
        until = time.monotonic() + _GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._watchdog.join()
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        page = memoryview(mmap(-1, HEADER_BYTES))  # Whole pages are aligned for direct I/O.
        while (transfer := self._next()) is not None:
            transfer.work(page)
            del transfer  # Waiting for the next one must not keep the buffer of this one.

    def _next(self) -> Transfer | None:
        with self._ready:
            while not (self._urgent or self._patient):
                if not self._is_open:
                    return None
                self._ready.wait()
            return (self._urgent or self._patient).popleft()

    def _watch(self) -> None:
        """Expire what is overdue. While nothing waits, nothing can be due before a whole deadline from now."""
        while True:
            with self._ready:
                while self._live and self._live[0].done():
                    self._live.popleft()
                due = self._live[0].deadline if self._live else time.monotonic() + self._deadline_s
                overdue = self._live.popleft() if self._live and due <= time.monotonic() else None
            if overdue is not None:
                overdue.expire()
                said = "a file could not be read or written within %g s: it counts as a miss, or as not kept"
                warn_rarely("the file tier", "overdue", said, self._deadline_s)
            elif self._over.wait(max(0.0, due - time.monotonic())):
                return
