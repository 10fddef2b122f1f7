"""What is under way between the CPU tier and the tier below it. Futures end in other threads; nothing else does.

A finished future only puts itself into a queue. `collect`, which the scheduler calls, draws the consequences, so that
the bookkeeping is single-threaded.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from hisparse.offload.config import OffloadConfig
from hisparse.offload.cpu_tier import CpuTier, Entry
from hisparse.offload.stats import OffloadStats
from hisparse.offload.tier import Below, Buffer

MAX_PROBES = 8
"""Lookups in the tier below at once. When a disk hangs, further requests compute instead of queueing behind it."""


@dataclass(slots=True, eq=False)
class _Access:
    """One write or load under way. A tier may give several the same future, for the same key."""

    is_write: bool
    entry: Entry


class TierTraffic:
    """Probes, writes and loads of the tier below. Every write and every load holds a reference to its entry."""

    def __init__(self, cpu: CpuTier, below: Below, config: OffloadConfig, stats: OffloadStats) -> None:
        self._cpu = cpu
        self._below = below
        self._config = config
        self._stats = stats
        self._probes: set[Future[int]] = set()
        self._open: dict[_Access, Future[bool]] = {}
        self._writing: set[bytes] = set()
        """Keys of the open writes, one each. The other open accesses are loads."""
        self._finished: deque[_Access] = deque()

    def probe(self, keys: Sequence[bytes]) -> "Future[int] | None":
        """Ask how many of `keys`, from the first on, the tier has. None when too many such questions are open."""
        self._probes = {probe for probe in self._probes if not probe.done()}
        if len(self._probes) >= MAX_PROBES:
            return None
        try:
            future = self._below.executor.submit(_count_found, self._below.tier.lookup, tuple(keys))
        except RuntimeError as error:  # the executor was shut down
            self._note(error)
            self._stats.failed_probes += 1
            return None
        self._probes.add(future)
        return future

    def found(self, probe: "Future[int]") -> int:
        """The answer of a finished probe; a failed one found nothing."""
        try:
            return probe.result(timeout=0)
        except Exception as error:
            self._note(error)
            self._stats.failed_probes += 1
            return 0

    def write(self, entry: Entry) -> None:
        """Begin to store a ready chunk below, unless it is there or on its way, or too many are on theirs."""
        if entry.is_below or entry.key in self._writing:
            return
        if not self.can_write():
            self._stats.dropped_tier_writes += 1
            return
        self._stats.tier_writes += 1
        future = self._start(self._below.tier.store, entry)
        if future is None:
            self._stats.failed_tier_writes += 1
            return
        self._cpu.pin(entry)
        self._writing.add(entry.key)
        self._follow(_Access(True, entry), future)

    def can_write(self) -> bool:
        """Whether one more chunk may be on its way down."""
        return len(self._writing) < self._config.max_tier_writes

    def wait_for_one(self, timeout_s: float) -> bool:
        """Wait until an access ends, and draw its consequences. False when none has by then."""
        done, _ = wait(self._open.values(), max(0.0, timeout_s), FIRST_COMPLETED)
        self.collect()
        return bool(done)

    def can_load(self) -> bool:
        """Whether one more chunk may be on its way up."""
        return len(self._open) - len(self._writing) < self._config.max_tier_loads

    def load(self, entry: Entry) -> bool:
        """Begin to fill a chunk that is coming. Its filler's reference ends when the tier is done with the block.

        False when the tier refuses at once; then the chunk is withdrawn.
        """
        self._stats.promotions += 1
        future = self._start(self._below.tier.load, entry)
        if future is None:
            self._fail_load(entry)
            return False
        self._follow(_Access(False, entry), future)
        return True

    def collect(self) -> None:
        """Draw the consequences of everything that has finished. Never waits."""
        while self._finished:
            access = self._finished.popleft()
            entry, succeeded = access.entry, self._result(self._open.pop(access))
            if access.is_write:
                self._writing.remove(entry.key)
                entry.is_below = succeeded
                self._stats.failed_tier_writes += not succeeded
                self._cpu.unpin(entry)
                continue
            if succeeded:
                entry.is_below = True
                self._cpu.commit(entry)
            else:
                self._fail_load(entry)

    def held(self) -> Iterator[Entry]:
        """The entries of all references, one for each."""
        return (access.entry for access in self._open)

    def drain(self, deadline_s: float) -> int:
        """Wait for writes and loads, no longer than `deadline_s`. Returns how many are not over even then."""
        wait(self._open.values(), timeout=deadline_s)
        self.collect()
        return len(self._open)

    def _follow(self, access: _Access, future: "Future[bool]") -> None:
        self._open[access] = future
        # Last of all: a future that is done calls back at once, and from here on perhaps in another thread. The access
        # does not name its future, which would keep both, and the buffer, until the garbage collector comes by.
        future.add_done_callback(lambda _: self._finished.append(access))

    def _fail_load(self, entry: Entry) -> None:
        self._stats.failed_promotions += 1
        self._cpu.drop(entry)
        self._cpu.unpin(entry)

    def _start(self, begin: "Callable[[bytes, Buffer], Future[bool]]", entry: Entry) -> "Future[bool] | None":
        try:
            return begin(entry.key, self._below.buffer_of(entry.block))
        except Exception as error:
            self._note(error)
            return None

    def _result(self, future: "Future[bool]") -> bool:
        try:
            return future.result(timeout=0) is True
        except Exception as error:
            self._note(error)
            return False

    def _note(self, error: Exception) -> None:
        self._stats.last_tier_error = f"{type(error).__name__}: {error}"


def _count_found(lookup: Callable[[bytes], bool], keys: tuple[bytes, ...]) -> int:
    for number, key in enumerate(keys):
        if not lookup(key):
            return number
    return len(keys)
