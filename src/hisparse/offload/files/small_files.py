"""Files of a few lines and the folders around them, by the calls that a test can stand in front of."""

import contextlib
import errno
import os

from hisparse.offload.files.filesystem import NEW_FILE, OLD_FILE, FileSystem

_SMALL_BYTES = 1 << 20


def read_small_file(filesystem: FileSystem, path: str) -> bytes | None:
    """The first MiB of a file; None if there is none. Raises `OSError`."""
    try:
        descriptor = filesystem.open(path, OLD_FILE)
    except FileNotFoundError:
        return None
    try:
        buffer = bytearray(_SMALL_BYTES)
        return bytes(buffer[: filesystem.read(descriptor, (memoryview(buffer),), 0)])
    finally:
        with contextlib.suppress(OSError):
            filesystem.close(descriptor)


def write_small_file(filesystem: FileSystem, path: str, text: bytes, *, sync: bool) -> None:
    """Make a file. Raises `OSError`, and then the caller removes what is left at `path`."""
    descriptor = filesystem.open(path, NEW_FILE)
    try:
        if filesystem.write(descriptor, (memoryview(text),), 0) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if sync:
            filesystem.sync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            filesystem.close(descriptor)
        raise
    filesystem.close(descriptor)


def make_directories(filesystem: FileSystem, path: str) -> None:
    """`path` and what is missing above it."""
    missing = []
    while path and path != "/":
        try:
            filesystem.status(path)
            break
        except FileNotFoundError:
            missing.append(path)
            path = os.path.dirname(path)
    for part in reversed(missing):
        with contextlib.suppress(FileExistsError):
            filesystem.make_directory(part)
