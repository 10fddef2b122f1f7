"""Ranks as processes: started, asked, watched and ended. Whatever happens to one of them, all end, and soon.

A rank is found to be dead by its process's handle, and to hang by a deadline. What is left of it then is what it wrote
to standard output and errors, which goes to a file of memory: its last words. The others are ended with it, because
a collective without one rank never ends.
"""

import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from typing import Any, NoReturn

from hisparse.engine.tp.driver_files import remove_driver_files
from hisparse.engine.tp.failures import Rank, culprit, describe, ended_how, said
from hisparse.engine.tp.messages import Close, Closed, Failed, Logged, Phase
from hisparse.engine.tp.rank_process import SAY_WHERE, Inherited, run_rank
from hisparse.engine.tp.rank_spec import RankSpec
from hisparse.engine.tp.sending import Outbox, uninterrupted
from hisparse.errors import ProtocolError, RankError

logger = logging.getLogger(__name__)

GRACE_SECONDS = 2.0
"""After one rank failed, the others get so long to say or show which of them was the first."""
UNPIN_SECONDS = 25.0
"""A rank with pinned memory that is told to end gives it back in that time."""
SAY_SECONDS = 0.3
"""A rank that hangs gets so long to write where it is, once asked."""


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """Descriptors of the files that ranks share: the host pool's, and that of its order. None for private pools."""

    pool: int | None = None
    order: int | None = None

    def close(self) -> None:
        for fd in (self.pool, self.order):
            if fd is not None:
                os.close(fd)


class RankProcesses:
    """All ranks of an engine. Start them with `start`; end them with `close`, or by any failure of `ask`."""

    def __init__(self, method: str) -> None:
        """`method`: how processes are started, as `multiprocessing` calls it."""
        self._context: Any = multiprocessing.get_context(method)
        self.ranks: list[Rank] = []
        self._closed = False
        self._outbox = Outbox()
        self._owed: Counter[int] = Counter()
        """Answers that each rank has still to give. More than one after a request whose asker was interrupted."""

    def start(self, specs: Sequence[RankSpec], files: SharedFiles) -> None:
        """Start all ranks. `files` are needed until the ranks have answered once."""
        try:
            for spec in specs:
                self.ranks.append(self._start(spec, files))
                self._owed[spec.rank] = 1  # that it is ready
        except BaseException:
            self.kill()
            raise

    def ask(self, request: object | None, timeout_s: float) -> list[Any]:
        """Send all ranks a request, None for none, and return their answers in order.

        Raises what a rank found wrong, with its name; `RankError` when one ended or did not answer in time. All ranks
        have ended then. Interrupted by anything else, the ranks go on, and the next call passes over what they answer.
        """
        if self._closed:
            raise RankError("all ranks have ended")
        until_s = time.monotonic() + timeout_s
        if request is not None:
            if not self._outbox.wait(until_s):
                self._end_hanging(self.ranks, timeout_s)
            with uninterrupted():
                self._outbox.post([rank.channel for rank in self.ranks], request)
                self._owed.update(rank.spec.rank for rank in self.ranks)
        answers: dict[int, Any] = {}
        while len(answers) < len(self.ranks):
            self._listen([rank for rank in self.ranks if rank.spec.rank not in answers], until_s, answers)
            if time.monotonic() > until_s:
                late = [rank for rank in self.ranks if rank.spec.rank not in answers]
                if late:
                    self._end_hanging(late, timeout_s)
        return [answers[rank.spec.rank] for rank in self.ranks]

    def remove_driver_files(self) -> None:
        """Remove the names of memory that CUDA's driver shares between ranks. They are needed until all have it."""
        for rank in self.ranks:
            remove_driver_files(rank.process.pid or 0, rank.started_s)

    def close(self, timeout_s: float) -> None:
        """Tell all ranks to end, and see to it that they have. Idempotent. A rank that fails at it is logged."""
        if self._closed:
            return
        try:
            until_s = time.monotonic() + timeout_s
            if self._outbox.wait(until_s):
                self._outbox.post([rank.channel for rank in self.ranks], Close())
            for rank in self.ranks:
                self._hear_the_end(rank, until_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """End all ranks, now: those with pinned memory are asked first. Idempotent. Ctrl-C waits for the end."""
        if self._closed:
            return
        with uninterrupted():
            alive = [rank for rank in self.ranks if rank.process.is_alive()]
            pinned = [rank for rank in alive if rank.spec.device != "cpu"]
            for rank in pinned:
                # A signal would wait for a call that waits for a rank that is no more.
                with suppress(OSError):
                    rank.lifeline.send(Close())
            _join_all(pinned, UNPIN_SECONDS)
            for rank in alive:
                rank.process.kill()
            _join_all(self.ranks, UNPIN_SECONDS)
            self.remove_driver_files()
            # What was still on its way has found by now that nobody reads it.
            self._outbox.wait(time.monotonic() + GRACE_SECONDS)
            for rank in self.ranks:
                _give_back(rank)
            self._closed = True

    def _start(self, spec: RankSpec, files: SharedFiles) -> Rank:
        ours, theirs = self._context.Pipe()
        their_end, lifeline = self._context.Pipe(duplex=False)
        words = os.memfd_create(f"hisparse-{spec.name}", os.MFD_CLOEXEC)
        process = self._context.Process(
            target=_Start(spec, theirs, their_end, (words, files.pool, files.order)),
            name=f"hisparse-{spec.rank}",
            daemon=True,
        )
        started_s = time.time()
        try:
            process.start()
        except BaseException:
            for end in (ours, lifeline):
                end.close()
            os.close(words)
            raise
        finally:
            theirs.close()
            their_end.close()
        return Rank(spec, process, started_s, ours, lifeline, words)

    def _listen(self, expected: Sequence[Rank], until_s: float, answers: dict[int, Any]) -> None:
        """Take what has come, at least one thing unless time runs out. Ends everything when a rank failed."""
        by_handle: dict[Any, Rank] = {rank.channel: rank for rank in expected}
        by_handle |= {rank.process.sentinel: rank for rank in self.ranks}
        for handle in wait(list(by_handle), max(0.0, until_s - time.monotonic())):
            rank = by_handle[handle]
            if handle is not rank.channel:
                self._end_failed()
            with uninterrupted():
                self._hear(rank, answers)

    def _hear(self, rank: Rank, answers: dict[int, Any]) -> None:
        """Take one message that has come."""
        try:
            message = rank.channel.recv()
        except (EOFError, OSError):
            self._end_failed()
        if _takes_note(rank, message):
            if rank.failure is not None:
                self._end_failed()
            return
        if not self._owed[rank.spec.rank]:
            raise ProtocolError(f"{rank.spec.name} answered twice, with a {type(message).__name__}")
        self._owed[rank.spec.rank] -= 1
        # Ranks answer in order; what is older answers a request that nobody waits for any more.
        if not self._owed[rank.spec.rank]:
            answers[rank.spec.rank] = message

    def _end_failed(self) -> NoReturn:
        """A rank failed. Find the one that was the first, end all, and raise."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and (silent := [rank for rank in self.ranks if not rank.is_over]):
            wait([rank.process.sentinel for rank in silent], 0.05)
            for rank in self.ranks:
                _drain(rank)
            if any(rank.was_killed for rank in self.ranks):
                break
        for rank in self.ranks:
            _drain(rank)
        error = describe(culprit(self.ranks))
        self.kill()
        raise error

    def _end_hanging(self, late: Sequence[Rank], timeout_s: float) -> None:
        for rank in late:
            if rank.process.is_alive():
                os.kill(rank.process.pid or 0, SAY_WHERE)
        time.sleep(SAY_SECONDS)
        names = ", ".join(rank.spec.name for rank in late)
        lines = [f"{names} did not answer in {timeout_s:g} s"]
        for rank in late:
            lines.append(f"{rank.spec.name} (process {rank.process.pid}) {rank.phase}{said(rank)}")
        self.kill()
        raise RankError("; ".join(lines))

    def _hear_the_end(self, rank: Rank, until_s: float) -> None:
        """Until the rank says that it has closed, or is gone, or time runs out."""
        message: object = None
        while not isinstance(message, Closed) and rank.failure is None:
            if not rank.channel.poll(max(0.0, until_s - time.monotonic())):
                logger.warning("%s did not end by itself: it %s", rank.spec.name, rank.phase)
                return
            try:
                message = rank.channel.recv()
            except (EOFError, OSError):
                logger.warning("%s", ended_how(rank))
                return
            _takes_note(rank, message)
        if rank.failure is not None:
            logger.warning("%s", describe(rank))
        rank.process.join(max(0.0, until_s - time.monotonic()))


@dataclass(frozen=True, slots=True)
class _Start:
    """What a new process runs. Descriptors are handed over while it is started."""

    spec: RankSpec
    channel: Connection
    lifeline: Connection
    files: tuple[int, int | None, int | None]

    def __call__(self) -> None:
        raise NotImplementedError("unpickled as run_rank")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        words, pool, order = (None if fd is None else DupFd(fd) for fd in self.files)
        return _Run, (self.spec, Inherited(self.channel, self.lifeline, words, pool, order))


@dataclass(frozen=True, slots=True)
class _Run:
    """The same in the new process."""

    spec: RankSpec
    inherited: Inherited

    def __call__(self) -> None:
        run_rank(self.spec, self.inherited)


def _takes_note(rank: Rank, message: object) -> bool:
    """Keep what a rank says on its own. False for an answer."""
    match message:
        case Phase(name):
            rank.phase = name
        case Failed():
            rank.failure = message
        case Logged(name, level, text):
            logging.getLogger(name).log(level, "%s: %s", rank.spec.name, text)
        case _:
            return False
    return True


def _join_all(ranks: Iterable[Rank], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    for rank in ranks:
        rank.process.join(max(0.0, until_s - time.monotonic()))


def _drain(rank: Rank) -> None:
    """Hear what a rank said before it ended."""
    with suppress(EOFError, OSError):
        while rank.channel.poll():
            _takes_note(rank, rank.channel.recv())


def _give_back(rank: Rank) -> None:
    """What the parent has of a rank that was killed."""
    rank.channel.close()
    rank.lifeline.close()
    os.close(rank.words)
    if rank.process.exitcode is None:
        logger.warning("%s (process %d) cannot be killed", rank.spec.name, rank.process.pid)
    else:
        rank.process.close()
