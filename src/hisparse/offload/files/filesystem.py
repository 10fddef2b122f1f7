"""The calls by which the file tier touches a disk, and nothing else does.

One method is one system call, so that a test can stand in front of every one of them and make it fail, stall or end
the process. All errors are `OSError`; what an error means is decided by the callers.
"""

import fcntl
import os
from collections.abc import Sequence
from typing import Protocol

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
OLD_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
DIRECT = getattr(os, "O_DIRECT", 0)
"""Past the page cache. 0 where the platform has no such flag: then every file is buffered."""


class FileSystem(Protocol):
    """What the tier asks of a file system. Paths are absolute text, descriptors are the caller's to close."""

    def open(self, path: str, flags: int) -> int:
        """A descriptor of `path`."""

    def close(self, descriptor: int) -> None:
        """Give a descriptor back. It is gone even when this raises."""

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` from byte `offset` on. Returns bytes read: fewer than asked for, or 0 at the end."""

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write `buffers` at byte `offset`. Returns bytes written, which may be fewer."""

    def sync(self, descriptor: int) -> None:
        """Wait until what was written, or a directory's entries, would outlive a loss of power."""

    def status_of(self, descriptor: int) -> os.stat_result:
        """Size, inode and times of an open file."""

    def status(self, path: str) -> os.stat_result:
        """The same of a path. A symbolic link is not followed."""

    def touch(self, path: str, used_ns: int) -> None:
        """Set the time of modification, Unix time in ns: what eviction goes by."""

    def rename(self, source: str, destination: str) -> None:
        """Move a file in one step, over `destination` if that exists."""

    def unlink(self, path: str) -> None:
        """Remove a file."""

    def make_directory(self, path: str) -> None:
        """Create one directory whose parent exists."""

    def list_directory(self, path: str) -> list[str]:
        """The names in a directory, in no order."""

    def lock(self, descriptor: int) -> bool:
        """Take the lock of an open file unless another descriptor has it. It ends with its descriptor."""


class LocalFileSystem:
    """The machine's own."""

    def open(self, path: str, flags: int) -> int:
        """`open(2)`; a new file may be read by everyone and written by its owner."""
        return os.open(path, flags, 0o644)

    def close(self, descriptor: int) -> None:
        """`close(2)`."""
        os.close(descriptor)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """`preadv(2)`."""
        return os.preadv(descriptor, buffers, offset)

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """`pwritev(2)`."""
        return os.pwritev(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        """`fsync(2)`."""
        os.fsync(descriptor)

    def status_of(self, descriptor: int) -> os.stat_result:
        """`fstat(2)`."""
        return os.fstat(descriptor)

    def status(self, path: str) -> os.stat_result:
        """`lstat(2)`."""
        return os.lstat(path)

    def touch(self, path: str, used_ns: int) -> None:
        """`utimensat(2)`."""
        os.utime(path, ns=(used_ns, used_ns), follow_symlinks=False)

    def rename(self, source: str, destination: str) -> None:
        """`rename(2)`."""
        os.rename(source, destination)

    def unlink(self, path: str) -> None:
        """`unlink(2)`."""
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        """`mkdir(2)`."""
        os.mkdir(path)

    def list_directory(self, path: str) -> list[str]:
        """`getdents(2)` of the whole directory."""
        return os.listdir(path)

    def lock(self, descriptor: int) -> bool:
        """`flock(2)`, exclusive, without waiting."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
