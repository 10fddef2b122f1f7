"""An executor whose threads keep no process from ending, however long a call of theirs hangs.

Those of `concurrent.futures` are joined when the interpreter ends, so one look-up in a file system that does not answer
would hold the process for as long as that lasts.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_GRACE_S = 0.1


class DaemonExecutor(Executor):
    """At most `num_threads` daemon threads, which are started when there is work for them. Calls begin in order."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._ready = threading.Condition()
        """Over what follows."""
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_open = True

    def submit(
        self, fn: Callable[_Parameters, _Result], /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> "Future[_Result]":
        """Queue a call. Raises `RuntimeError` after `shutdown`."""
        future: Future[_Result] = Future()
        with self._ready:
            if not self._is_open:
                raise RuntimeError(f"{self._name} takes no more calls: it was shut down")
            self._queue.append((future, partial(fn, *args, **kwargs)))
            if len(self._queue) > self._num_idle and len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()
            self._ready.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. `wait` for those that were taken, or `cancel_futures` that no thread has begun."""
        self._end(cancel_futures=cancel_futures)
        if wait:
            self.join(float("inf"))

    def join(self, until_s: float) -> None:
        """Wait for the threads to end after `shutdown`, at most until that time of the monotonic clock."""
        for thread in self._threads:
            thread.join(min(threading.TIMEOUT_MAX, max(0.0, until_s - time.monotonic())))

    def close(self, deadline_s: float) -> bool:
        """Finish what is queued, at most `deadline_s` seconds long; the rest is cancelled. Whether no call hangs."""
        until_s = time.monotonic() + deadline_s
        self._end(cancel_futures=False)
        self.join(until_s)
        self._end(cancel_futures=True)
        self.join(time.monotonic() + _GRACE_S)
        return not any(thread.is_alive() for thread in self._threads)

    def _end(self, *, cancel_futures: bool) -> None:
        with self._ready:
            self._is_open = False
            cancelled = [*self._queue] if cancel_futures else []
            if cancel_futures:
                self._queue.clear()
            self._ready.notify_all()
        for future, _ in cancelled:
            future.cancel()
            future.set_running_or_notify_cancel()

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del job, future, call  # Waiting for the next call must keep nothing of this one.

    def _next(self) -> "tuple[Future[Any], Callable[[], Any]] | None":
        with self._ready:
            while not self._queue:
                if not self._is_open:
                    return None
                self._num_idle += 1
                try:
                    self._ready.wait()
                finally:
                    self._num_idle -= 1
            return self._queue.popleft()
