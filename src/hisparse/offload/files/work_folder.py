"""Where files are written before they get their names, and how the leavings of ended processes are found.

Below each directory stands `.hisparse/`. Every tier that writes there has an instance name, a lock file
`<instance>.lock` that it keeps locked, and temporaries `<instance>-<number>.tmp`. The kernel gives a lock back when its
process ends, however it ends. So a lock file whose lock can be had belongs to nobody, and neither do its temporaries.
"""

import contextlib
import itertools
import os
import re
import secrets
from collections import defaultdict

from hisparse.errors import InputError
from hisparse.offload.files.filesystem import FileSystem

FOLDER = ".hisparse"
_NAME = re.compile(r"([0-9a-f]{16})(?:\.lock|-\d+\.tmp)")
_NEW_LOCK = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_OLD_LOCK = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_ATTEMPTS = 8


class WorkFolder:
    """One tier's share of `.hisparse/`. `open_folder` makes it; `close` takes the lock file away again."""

    def __init__(self, filesystem: FileSystem, path: str, instance: str, lock: int) -> None:
        self._filesystem = filesystem
        self._path = path
        self._instance = instance
        self._lock = lock
        self._numbers = itertools.count()

    def new_path(self) -> str:
        """A path at which nothing has ever been."""
        return f"{self._path}/{self._instance}-{next(self._numbers)}.tmp"

    def is_there(self) -> bool:
        """Whether its lock file still has its name: without, a sweep takes its temporaries. Raises `OSError`."""
        return _is_at(self._filesystem, f"{self._path}/{self._instance}.lock", self._lock)

    def close(self, *, is_idle: bool) -> None:
        """End the instance. Unless it is idle, the lock stays until the process ends, for a temporary still written."""
        if not is_idle:
            return
        with contextlib.suppress(OSError):
            self._filesystem.unlink(f"{self._path}/{self._instance}.lock")
        with contextlib.suppress(OSError):
            self._filesystem.close(self._lock)


def open_folder(filesystem: FileSystem, root: str) -> WorkFolder:
    """Make `.hisparse/` below `root` if need be, and an instance in it. Raises `OSError`."""
    path = f"{root}/{FOLDER}"
    with contextlib.suppress(FileExistsError):
        filesystem.make_directory(path)
    for _ in range(_ATTEMPTS):
        instance = secrets.token_hex(8)
        lock_path = f"{path}/{instance}.lock"
        descriptor = filesystem.open(lock_path, _NEW_LOCK)
        try:
            if _is_locked_for_good(filesystem, lock_path, descriptor):
                return WorkFolder(filesystem, path, instance, descriptor)
        except BaseException:
            _discard(filesystem, lock_path, descriptor)
            raise
        _discard(filesystem, lock_path, descriptor)
    raise InputError(f"{path}: somebody removes lock files there as soon as they are made")


def _is_locked_for_good(filesystem: FileSystem, path: str, descriptor: int) -> bool:
    """Whether the lock is ours and its file still has its name: a sweep may have come between creation and lock."""
    try:
        if not filesystem.lock(descriptor):
            return False
    except OSError:
        # No locks here. A sweep cannot take any either, so it leaves everything alone.
        return True
    return _is_at(filesystem, path, descriptor)


def _is_at(filesystem: FileSystem, path: str, descriptor: int) -> bool:
    """Whether an open file still has its name."""
    try:
        return filesystem.status(path).st_ino == filesystem.status_of(descriptor).st_ino
    except FileNotFoundError:
        return False


def _discard(filesystem: FileSystem, path: str, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        filesystem.unlink(path)
    with contextlib.suppress(OSError):
        filesystem.close(descriptor)


def sweep(filesystem: FileSystem, root: str) -> int:
    """Remove what ended processes left in `.hisparse/` below `root`. Returns the number of temporaries removed.

    Whatever cannot be listed, locked or removed stays for the next sweep. A file with any other name is not touched.
    """
    path = f"{root}/{FOLDER}"
    try:
        names = filesystem.list_directory(path)
    except OSError:
        return 0
    of_instance: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _NAME.fullmatch(name)
        if match:
            of_instance[match[1]].append(name)
    return sum(_sweep_instance(filesystem, path, instance, found) for instance, found in of_instance.items())


def _sweep_instance(filesystem: FileSystem, path: str, instance: str, names: list[str]) -> int:
    lock_name = f"{instance}.lock"
    descriptor = None
    num_removed = 0
    try:
        # Temporaries without a lock file are orphans: both ends of an instance's life remove the lock last.
        with contextlib.suppress(FileNotFoundError):
            descriptor = filesystem.open(f"{path}/{lock_name}", _OLD_LOCK)
        if descriptor is not None and not filesystem.lock(descriptor):
            return 0
        for name in names:
            if name != lock_name:
                with contextlib.suppress(FileNotFoundError):
                    filesystem.unlink(f"{path}/{name}")
                    num_removed += 1
        if descriptor is not None:
            filesystem.unlink(f"{path}/{lock_name}")
    except OSError:
        pass
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                filesystem.close(descriptor)
    return num_removed
