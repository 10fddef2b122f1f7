"""Host memory for the pool: what every backend offers, and ordinary pages of the CPU, private or of a shared file."""

import mmap
from typing import Protocol

import torch

from hisparse.errors import BackendError, InvariantError


class HostMemory(Protocol):
    """One allocation of host memory, released once, by the pool that owns it."""

    @property
    def storage(self) -> torch.Tensor:
        """uint8 `[num_bytes]`, zero at first. Raises `InvariantError` after `release`."""
        ...

    def release(self) -> None:
        """Give the memory back to the system. Idempotent."""
        ...


class _Mapping:
    """What both kinds of mapping are, up to their end."""

    def __init__(self, fd: int, num_bytes: int, flags: int, what: str, advice: str) -> None:
        try:
            self._mapping: mmap.mmap | None = mmap.mmap(fd, num_bytes, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise BackendError(
                f"cannot map {num_bytes} bytes of {what} memory for the host pool ({error}): "
                f"make the host pool smaller, or {advice} the limit that `ulimit -v` shows"
            ) from error

    @property
    def storage(self) -> torch.Tensor:
        if self._mapping is None:
            raise InvariantError("host memory was used after its release")
        return torch.frombuffer(self._mapping, dtype=torch.uint8)


class AnonymousMapping(_Mapping):
    """Private anonymous pages: nothing is resident before it is written."""

    def __init__(self, num_bytes: int) -> None:
        """Raises `BackendError` with the amount when the system has no room for it."""
        super().__init__(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, "host", "free memory and raise")

    def release(self) -> None:
        if self._mapping is None:
            return
        # The pages go back to the system now. The addresses stay mapped as long as a tensor of them is left, which
        # then reads zeros: a tensor keeps the mapping alive, but would not keep `close` from unmapping it.
        self._mapping.madvise(mmap.MADV_DONTNEED)
        self._mapping = None


class SharedMapping(_Mapping):
    """Pages of a file that other processes map too. They are there as long as one of them has the file or a mapping."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """All of the first `num_bytes` of file `fd`, which stays the caller's. Raises `BackendError`."""
        super().__init__(fd, num_bytes, mmap.MAP_SHARED, "shared", "raise")

    def release(self) -> None:
        # Unmapped with the last tensor of it. What is in the pages is no longer this process's to throw away.
        self._mapping = None
