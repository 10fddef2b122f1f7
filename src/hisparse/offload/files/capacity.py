"""How full a directory is, and which blocks leave when it is too full: those that were read longest ago.

The files are the record. What is used is counted from their sizes, and when each was last read is its time of
modification, so a restart forgets nothing and no index can disagree with the disk. All namespaces of a directory share
its capacity: blocks of a model that nobody runs any more are the first to go.
"""

import contextlib
import logging
import threading
import time
from collections import deque

from hisparse.offload.files import places
from hisparse.offload.files.block_file import is_ours
from hisparse.offload.files.filesystem import FileSystem

_LOG = logging.getLogger(__name__)
_SHARE = 32
"""A scan per this share of the capacity that is written; eviction frees as much at once."""
_SCAN_WAIT_S = 1.0
"""How long a store waits for another thread's scan before it is dropped instead."""


class Capacity:
    """Bytes used of one directory, by stored, quarantined and unfinished files. Called from every I/O thread.

    A store reserves its file's bytes, then commits or releases them. Other processes may write to the same
    directory: what they wrote is seen at the next scan, so together they may pass the capacity by 1/32 of it each.
    """

    def __init__(self, filesystem: FileSystem, root: str, capacity_bytes: int) -> None:
        self._filesystem = filesystem
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._guard = threading.Lock()
        """Over the numbers below."""
        self._scan_turn = threading.Lock()
        """Held by the thread that scans and evicts."""
        self._stored_bytes = 0
        self._reserved_bytes = 0
        self._unscanned_bytes = 0
        """Committed since the last scan began."""
        self._oldest: deque[places.Found] = deque()
        """Blocks of the last scan, those read longest ago first. Whatever was stored since is younger than all."""
        self._num_evicted = 0

    @property
    def used_bytes(self) -> int:
        """Of files that are there or being written."""
        return self._stored_bytes + self._reserved_bytes

    @property
    def num_evicted(self) -> int:
        """Blocks removed to make room."""
        return self._num_evicted

    def scan(self) -> None:
        """Count what is there. Raises `OSError` when the directory cannot be read."""
        with self._guard:
            self._unscanned_bytes = 0
        found: list[places.Found] = []
        bad_bytes = 0
        for namespace in places.namespaces(self._filesystem, self._root):
            found.extend(places.blocks(self._filesystem, namespace))
            bad_bytes += sum(bad.num_bytes for bad in places.quarantined(self._filesystem, namespace))
        found.sort(key=lambda block: block.used_ns)
        with self._guard:
            self._oldest = deque(found)
            # What was committed meanwhile may have been seen or not: rather counted twice than not at all.
            self._stored_bytes = bad_bytes + sum(block.num_bytes for block in found) + self._unscanned_bytes

    def reserve(self, num_bytes: int) -> bool:
        """Set room aside for a file, evicting if need be. False when there is none. Raises `OSError` from a scan."""
        if not self._is_scan_due() and self._take(num_bytes):
            return True
        if not self._scan_turn.acquire(timeout=_SCAN_WAIT_S):
            return False
        try:
            if self._is_scan_due():
                self.scan()
            if not self._take(num_bytes):
                self._make_room(num_bytes)
                return self._take(num_bytes)
            return True
        finally:
            self._scan_turn.release()

    def commit(self, num_bytes: int) -> None:
        """A reserved file is in its place."""
        with self._guard:
            self._reserved_bytes -= num_bytes
            self._stored_bytes += num_bytes
            self._unscanned_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """A reserved file did not come to be."""
        with self._guard:
            self._reserved_bytes -= num_bytes

    def _is_scan_due(self) -> bool:
        return self._unscanned_bytes > self._capacity_bytes // _SHARE

    def _take(self, num_bytes: int) -> bool:
        with self._guard:
            fits = self.used_bytes + num_bytes <= self._capacity_bytes
            if fits:
                self._reserved_bytes += num_bytes
        return fits

    def _make_room(self, num_bytes: int) -> None:
        """Evict until the file fits with some room to spare, or nothing is left to evict."""
        goal = self._capacity_bytes - num_bytes
        if goal < self._reserved_bytes:
            return
        spare_blocks = self._capacity_bytes // _SHARE // num_bytes
        roomy = max(self._reserved_bytes, goal - spare_blocks * num_bytes)
        began, before = time.monotonic(), self._num_evicted
        for is_last_try in (False, True):
            while self._oldest and self.used_bytes > roomy:
                self._evict(self._oldest.popleft())
            if self.used_bytes <= goal or is_last_try:
                break
            self.scan()
        _LOG.info("evicted %d blocks in %.3f s", self._num_evicted - before, time.monotonic() - began)

    def _evict(self, block: places.Found) -> None:
        gone_bytes = 0
        try:
            status = self._filesystem.status(block.path)
            if status.st_mtime_ns > block.used_ns:
                return  # Read or written again since the scan: the next scan gives it its new place.
            if is_ours(self._filesystem, block.path):
                self._filesystem.unlink(block.path)
                self._num_evicted += 1
            # A foreign file under a block's name stays, and stops counting: it is no room that could be made.
            gone_bytes = block.num_bytes
        except FileNotFoundError:
            gone_bytes = block.num_bytes
        except OSError as error:
            _LOG.warning("cannot evict a block: %s", error)
        with self._guard:
            self._stored_bytes = max(0, self._stored_bytes - gone_bytes)


def evictable(filesystem: FileSystem, found: list[places.Found]) -> list[places.Found]:
    """Those of `found` that start like files of ours, read longest ago first. What cannot be read is left out."""
    ours = []
    for block in sorted(found, key=lambda block: block.used_ns):
        with contextlib.suppress(OSError):
            if is_ours(filesystem, block.path):
                ours.append(block)
    return ours
