"""Pinned host memory: mapped, filled by several threads, registered with the driver in chunks."""

import ctypes
import errno
import logging
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from hisparse.errors import BackendError
from hisparse.geometry import align_up
from hisparse.worker.cuda import driver, numa, teardown
from hisparse.worker.host_memory import AnonymousMapping, SharedMapping

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30
"""What one registration covers. A copy may not cross from one registration into the next."""

_FILL_BYTES = 64 << 20
_MAX_THREADS = 16
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True)
class PinRequest:
    """What to pin and where: bytes, the CUDA device that registers them, and the NUMA node to prefer, if any.

    `file`: descriptor of a file of shared memory, of whole pages, to map instead of memory of the process's own.
    """

    num_bytes: int
    device_index: int
    node: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    file: int | None = None


@dataclass(frozen=True, slots=True)
class Pinning:
    """How memory is pinned and unpinned by address. The driver's functions, or a test's."""

    register: Callable[[int, int], None] = driver.register
    unregister: Callable[[int], None] = driver.unregister
    device_address: Callable[[int], int] = driver.device_address
    context: Callable[[int], AbstractContextManager[None]] = driver.device_context


class PinnedMapping:
    """`HostMemory` that GPUs read and write directly, at the addresses that the CPU uses.

    Kernels see one range. A copy of the driver's, and so one of torch's, must not cross from one chunk into the next.
    It is released by `release`, and if nobody did, at exit or on SIGTERM.
    """

    def __init__(self, request: PinRequest, pinning: Pinning | None = None) -> None:
        """Raises `BackendError` when memory is short or may not be pinned, and gives back what it had by then."""
        self._request = request
        self._pinning = pinning if pinning is not None else Pinning()
        self._registered: list[int] = []
        self._is_ended = False
        """Nothing more is pinned: it is given back, by the owner or because the process ends."""
        self._teardown: int | None = None
        # Whole pages: a page that a registration shares with other memory of the process would be pinned with it.
        num_bytes = align_up(request.num_bytes, mmap.PAGESIZE)
        self._mapping = AnonymousMapping(num_bytes) if request.file is None else SharedMapping(request.file, num_bytes)
        self._address = self._mapping.storage.data_ptr()
        try:
            if request.node is not None:
                numa.prefer_node(self._address, request.num_bytes, request.node)
            prefer_huge_pages(self._address, align_up(request.num_bytes, mmap.PAGESIZE))
            prefault(self._address, align_up(request.num_bytes, mmap.PAGESIZE))
            # First: a process that is to end while it pins has most of it pinned already.
            self._teardown = teardown.add(self._unpin)
            self._register_all()
        except BaseException:
            self.release()
            raise

    @property
    def storage(self) -> torch.Tensor:
        """uint8 `[num_bytes]`, zero at first. Raises `InvariantError` after `release`."""
        return self._mapping.storage[: self._request.num_bytes]

    def release(self) -> None:
        """Unpin and give back. Idempotent. Raises `DriverError` when the driver refuses."""
        if self._teardown is not None:
            teardown.remove(self._teardown)
        try:
            self._unpin()
        finally:
            self._mapping.release()

    def _register_all(self) -> None:
        for start, size in chunks(align_up(self._request.num_bytes, mmap.PAGESIZE), self._request.chunk_bytes):
            address = self._address + start
            try:
                with self._pinning.context(self._request.device_index):
                    self._pinning.register(address, size)
                    self._registered.append(address)
                    seen_at = self._pinning.device_address(address)
            except BackendError as error:
                raise BackendError(pinning_advice(str(error), self._request.num_bytes, start)) from error
            if self._is_ended:
                raise BackendError(f"pinning was broken off after {start + size} bytes: the process ends")
            if seen_at != address:
                raise BackendError(
                    "the GPU sees pinned host memory at addresses of its own, which this library does not support: "
                    "use a driver and a system with unified addressing (64-bit Linux)"
                )

    def _unpin(self) -> None:
        """Unpin all chunks; goes on after a failure and raises the first one. Also called by another thread.

        A chunk that is being registered meanwhile is left to the thread that does: it looks whether all is ended.
        """
        self._is_ended = True
        errors: list[BackendError] = []
        while True:
            try:
                address = self._registered.pop()
            except IndexError:  # another thread may have taken the last one
                break
            try:
                with self._pinning.context(self._request.device_index):
                    self._pinning.unregister(address)
            except BackendError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def chunks(num_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and size of each chunk of an allocation; only the last one is smaller."""
    for start in range(0, num_bytes, chunk_bytes):
        yield start, min(chunk_bytes, num_bytes - start)


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for large pages: the fewer there are, the quicker a GPU translates addresses that jump about in the pool.

    No more than a wish: a system without them backs the range with small ones.
    """
    _advise(address, num_bytes, _MADV_HUGEPAGE)


def prefault(address: int, num_bytes: int) -> None:
    """Have the system back every page of a private mapping, by several threads: one alone takes seconds a gigabyte.

    `address` starts a page. Raises `BackendError` when memory runs out.
    """
    threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    pieces = chunks(num_bytes, _FILL_BYTES)
    with ThreadPoolExecutor(threads) as pool:
        for code in pool.map(lambda piece: _populate(address + piece[0], piece[1]), pieces):
            if code:
                raise BackendError(
                    f"the system has no {num_bytes} bytes of memory for the host pool ({os.strerror(code)}): "
                    "make the host pool smaller, or free memory"
                )


def pinning_advice(failure: str, num_bytes: int, pinned_bytes: int) -> str:
    """What to do about a refusal of the driver, after `pinned_bytes` of `num_bytes` were pinned."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    reached = f"{failure}, after {pinned_bytes} of {num_bytes} bytes"
    if limit != resource.RLIM_INFINITY and limit < num_bytes:
        return (
            f"{reached}. The limit of locked memory is {limit} bytes: raise it (ulimit -l unlimited, or "
            "--ulimit memlock=-1 for a container), or make the host pool smaller"
        )
    return f"{reached}: make the host pool smaller, or free memory"


def _populate(address: int, num_bytes: int) -> int:
    """0, or the error number. ctypes lets other threads run meanwhile."""
    code = _advise(address, num_bytes, _MADV_POPULATE_WRITE)
    if code in (errno.EINVAL, errno.ENOSYS):  # kernels before 5.14 do not know the advice
        ctypes.memset(address, 0, num_bytes)
        return 0
    return code


def _advise(address: int, num_bytes: int, advice: int) -> int:
    """0, or the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice))
    return ctypes.get_errno() if status else 0
