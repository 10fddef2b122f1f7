"""Files of shared memory without a name, and their pages: the system calls that a region is made of."""

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hisparse.errors import BackendError, CapacityError, InputError

SHARED_MEMORY = Path("/dev/shm")

_PIECE_BYTES = 64 << 20
_MAX_THREADS = 16
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_NO_POPULATE = (errno.EINVAL, errno.ENOSYS)  # kernels before 5.14
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFAULT, errno.EFBIG)


def open_unnamed(directory: Path) -> int:
    """A new empty file in `directory` that no name leads to: it is gone when the last process that has it is.

    Raises `BackendError` where that is not possible.
    """
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BackendError(
            f"cannot make a file of shared memory in {directory} ({error.strerror}): it must be a tmpfs, writable"
        ) from error


def give_name(fd: int, path: Path) -> None:
    """Let others find a file of `open_unnamed`. Raises `InputError` when the name is taken, else `BackendError`."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Given a directory, Python calls linkat and follows the link that /proc shows for the open file.
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=directory, follow_symlinks=True)
    except FileExistsError:
        raise InputError(
            f"{path} exists and is in use, or is not ours: give every start a region name of its own"
        ) from None
    except OSError as error:
        raise BackendError(f"cannot name shared memory {path} ({error.strerror}): is /proc mounted?") from error
    finally:
        os.close(directory)


def open_named(path: Path) -> int | None:
    """The file of that name; None when there is none. Raises `InputError` for one that cannot be a region."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path} cannot be opened as a shared region ({error.strerror})") from error
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise InputError(f"{path} is not a shared region: it is not a regular file")


def set_size(fd: int, num_bytes: int) -> None:
    """Make a file that long; its pages come later. Raises `CapacityError`."""
    try:
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        raise CapacityError(
            f"a file of shared memory of {num_bytes} bytes is not allowed ({error.strerror}): see `ulimit -f`"
        ) from error


def map_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """All of a file, shared, in large pages where the system has them. Raises `CapacityError`."""
    try:
        return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(
            f"cannot map {num_bytes} bytes of shared memory ({error}): make the region smaller, or raise `ulimit -v`"
        ) from error


def prefault(fd: int, address: int, num_bytes: int) -> None:
    """Have every page of a shared mapping of `fd` backed, and mapped in this process. What they hold stays.

    By several threads: one alone takes seconds a gigabyte. A page that turns out to be missing later would kill the
    process with SIGBUS. Raises `CapacityError` when the system has no more.
    """
    madvise = _madvise_function()
    madvise(address, num_bytes, _MADV_HUGEPAGE)  # no more than a wish

    def fill(start: int) -> int:
        size = min(_PIECE_BYTES, num_bytes - start)
        code = madvise(address + start, size, _MADV_POPULATE_WRITE)
        return _allocate(fd, start, size) if code in _NO_POPULATE else code

    threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    with ThreadPoolExecutor(threads) as pool:
        for code in _until_failure(pool, fill, range(0, num_bytes, _PIECE_BYTES)):
            if code:
                reason = "no space is left" if code in _FULL else os.strerror(code)
                raise CapacityError(
                    f"the system could not back {num_bytes} bytes of shared memory ({reason}): "
                    "make the region smaller, or free memory"
                )


def _until_failure(pool: ThreadPoolExecutor, fill: Callable[[int], int], starts: range) -> Iterator[int]:
    """The results in order. After a failure, what has not begun does not begin."""
    futures = [pool.submit(fill, start) for start in starts]
    try:
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def _allocate(fd: int, start: int, num_bytes: int) -> int:
    try:
        os.posix_fallocate(fd, start, num_bytes)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _madvise_function() -> Callable[[int, int, int], int]:
    """madvise by address. ctypes lets other threads run meanwhile, which mmap's own method does not."""
    libc = ctypes.CDLL(None, use_errno=True)

    def advise(address: int, num_bytes: int, advice: int) -> int:
        status = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice))
        return ctypes.get_errno() if status else 0

    return advise
