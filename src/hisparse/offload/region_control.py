"""The last page of a region's file: what the file is, and who has mapped it. And the locks that go with it.

Two locks, both of which the kernel gives up when a process dies, in whatever way, and in whatever namespace:
- every member holds a shared `flock` of the file, so a file that can be locked exclusively has no living member;
- what changes the control page or removes the file's name does it under an exclusive lock of the page's bytes.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hisparse.errors import InputError

CONTROL_BYTES = 4096
VERSION = 1
DIGEST_BYTES = 32
MAX_MEMBERS = 2048

_MAGIC = b"HiSpKVRg"
_HEADER = struct.Struct(f"<8sIIQQ{DIGEST_BYTES}s")
_FLAGS_AT = 1024
_ABANDONED_AT = 1023
_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


@dataclass(frozen=True, slots=True)
class RegionShape:
    """The size of a region, and for whom it is: `num_blocks` rows of `row_bytes`, mapped by `num_members` processes.

    `digest`: whatever members must agree on to understand each other's bytes, such as that of their layout. At most
    32 bytes; shorter ones are filled up with zeros.
    """

    num_blocks: int
    row_bytes: int
    num_members: int = 1
    digest: bytes = bytes(DIGEST_BYTES)

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.row_bytes < 1 or self.row_bytes % CONTROL_BYTES:
            raise InputError(
                f"a shared region of {self.num_blocks} blocks of {self.row_bytes} bytes is not possible: it takes at "
                f"least one, and rows are a multiple of {CONTROL_BYTES} bytes"
            )
        if self.file_bytes >= 1 << 63:
            raise InputError(f"a shared region of {self.file_bytes} bytes is larger than any file")
        if not 1 <= self.num_members <= MAX_MEMBERS:
            raise InputError(f"a region has 1 to {MAX_MEMBERS} members, not {self.num_members}")
        if len(self.digest) > DIGEST_BYTES:
            raise InputError(f"a digest of {len(self.digest)} bytes is too long: at most {DIGEST_BYTES} are kept")
        object.__setattr__(self, "digest", self.digest.ljust(DIGEST_BYTES, b"\0"))

    @property
    def data_bytes(self) -> int:
        """All rows."""
        return self.num_blocks * self.row_bytes

    @property
    def file_bytes(self) -> int:
        """The rows and the control page behind them."""
        return self.data_bytes + CONTROL_BYTES


class ControlPage:
    """The page as members see it, in their mapping of it. Written under `locked` only."""

    def __init__(self, page: np.ndarray, shape: RegionShape) -> None:
        """`page`: uint8 `[CONTROL_BYTES]`, shared."""
        self._page = page
        self._flags = page[_FLAGS_AT : _FLAGS_AT + shape.num_members]

    def write(self, shape: RegionShape) -> None:
        """Say what the file is. By its creator, before anybody else can see it."""
        numbers = (VERSION, shape.num_members, shape.num_blocks, shape.row_bytes)
        header = _HEADER.pack(_MAGIC, *numbers, shape.digest)
        self._page[: len(header)] = np.frombuffer(header, dtype=np.uint8)

    def has_mapped(self, member: int) -> bool:
        """Whether a member said that it has the region mapped."""
        return bool(self._flags[member])

    def set_mapped(self, member: int) -> None:
        """By the member itself, once."""
        self._flags[member] = 1

    @property
    def missing(self) -> tuple[int, ...]:
        """Members that have not mapped the region, in order."""
        return tuple(np.flatnonzero(self._flags == 0).tolist())

    @property
    def is_abandoned(self) -> bool:
        """Whether a member gave up before all had mapped the region. Nobody else can then."""
        return bool(self._page[_ABANDONED_AT])

    def abandon(self) -> None:
        """By a member that gives up."""
        self._page[_ABANDONED_AT] = 1


def read_shape(fd: int) -> RegionShape | None:
    """What the file says that it is; None for a file that is not, or not wholly, a region of this version."""
    size = os.fstat(fd).st_size
    if size < CONTROL_BYTES:
        return None
    magic, version, members, blocks, row_bytes, digest = _HEADER.unpack(
        os.pread(fd, _HEADER.size, size - CONTROL_BYTES).ljust(_HEADER.size, b"\0")
    )
    if magic != _MAGIC or version != VERSION:
        return None
    try:
        shape = RegionShape(blocks, row_bytes, members, digest)
    except InputError:
        return None
    return shape if shape.file_bytes == size else None


def lock_shared(fd: int) -> bool:
    """Become one of those who use the file. False while a sweep looks at it."""
    return _flock(fd, fcntl.LOCK_SH)


def lock_unused(fd: int) -> bool:
    """Take hold of a file that no living process uses. False when one does."""
    return _flock(fd, fcntl.LOCK_EX)


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(fd: int, shape: RegionShape) -> Iterator[None]:
    """Alone with the control page, among all members. Waits for others, who hold it for microseconds."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, shape.data_bytes, CONTROL_BYTES, 0))
    try:
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, shape.data_bytes, CONTROL_BYTES, 0))


def remove_name(fd: int, path: Path) -> None:
    """Remove `path` if it still names this very file; another generation's file of the same name stays.

    Under `locked`, or under `lock_unused`: nobody else then removes this file's name between the look and the removal,
    and as long as it is there nobody can give it to another. Raises `OSError`.
    """
    own = os.fstat(fd)
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return
    if (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino):
        path.unlink(missing_ok=True)
