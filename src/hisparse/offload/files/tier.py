"""The file tier: blocks by key in one or more directories, striped by hash, that outlive the process and its crashes.

A block is there once its file has its name, which it gets after its last byte. It is a hit when size and header are
right, and loaded when its checksum is; everything else, whatever the disk answers, is a miss.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields

import xxhash

from hisparse.errors import CapacityError, InputError
from hisparse.offload.config import FileOptions
from hisparse.offload.daemon_executor import DaemonExecutor
from hisparse.offload.files.block_file import HEADER_BYTES, Block
from hisparse.offload.files.directory import TOUCH_AFTER_NS, Directory, DirectoryOptions
from hisparse.offload.files.filesystem import FileSystem, LocalFileSystem
from hisparse.offload.files.namespace import Identity
from hisparse.offload.files.notices import kind_of, warn_rarely
from hisparse.offload.files.places import KEY_BYTES
from hisparse.offload.files.work import IoThreads, Transfer, finished

FileTierConfig = FileOptions

MAX_QUEUED = 4096
"""Loads, and stores, that may wait for a thread. One more is refused at once: it would only come too late."""
MAX_SUSPECTS = 65536
MAX_TOUCHES = 1024
"""Calls of `touch` that may wait for the disk. One more is dropped: it is a hint, and this disk does not keep up."""


@dataclass(frozen=True, slots=True)
class FileTierStats:
    """What a tier has done since it was opened. Bytes are payload."""

    stores: int = 0
    stored_bytes: int = 0
    stores_failed: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    loads_failed: int = 0
    set_aside: int = 0
    evicted: int = 0
    swept: int = 0
    used_bytes: int = 0


class FileTier:
    """Stores and loads rows of `identity.row_bytes` bytes by keys of 16 bytes, in threads of its own.

    All methods may be called from any thread. Raises `InputError` when a directory cannot be used, and `CapacityError`
    when the capacity does not hold one file per directory. `touch_after_ns` is how old a block's time of use must be
    for a load to renew it. Without `evicts` no block is removed to make room for another, whatever the capacity.
    """

    def __init__(
        self,
        config: FileTierConfig,
        identity: Identity,
        filesystem: FileSystem | None = None,
        *,
        touch_after_ns: int = TOUCH_AFTER_NS,
        evicts: bool = True,
    ) -> None:
        filesystem = filesystem or LocalFileSystem()
        roots = [os.path.abspath(directory) for directory in config.directories]
        if not roots or len(set(roots)) < len(roots):
            raise InputError("the file tier needs directories, and each of them once")
        file_bytes = HEADER_BYTES + identity.row_bytes
        if config.capacity_bytes < file_bytes * len(roots):
            raise CapacityError(
                f"a file capacity of {config.capacity_bytes} bytes (--offload-capacity) holds no block in each of "
                f"{len(roots)} directories: it must be at least {file_bytes * len(roots)}"
            )
        self._digest = identity.digest
        self._row_bytes = identity.row_bytes
        options = DirectoryOptions(
            config.capacity_bytes // len(roots),
            config.fsync,
            config.direct_io,
            touch_after_ns=touch_after_ns,
            evicts=evicts,
        )
        self._directories: list[Directory] = []
        try:
            for root in roots:
                self._directories.append(Directory(filesystem, root, identity, options))
        except BaseException:
            for directory in self._directories:
                directory.close(is_idle=True)
            raise
        self._guard = threading.Lock()
        """Over what follows."""
        self._storing: dict[bytes, Transfer] = {}
        self._touched: dict[bytes, int] = {}
        """Times of use for blocks that are being stored."""
        self._num_touches = 0
        """Calls of `touch` that are queued."""
        self._suspects: dict[bytes, None] = {}
        """Keys whose files are there but cannot be read: misses until they are stored again. Oldest first."""
        self._counts = dict.fromkeys((field.name for field in fields(FileTierStats)), 0)
        self._is_open = True
        self._threads = IoThreads(config.threads, config.deadline_s, MAX_QUEUED)
        self._toucher = DaemonExecutor(1, "hisparse-touch")
        self._is_late = threading.Event()
        """Set when closing took its time: what is left of the touches is not worth more."""

    def lookup(self, key: bytes) -> bool:
        """Whether `load` would most likely succeed: a file is there, and its size and header are right.

        Reads the disk in the calling thread. A bad file is set aside on the way.
        """
        with self._guard:
            is_miss = not self._is_open or key in self._suspects
        if is_miss:
            return False
        try:
            return self._directory_of(key).holds(key, self._row_bytes, memoryview(bytearray(HEADER_BYTES)))
        except OSError as error:
            self._suspect(key, error)
            return False

    def store(self, key: bytes, buffer: object) -> Transfer:
        """Keep a row. `buffer` is contiguous, `row_bytes` long, and must not change until the transfer is done.

        True when the block is in its file. Raises `InputError` for a buffer or key of another size.
        """
        block = self._block(key, buffer)
        with self._guard:
            under_way = self._storing.get(key)
            if under_way is not None:
                return under_way
            transfer = self._threads.submit(lambda watch, page: self._store(block, page, watch), urgent=False)
            if not transfer.done():
                self._storing[key] = transfer
        transfer.add_done_callback(lambda done: self._end_store(key, done))
        return transfer

    def load(self, key: bytes, buffer: object) -> Transfer:
        """Fill `buffer`, writable, contiguous and `row_bytes` long. It must not be used until the transfer is done.

        True when every byte of it was checked. False is a miss, and then its bytes mean nothing. Loads are served
        before stores. Raises `InputError` for a buffer or key of another size, or one that cannot be written.
        """
        block = self._block(key, buffer)
        if block.payload.readonly:
            raise InputError("a load needs a buffer that can be written")
        with self._guard:
            is_miss = not self._is_open or key in self._suspects
        if is_miss:
            return finished(False)
        return self._threads.submit(lambda watch, page: self._load(block, page, watch), urgent=True)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the blocks of a chain the youngest, its beginning the youngest of all: the last to be evicted.

        Returns at once; a thread of its own goes from the last key to the first. Blocks that are being stored get their
        times when they are there. Those that are not there are ignored.
        """
        keys = tuple(keys)
        with self._guard:
            is_taken = self._is_open and self._num_touches < MAX_TOUCHES
            self._num_touches += is_taken
        if is_taken:
            with contextlib.suppress(RuntimeError):  # It was closed meanwhile.
                self._toucher.submit(self._touch, keys)

    def close(self, deadline: float = 30.0) -> bool:
        """Take no more work and finish what was begun, at most `deadline` seconds long. Whether all of it ended.

        What a hanging call still writes never gets a name, and the next tier on the directory sweeps it once this
        process has ended.
        """
        with self._guard:
            was_open, self._is_open = self._is_open, False
        if not was_open:
            return True
        until = time.monotonic() + deadline
        is_idle = self._threads.close(deadline)
        self._toucher.shutdown(wait=False)
        self._toucher.join(until)
        self._is_late.set()
        self._toucher.close(0.0)
        for directory in self._directories:
            directory.close(is_idle=is_idle)
        return is_idle

    def stats(self) -> FileTierStats:
        """Counters up to now."""
        with self._guard:
            counts = dict(self._counts)
        for directory in self._directories:
            counts["set_aside"] += directory.num_set_aside
            counts["evicted"] += directory.capacity.num_evicted
            counts["swept"] += directory.num_swept
            counts["used_bytes"] += directory.capacity.used_bytes
        return FileTierStats(**counts)

    def _block(self, key: bytes, buffer: object) -> Block:
        payload = memoryview(buffer)  # type: ignore[arg-type]
        if len(key) != KEY_BYTES or payload.nbytes != self._row_bytes or not payload.c_contiguous:
            raise InputError(
                f"the file tier takes keys of {KEY_BYTES} and contiguous buffers of {self._row_bytes} bytes, "
                f"not {len(key)} and {payload.nbytes}"
            )
        return Block(self._digest, key, payload.cast("B"))

    def _directory_of(self, key: bytes) -> Directory:
        """The same for the same number of directories; one more takes its share of the keys and moves no others."""
        if len(self._directories) == 1:
            return self._directories[0]
        best = max(range(len(self._directories)), key=lambda index: xxhash.xxh3_64_intdigest(key, seed=index))
        return self._directories[best]

    def _store(self, block: Block, page: memoryview, watch: Transfer) -> bool:
        with self._guard:
            is_suspect = block.key in self._suspects
        is_kept = self._directory_of(block.key).store(block, page, watch, replace=is_suspect)
        if is_kept and is_suspect:
            with self._guard:
                self._suspects.pop(block.key, None)
        return is_kept

    def _load(self, block: Block, page: memoryview, watch: Transfer) -> bool:
        try:
            is_hit = self._directory_of(block.key).load(block, page, watch)
        except OSError as error:
            self._suspect(block.key, error)
            is_hit = False
        with self._guard:
            self._counts["loads" if is_hit else "loads_failed"] += 1
            self._counts["loaded_bytes"] += self._row_bytes * is_hit
        return is_hit

    def _end_store(self, key: bytes, transfer: Future[bool]) -> None:
        is_kept = transfer.result()
        with self._guard:
            self._storing.pop(key, None)
            used_ns = self._touched.pop(key, None)
            self._counts["stores" if is_kept else "stores_failed"] += 1
            self._counts["stored_bytes"] += self._row_bytes * is_kept
        if is_kept and used_ns is not None:
            self._directory_of(key).touch(key, used_ns)

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if self._is_late.is_set():
                break
            directory = self._directory_of(key)
            used_ns = directory.next_use_ns()
            with self._guard:
                is_coming = key in self._storing
                if is_coming:
                    self._touched[key] = used_ns
            if not is_coming:
                directory.touch(key, used_ns)
        with self._guard:
            self._num_touches -= 1

    def _suspect(self, key: bytes, error: OSError) -> None:
        said = "block %s cannot be read and counts as a miss until it is stored again: %s"
        warn_rarely(self._directory_of(key).namespace, f"load {kind_of(error)}", said, key.hex(), error)
        with self._guard:
            self._suspects[key] = None
            if len(self._suspects) > MAX_SUSPECTS:
                del self._suspects[next(iter(self._suspects))]
