"""How full a directory is, and which blocks leave when it is too full: those that were read longest ago.

The files are the record. What is used is counted from their sizes, and when each was last read is its time of
modification, so a restart forgets nothing and no index can disagree with the disk. All namespaces of a directory share
its capacity: blocks of a model that nobody runs any more are the first to go.

A directory may hold more than the capacity when a tier comes to it: another engine was given more, or this one less
than before. It is then brought down as blocks are stored, each of which makes room for two, and never at once: a tier
that stores little costs little, whatever it was told.

A disk may hold less than the capacity. What fits counts as the capacity then, and a little more is tried every minute.
"""

import contextlib
import heapq
import threading
import time
from array import array

import numpy as np

from hisparse.offload.daemon_executor import DaemonExecutor
from hisparse.offload.files import places
from hisparse.offload.files.block_file import is_ours
from hisparse.offload.files.filesystem import FileSystem
from hisparse.offload.files.notices import kind_of, warn_rarely

_SHARE = 32
"""A scan per this share of the capacity that is written."""
_RESCAN_S = 10.0
"""When nothing is left to evict, how old a count must be for a new one to be worth its while."""
FULL_S = 60.0
"""How long a disk that was full is left alone: before more is tried than fitted, and after making room was no help."""
_PER_STORE = 2
"""How many times its own bytes a store evicts at most, from a directory that holds more than its capacity."""
_CLOSE_S = 1.0

_now = time.monotonic

_Entry = tuple[int, str, int]
"""When a block was written or read last, in ns; its path; its bytes."""


class Capacity:
    """Bytes used of one directory, by stored, quarantined and unfinished files. Called from every I/O thread.

    A store reserves its file's bytes, then commits or releases them; it waits for nobody. Other processes may write to
    the same directory: what they wrote is seen at the next scan, which has a thread of its own. So together they may
    pass the capacity by what each writes until then: 1/32 of it, and what comes while a scan lasts.
    """

    def __init__(self, filesystem: FileSystem, root: str, capacity_bytes: int, *, evicts: bool = True) -> None:
        """Without `evicts` nothing is ever removed, not even when the disk is full."""
        self._filesystem = filesystem
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._evicts = evicts
        self._scanner = DaemonExecutor(1, "hisparse-scan")
        self._is_closed = False
        self._guard = threading.Lock()
        """Over what follows. Never held during a call of the file system."""
        self._limit_bytes = capacity_bytes
        """The capacity, or what fits on the disk if that is less."""
        self._grows_at = 0.0
        self._paused_until = 0.0
        self._stored_bytes = 0
        self._reserved_bytes = 0
        self._oldest: list[_Entry] = []
        """A heap of all blocks that are known, or more: some may be gone, or have been read since."""
        self._generation = 0
        """The scan that the heap and the count are from."""
        self._is_scanning = False
        self._scanned_s = 0.0
        self._recent: list[_Entry] = []
        """Committed since the last scan began, as far as one is under way."""
        self._unscanned_bytes = 0
        """Committed since the last scan began."""
        self._num_evicted = 0

    @property
    def used_bytes(self) -> int:
        """Of files that are there or being written."""
        return self._stored_bytes + self._reserved_bytes

    @property
    def limit_bytes(self) -> int:
        """The capacity, or what fits on the disk if that is less."""
        return self._limit_bytes

    @property
    def num_evicted(self) -> int:
        """Blocks removed to make room."""
        return self._num_evicted

    @property
    def is_scanning(self) -> bool:
        """Whether a scan is under way, or about to be."""
        return self._is_scanning

    def scan(self) -> None:
        """Count what is there. Raises `OSError` when the directory cannot be read."""
        with self._guard:
            self._unscanned_bytes = 0
            self._recent.clear()
        found: list[_Entry] = []
        times = array("q")
        stored_bytes = 0
        for namespace in places.namespaces(self._filesystem, self._root):
            with contextlib.suppress(FileNotFoundError):  # It was removed meanwhile.
                for block in places.blocks(self._filesystem, namespace):
                    if self._is_closed:
                        return
                    found.append((block.used_ns, block.path, block.num_bytes))
                    times.append(block.used_ns)
                    stored_bytes += block.num_bytes
                stored_bytes += sum(bad.num_bytes for bad in places.quarantined(self._filesystem, namespace))
        # The only step that is long and of one piece lets other threads run. What is sorted is a heap.
        order = np.argsort(np.frombuffer(times, np.int64), kind="stable") if found else np.empty(0, np.int64)
        oldest = [found[index] for index in order.tolist()]
        known = {path for _, path, _ in found}
        with self._guard:
            self._oldest, self._stored_bytes = oldest, stored_bytes
            for entry in self._recent:
                if entry[1] not in known:
                    self._add(entry)
            self._generation += 1
            self._scanned_s = _now()

    def request_scan(self) -> None:
        """Have what is there counted, soon and by another thread."""
        with self._guard:
            if self._is_scanning or self._is_closed:
                return
            self._is_scanning = True
        with contextlib.suppress(RuntimeError):  # It was closed meanwhile.
            self._scanner.submit(self._scan_beside)

    def reserve(self, num_bytes: int) -> bool:
        """Set room aside for a file, evicting if need be. False when there is none."""
        with self._guard:
            now = _now()
            if self._limit_bytes < self._capacity_bytes and now >= self._grows_at:
                more = max(self._capacity_bytes // _SHARE, _PER_STORE * num_bytes)
                self._limit_bytes = min(self._capacity_bytes, self._limit_bytes + more)
                self._grows_at = now + FULL_S
            if now < self._paused_until:
                return False
            if self._take(num_bytes):
                return True
            if not self._evicts or self._reserved_bytes + num_bytes > self._limit_bytes:
                return False
            is_overfull = self.used_bytes > self._limit_bytes
        freed_bytes = 0
        while (popped := self._pop()) is not None:
            freed_bytes += self._evict(*popped)
            is_enough = is_overfull and freed_bytes >= _PER_STORE * num_bytes
            with self._guard:
                if self._take(num_bytes, anyhow=is_enough):
                    return True
        if _now() - self._scanned_s >= _RESCAN_S:
            self.request_scan()
        return False

    def commit(self, path: str, num_bytes: int) -> None:
        """A reserved file is in its place, which is `path`."""
        entry = (time.time_ns(), path, num_bytes)
        with self._guard:
            self._reserved_bytes -= num_bytes
            self._unscanned_bytes += num_bytes
            self._add(entry)
            if self._is_scanning:
                self._recent.append(entry)
            is_due = self._unscanned_bytes > self._limit_bytes // _SHARE
        if is_due:
            self.request_scan()

    def release(self, num_bytes: int) -> None:
        """A reserved file did not come to be."""
        with self._guard:
            self._reserved_bytes -= num_bytes

    def set_aside(self, num_bytes: int) -> None:
        """A block went to quarantine, where it cannot be evicted. What is left of it here is seen to be gone later."""
        with self._guard:
            self._stored_bytes += num_bytes

    def shrink(self, num_bytes: int, limit_bytes: int) -> None:
        """The disk is full: a file of so many bytes did not fit when the limit was `limit_bytes`.

        What is stored counts as all that fits, less that file's bytes, unless another thread has seen to that since.
        Files that are being written count for nothing: they may be the next that do not fit.
        """
        with self._guard:
            if self._evicts and self._limit_bytes >= limit_bytes:
                self._limit_bytes = max(0, min(self._limit_bytes, self._stored_bytes) - num_bytes)
                self._grows_at = _now() + FULL_S

    def pause(self) -> None:
        """Refuse every store for a while: making room was no help, so others fill the disk faster than we free it."""
        with self._guard:
            self._paused_until = _now() + FULL_S

    def close(self) -> None:
        """Have a scan that is under way end."""
        self._is_closed = True
        self._scanner.close(_CLOSE_S)

    def _scan_beside(self) -> None:
        try:
            self.scan()
        except OSError as error:
            warn_rarely(self._root, f"scan {kind_of(error)}", "cannot count what %s holds: %s", self._root, error)
        finally:
            self._is_scanning = False

    def _add(self, entry: _Entry) -> None:
        heapq.heappush(self._oldest, entry)
        self._stored_bytes += entry[2]

    def _take(self, num_bytes: int, *, anyhow: bool = False) -> bool:
        fits = anyhow or self.used_bytes + num_bytes <= self._limit_bytes
        if fits:
            self._reserved_bytes += num_bytes
        return fits

    def _pop(self) -> tuple[_Entry, int] | None:
        """The block that was used longest ago, and the generation that says so."""
        with self._guard:
            return (heapq.heappop(self._oldest), self._generation) if self._oldest else None

    def _evict(self, entry: _Entry, generation: int) -> int:
        """Remove a block, unless it was used since. The bytes that this freed."""
        used_ns, path, num_bytes = entry
        is_removed = False
        try:
            status = self._filesystem.status(path)
            if status.st_mtime_ns > used_ns:
                with self._guard:
                    if generation == self._generation:
                        heapq.heappush(self._oldest, (status.st_mtime_ns, path, num_bytes))
                return 0
            # A foreign file under a block's name stays, and stops counting: it is no room that could be made.
            if is_ours(self._filesystem, path):
                self._filesystem.unlink(path)
                is_removed = True
        except FileNotFoundError:
            pass
        except OSError as error:
            warn_rarely(self._root, f"evict {kind_of(error)}", "cannot evict a block: %s", error)
            return 0
        with self._guard:
            self._num_evicted += is_removed
            if generation == self._generation:
                # A scan since has either not seen it any more, or has it in its heap, where it will be found gone.
                self._stored_bytes = max(0, self._stored_bytes - num_bytes)
        return num_bytes if is_removed else 0


def evictable(filesystem: FileSystem, found: list[places.Found]) -> list[places.Found]:
    """Those of `found` that start like files of ours, read longest ago first. What cannot be read is left out."""
    ours = []
    for block in sorted(found, key=lambda block: block.used_ns):
        with contextlib.suppress(OSError):
            if is_ours(filesystem, block.path):
                ours.append(block)
    return ours
