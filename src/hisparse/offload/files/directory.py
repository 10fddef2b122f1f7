"""One namespace in one directory: how a block gets there, is read, and is set aside when it is bad."""

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hisparse.errors import InputError, InvariantError
from hisparse.offload.files import places
from hisparse.offload.files.block_file import (
    HEADER_BYTES,
    BadFileError,
    Block,
    Fault,
    Watch,
    read_block,
    read_header,
    write_block,
)
from hisparse.offload.files.capacity import Capacity
from hisparse.offload.files.filesystem import FileSystem
from hisparse.offload.files.namespace import IDENTITY_FILE, Identity
from hisparse.offload.files.notices import kind_of, warn_rarely
from hisparse.offload.files.small_files import make_directories, read_small_file, write_small_file
from hisparse.offload.files.work_folder import WorkFolder, open_folder, sweep

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
"""What a file system answers that cannot go past the page cache: on opening, or only on the first transfer."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_RENEWAL_WAIT_S = 1.0
"""How long a store waits for another thread that makes folders anew, before it tries without."""
MAX_QUARANTINED = 64
"""Bad files kept per namespace. Past that a bad file stays where it is and nothing is stored over it."""
TOUCH_AFTER_NS = 60 * 10**9
"""A read renews a block's time of use only when it is older than this: eviction needs no finer one."""
_TOUCH_STEP_NS = 1000
"""Between blocks that are touched one after the other: file systems whose clocks are a little coarser keep them apart.
"""


@dataclass(frozen=True, slots=True)
class DirectoryOptions:
    """`capacity_bytes` of this directory alone; `sync` whether files are on disk before they have their names.

    `evicts`: whether blocks are removed when there is no room, of the capacity or of the disk.
    """

    capacity_bytes: int
    sync: bool
    direct: bool
    touch_after_ns: int = TOUCH_AFTER_NS
    evicts: bool = True


class Directory:
    """Blocks of one identity in one directory. Every method may be called from several threads.

    The constructor sweeps, counts what is there and writes down the identity; it raises `InputError` with the
    directory's name when the directory cannot be used.
    """

    def __init__(self, filesystem: FileSystem, root: str, identity: Identity, options: DirectoryOptions) -> None:
        self._filesystem = filesystem
        self._root = root
        self._options = options
        self._identity = identity
        self._digest = identity.digest
        self._file_bytes = HEADER_BYTES + identity.row_bytes
        self._is_direct = options.direct
        self.capacity = Capacity(filesystem, root, options.capacity_bytes, evicts=options.evicts)
        self.namespace = f"{root}/{identity.name}"
        self._folder: WorkFolder | None = None
        self._num_swept = 0
        self._num_set_aside = 0
        self._guard = threading.Lock()
        """Over the count of files set aside, and the time below."""
        self._touched_ns = 0
        """The latest time of use that was given to a block."""
        self._renewal = threading.Lock()
        """Held by the thread that looks whether folders are gone, and makes them anew."""
        try:
            make_directories(filesystem, root)
            self._folder = open_folder(filesystem, root)
            self._num_swept = sweep(filesystem, root)
            self._make_namespace()
            self.capacity.scan()
        except BaseException as error:
            self.close(is_idle=True)
            if isinstance(error, OSError):
                raise InputError(f"cannot keep KV in {root}: {error.strerror or error}") from error
            raise
        self._warn_of_excess()

    @property
    def is_direct(self) -> bool:
        """Whether I/O still goes past the page cache: False once the file system refused."""
        return self._is_direct

    @property
    def num_swept(self) -> int:
        """Temporaries of ended processes that were removed at the start."""
        return self._num_swept

    @property
    def num_set_aside(self) -> int:
        """Bad files moved to quarantine."""
        return self._num_set_aside

    def holds(self, key: bytes, payload_bytes: int, page: memoryview) -> bool:
        """Whether a block is there with the right size and header. A bad one is set aside. Raises `OSError`."""
        path = places.block_path(self.namespace, key)
        try:
            header, file_bytes = read_header(self._filesystem, path, page)
            header.expect(self._digest, key, payload_bytes, file_bytes)
        except FileNotFoundError:
            return False
        except BadFileError as error:
            self._set_aside(path, key, error.fault)
            return False
        return True

    def load(self, block: Block, page: memoryview, watch: Watch) -> bool:
        """Fill `block.payload`, if its file is there and good to the last byte. A bad one is set aside.

        Raises `OSError` when it cannot be read, or is bad and stays where it is, and what `watch` raises.
        """
        path = places.block_path(self.namespace, block.key)
        try:
            used_ns = self._attempt(
                block, lambda direct: read_block(self._filesystem, path, block, page, watch, direct=direct)
            )
        except FileNotFoundError:
            return False
        except BadFileError as error:
            if not self._set_aside(path, block.key, error.fault):
                raise OSError(errno.EBADMSG, error.fault.words, path) from error
            return False
        if time.time_ns() - used_ns >= self._options.touch_after_ns:
            with contextlib.suppress(OSError):
                self._filesystem.touch(path, self.next_use_ns())
        return True

    def store(self, block: Block, page: memoryview, watch: Watch, *, replace: bool) -> bool:
        """Write `block` to its file. True when it is there in the end, which includes that it was there before.

        With `replace` a block of ours that is there is written again. False when there is no room, or something bad
        is in its place and could not be set aside. When the disk is full, or folders were removed, that is put right
        and tried once more. Raises `OSError`, which is logged once a kind, and what `watch` raises; then nothing is
        there that was not there before.
        """
        try:
            return self._store(block, page, watch, replace)
        except OSError as error:
            warn_rarely(self._root, f"store {kind_of(error)}", "cannot keep KV in %s: %s", self._root, error)
            raise

    def next_use_ns(self) -> int:
        """A time of use, Unix time in ns, that is later than any other that was given."""
        with self._guard:
            self._touched_ns = max(time.time_ns(), self._touched_ns + _TOUCH_STEP_NS)
            return self._touched_ns

    def touch(self, key: bytes, used_ns: int) -> None:
        """Give a block a time of use. One that is not there is ignored, and so is whatever else goes wrong."""
        with contextlib.suppress(OSError):
            self._filesystem.touch(places.block_path(self.namespace, key), used_ns)

    def close(self, *, is_idle: bool) -> None:
        """Give the lock back, unless a thread may still be writing."""
        self.capacity.close()
        if self._folder is not None:
            self._folder.close(is_idle=is_idle)

    def _store(self, block: Block, page: memoryview, watch: Watch, replace: bool) -> bool:
        final = places.block_path(self.namespace, block.key)
        is_there = self.holds(block.key, block.payload.nbytes, page)
        if is_there and not replace:
            return True
        if not is_there and self._is_taken(final):
            return False
        limit_bytes = self.capacity.limit_bytes
        try:
            return self._keep(block, final, page, watch)
        except OSError as error:
            if error.errno in _FULL and self._options.evicts:
                self._make_room(block.file_bytes, limit_bytes, error)
            elif isinstance(error, FileNotFoundError):
                self._make_anew()
            else:
                raise
        try:
            return self._keep(block, final, page, watch)
        except OSError as error:
            if error.errno in _FULL:
                self.capacity.pause()
            raise

    def _keep(self, block: Block, final: str, page: memoryview, watch: Watch) -> bool:
        """Reserve, write and commit. False when there is no room."""
        if not self.capacity.reserve(block.file_bytes):
            return False
        try:
            self._attempt(block, lambda direct: self._write(block, final, page, watch, direct))
        except BaseException:
            self.capacity.release(block.file_bytes)
            raise
        self.capacity.commit(final, block.file_bytes)
        return True

    def _make_room(self, file_bytes: int, limit_bytes: int, error: OSError) -> None:
        """The disk was full when the capacity was `limit_bytes`: from now on what fits is the capacity."""
        self.capacity.shrink(file_bytes, limit_bytes)
        warn_rarely(
            self._root,
            f"full {kind_of(error)}",
            "%s is full (%s): its blocks that were read longest ago make room, and %d bytes count as its capacity of "
            "%d for now",
            *(self._root, error.strerror, self.capacity.limit_bytes, self._options.capacity_bytes),
        )

    def _make_anew(self) -> None:
        """Put back whatever folder was removed while the tier ran. Raises `OSError`."""
        if not self._renewal.acquire(timeout=_RENEWAL_WAIT_S):
            return
        try:
            make_directories(self._filesystem, self._root)
            former = self._opened_folder
            is_lost = not former.is_there()
            if is_lost:
                self._folder = open_folder(self._filesystem, self._root)
                # What is still written by its name has lost that already; to publish it fails, and is tried again.
                former.close(is_idle=True)
            is_lost |= self._make_namespace()
        except InputError as error:
            raise OSError(errno.ENOENT, str(error)) from error
        finally:
            self._renewal.release()
        if is_lost:
            warn_rarely(self._root, "emptied", "%s was emptied while it was in use: it is begun anew", self._root)
            self.capacity.request_scan()

    def _make_namespace(self) -> bool:
        """Whether it was not there. Raises `OSError`, and `InputError` when it says that it is another one."""
        is_new = True
        try:
            self._filesystem.make_directory(self.namespace)
        except FileExistsError:
            is_new = False
        self._write_identity(self._identity)
        return is_new

    def _warn_of_excess(self) -> None:
        used_bytes, capacity_bytes = self.capacity.used_bytes, self._options.capacity_bytes
        if used_bytes > capacity_bytes:
            warn_rarely(
                self._root,
                "excess",
                "%s holds %d bytes of KV, more than its capacity of %d (--offload-capacity): nothing is removed at "
                "once, but what is stored from now on makes room for twice its size, until that fits",
                *(self._root, used_bytes, capacity_bytes),
            )

    def _attempt(self, block: Block, transfer: Callable[[bool], _Result]) -> _Result:
        """Past the page cache if that is wanted and possible, otherwise through it."""
        if not (self._is_direct and block.is_aligned):
            return transfer(False)
        try:
            return transfer(True)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
        result = transfer(False)
        self._is_direct = False
        _LOG.warning("%s does not take direct I/O: its files go through the page cache", self._root)
        return result

    def _write(self, block: Block, final: str, page: memoryview, watch: Watch, direct: bool) -> None:
        path = self._opened_folder.new_path()
        try:
            write_block(self._filesystem, path, block, page, watch, direct=direct, sync=self._options.sync)
            # Past this point a caller that was told "failed" may have changed the buffer; the bytes are out of it.
            watch.check()
            self._publish(path, final)
        except BaseException:
            with contextlib.suppress(OSError):
                self._filesystem.unlink(path)
            raise

    def _publish(self, path: str, final: str) -> None:
        shard = os.path.dirname(final)
        try:
            self._filesystem.rename(path, final)
        except FileNotFoundError:
            self._make_directory(shard)
            self._filesystem.rename(path, final)
        self._sync_directory(shard)

    def _make_directory(self, path: str) -> None:
        with contextlib.suppress(FileExistsError):
            self._filesystem.make_directory(path)
        self._sync_directory(os.path.dirname(path))

    def _sync_directory(self, path: str) -> None:
        """A name that is lost with the power is a miss: no reason to fail a block that is there."""
        if not self._options.sync:
            return
        with contextlib.suppress(OSError):
            descriptor = self._filesystem.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._filesystem.sync(descriptor)
            finally:
                self._filesystem.close(descriptor)

    def _is_taken(self, path: str) -> bool:
        try:
            self._filesystem.status(path)
        except FileNotFoundError:
            return False
        return True

    def _set_aside(self, path: str, key: bytes, fault: Fault) -> bool:
        """Whether the bad file is no longer at `path`."""
        try:
            is_moved = set_aside(self._filesystem, self.namespace, path, key, fault)
        except FileNotFoundError:
            return True
        except OSError as error:
            kind = f"set aside {kind_of(error)}"
            warn_rarely(self._root, kind, "cannot set aside %s, %s: %s", path, fault.words, error)
            return False
        if is_moved:
            with self._guard:
                self._num_set_aside += 1
            self.capacity.set_aside(self._file_bytes)
            _LOG.warning("set aside %s: %s", path, fault.words)
        else:
            full = "%s stays where it is, %s: the quarantine is full"
            warn_rarely(self.namespace, "quarantine", full, path, fault.words)
        return is_moved

    @property
    def _opened_folder(self) -> WorkFolder:
        if self._folder is None:
            raise InvariantError(f"{self._root} is used before it was opened")
        return self._folder

    def _write_identity(self, identity: Identity) -> None:
        path, text = f"{self.namespace}/{IDENTITY_FILE}", identity.to_json().encode()
        found = read_small_file(self._filesystem, path)
        if found == text:
            return
        # A loss of power may leave our own file cut short or as zeros; anything else is somebody's.
        if found is not None and found != text[: len(found)] and found.strip(b"\0"):
            raise InputError(f"{path} does not describe its directory: move it away")
        temporary = self._opened_folder.new_path()
        try:
            write_small_file(self._filesystem, temporary, text, sync=self._options.sync)
            self._filesystem.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._filesystem.unlink(temporary)
            raise


def set_aside(filesystem: FileSystem, namespace: str, path: str, key: bytes, fault: Fault) -> bool:
    """Move a bad file into its namespace's quarantine. False when that is full. Raises `OSError`."""
    if len(places.quarantined(filesystem, namespace)) >= MAX_QUARANTINED:
        return False
    folder = f"{namespace}/{places.QUARANTINE}"
    with contextlib.suppress(FileExistsError):
        filesystem.make_directory(folder)
    filesystem.rename(path, f"{folder}/{key.hex()}.{fault.value}.{secrets.token_hex(4)}.bad")
    return True
