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
from hisparse.offload.tier_probes import TierProbes

MIN_WRITES = 64
WRITES_SHARE = 4
"""Chunks on their way down keep their blocks: no more than one in so many may, or `MIN_WRITES` in a small tier."""
MAX_TOUCHES = 1024
"""Prefixes that wait to be touched. More only come while the tier takes no writes; they stay as old as they are."""


@dataclass(slots=True, eq=False)
class _Access:
    """One write or load under way. A tier may give several the same future, for the same key."""

    is_write: bool
    entry: Entry


class TierTraffic:
    """Probes, writes, loads and touches of the tier below. Every write and every load holds a reference to its entry.

    `dirty`: ready chunks that wait to be written, in the order in which they came. They hold no reference: one that is
    evicted before its turn is dropped.
    """

    def __init__(
        self, cpu: CpuTier, below: Below, config: OffloadConfig, stats: OffloadStats, clock: Callable[[], float]
    ) -> None:
        cpu.prefers = _is_below
        cpu.on_gone = self._forget
        self._cpu = cpu
        self.probes = TierProbes(below, stats, clock, config.lookup_deadline_s)
        self._below = below
        self._config = config
        self._stats = stats
        self._clock = clock
        self._touches: deque[tuple[tuple[bytes, ...], list[Entry]]] = deque()
        """Prefixes that were used, and those of their chunks whose turn to be written had not come then."""
        self._dirty: dict[Entry, None] = {}
        self._max_writes = min(config.max_tier_writes, max(MIN_WRITES, cpu.num_blocks // WRITES_SHARE))
        self._open: dict[_Access, Future[bool]] = {}
        self._writing: dict[bytes, Entry] = {}
        """The open writes, one for each key. The other open accesses are loads."""
        self._finished: deque[_Access] = deque()
        self._progress_s = clock()

    # On their way down

    def write(self, entry: Entry) -> None:
        """Have a ready chunk stored below, now or when its turn comes, unless it is there or on its way."""
        if entry.is_below or entry in self._dirty or self._writing.get(entry.key) is entry:
            return
        self._dirty[entry] = None
        self._pump()

    def write_now(self, entry: Entry) -> None:
        """Begin to store a ready chunk whether it is thought to be below or not, unless its key is on its way."""
        self._dirty.pop(entry, None)
        if entry.key in self._writing:
            return
        self._stats.tier_writes += 1
        future = self._start(self._below.tier.store, entry)
        if future is None:
            self._stats.failed_tier_writes += 1
            return
        self._cpu.pin(entry)
        self._writing[entry.key] = entry
        self._follow(_Access(True, entry), future)

    def can_write(self) -> bool:
        """Whether one more chunk may be on its way down."""
        return len(self._writing) < self._max_writes

    def stop_writing(self) -> None:
        """What still waits to be written is not written."""
        self._dirty.clear()

    def find_lost(self, entries: Sequence[Entry], timeout_s: float) -> list[Entry]:
        """Those of `entries`, the oldest first, that the tier should have and has not; none if it does not say in time.

        With room for as many of them as it has, it should have the youngest. To write more would cost it younger ones.
        """
        if not entries:
            return []
        try:
            found = self._below.executor.submit(_which, self._below.tier.lookup, [entry.key for entry in entries])
            has = found.result(timeout=max(0.0, timeout_s))
        except Exception as error:
            self._note(error)
            return []
        first = len(entries) - has.count(True) if any(has) else 0
        return [entry for entry, is_there in zip(entries[first:], has[first:], strict=True) if not is_there]

    def touch(self, keys: Sequence[bytes]) -> None:
        """A prefix was used: make what the tier has of it young, the first of `keys` the youngest.

        The tier is told when it has been given all of it, or what is written later would be younger than the beginning.
        """
        entries = (self._cpu.get(key) for key in keys)
        unwritten = [entry for entry in entries if entry is not None and entry in self._dirty]
        if keys and len(self._touches) < MAX_TOUCHES:
            self._touches.append((tuple(keys), unwritten))
        self._go_on_touching()

    # On their way up

    def can_load(self, *, ahead: bool = False) -> bool:
        """Whether one more chunk may be on its way up; of those that nobody running waits for, half as many may."""
        limit = self._config.max_tier_loads
        return self._num_loads < (limit // 2 if ahead else limit)

    def load(self, entry: Entry) -> bool:
        """Begin to fill a chunk that is coming. Its filler's reference ends when the tier is done with the block.

        False when the tier refuses at once; then the chunk is withdrawn.
        """
        self._stats.promotions += 1
        if not self._num_loads:
            self._progress_s = self._clock()
        future = self._start(self._below.tier.load, entry)
        if future is None:
            self._fail_load(entry)
            return False
        self._follow(_Access(False, entry), future)
        return True

    @property
    def progress_s(self) -> float:
        """When a chunk was last seen to have come up, or the first of those under way was begun."""
        return self._progress_s

    def is_stuck(self) -> bool:
        """Whether chunks are on their way up and none has come for as long as a look-up waits."""
        return self._num_loads > 0 and self._clock() >= self._progress_s + self._config.lookup_deadline_s

    # Both

    def collect(self) -> None:
        """Draw the consequences of everything that has finished, and begin what has its turn now. Never waits."""
        while self._finished:
            access = self._finished.popleft()
            entry, succeeded = access.entry, self._result(self._open.pop(access))
            if access.is_write:
                del self._writing[entry.key]
                entry.is_below = succeeded
                self._stats.failed_tier_writes += not succeeded
                self._cpu.unpin(entry)
                continue
            self._progress_s = self._clock()
            if succeeded:
                entry.is_below = True
                self._cpu.commit(entry)
            else:
                self._fail_load(entry)
        self._pump()
        self._go_on_touching()

    def wait_for_one(self, timeout_s: float) -> bool:
        """Wait until an access ends, and draw its consequences. False when none has by then."""
        done, _ = wait(self._open.values(), max(0.0, timeout_s), FIRST_COMPLETED)
        self.collect()
        return bool(done)

    def drain(self, deadline_s: float) -> int:
        """Wait for writes and loads, no longer than `deadline_s`. Returns how many are not over even then."""
        wait(self._open.values(), timeout=deadline_s)
        self.collect()
        return len(self._open)

    def held(self) -> Iterator[Entry]:
        """The entries of all references, one for each."""
        return (access.entry for access in self._open)

    def dirty(self) -> Iterator[Entry]:
        """The chunks that wait to be written."""
        return iter(self._dirty)

    # How it is done

    def _pump(self) -> None:
        while self._dirty and self.can_write():
            # One whose key is on its way from a block that was withdrawn meanwhile waits for that.
            entry = next((entry for entry in self._dirty if entry.key not in self._writing), None)
            if entry is None:
                return
            self.write_now(entry)

    def _forget(self, entry: Entry) -> None:
        """A chunk has left the CPU tier: evicted, or dropped because its bytes are not to be trusted."""
        if entry in self._dirty:
            del self._dirty[entry]
            self._stats.dropped_tier_writes += 1

    def _go_on_touching(self) -> None:
        while self._touches:
            keys, unwritten = self._touches[0]
            while unwritten and unwritten[-1] not in self._dirty:
                unwritten.pop()
            if unwritten:
                return
            self._touches.popleft()
            try:
                self._below.tier.touch(keys)
            except Exception as error:
                self._note(error)

    @property
    def _num_loads(self) -> int:
        return len(self._open) - len(self._writing)

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


def _is_below(entry: Entry) -> bool:
    return entry.is_below


def _which(lookup: Callable[[bytes], bool], keys: Sequence[bytes]) -> list[bool]:
    return [lookup(key) for key in keys]
