"""How many copies into a shared host pool there have been: the one thing that the ranks of a pool tell each other.

Rank 0 alone writes the pool. Every rank is given the same transfers in the same order, so the n-th copy into the pool
is the same one for all of them, and numbers are enough. A step without such a copy moves no number, with or without a
forward pass, and so none can get out of line.

The other direction needs no word. A host block is written again only after every rank reported the last transfer that
read it to be complete, and after a step in which no table named it any more; between a rank's last read of single rows
in a forward pass and rank 0's next copy stands at least one collective of that pass.
"""

import os
import struct
import time

from hisparse.errors import BackendError, InvariantError

_CELL = struct.Struct("=q")
_YIELDS = 50
_SLEEP_SECONDS = 0.0001

ORDER_SECONDS = 120.0
"""What a rank waits at most for another one, by default."""


def create_shared_file(label: str, num_bytes: int) -> int:
    """A file of memory without a name, zero at first: gone when the last process that has it is. Its descriptor.

    Raises `BackendError` where the system does not offer that.
    """
    try:
        fd = os.memfd_create(f"hisparse-{label}", os.MFD_CLOEXEC)
    except OSError as error:
        raise BackendError(f"cannot make a file of shared memory ({error.strerror})") from error
    try:
        os.ftruncate(fd, num_bytes)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise BackendError(
            f"a file of shared memory of {num_bytes} bytes is not allowed ({error}): make the host pool "
            "smaller, or see `ulimit -f`"
        ) from error
    return fd


class HostOrder:
    """Counts of copies into the pool, in a shared file: what rank 0 published, and what each peer took note of.

    They are read and written by system calls, not in a mapping: whatever was written before a number is visible to
    whoever has read that number.
    """

    def __init__(self, fd: int, rank: int, num_ranks: int, timeout_s: float = ORDER_SECONDS) -> None:
        """`fd`: of `create_file`; it stays the caller's."""
        if not 0 <= rank < num_ranks:
            raise InvariantError(f"rank {rank} is not one of {num_ranks}")
        self.rank = rank
        self._fd = fd
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s

    @staticmethod
    def create_file(num_ranks: int) -> int:
        """A file for so many ranks, in which nothing was published yet."""
        return create_shared_file("host-order", num_ranks * _CELL.size)

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the pool."""
        return self.rank == 0

    # Rank 0.

    def publish(self, count: int) -> None:
        """The first `count` copies may be relied on. Raises `InvariantError` when that is not one more than before."""
        before = self.num_published
        if not self.is_writer or count != before + 1:
            raise InvariantError(f"rank {self.rank} published copy {count} of the host pool after copy {before}")
        self._write(0, count)

    def wait_acknowledged(self, count: int) -> None:
        """Return once all peers took note of the first `count` copies. Raises `BackendError`, naming one, in time."""
        for peer in range(1, self._num_ranks):
            self._wait(peer, count, f"rank {peer} did not take note of copy {count} into the host pool")

    # Peers.

    @property
    def num_published(self) -> int:
        """Copies that may be relied on. Never less than before."""
        return self._read(0)

    def wait_published(self, count: int) -> None:
        """Return once `count` copies were published. Raises `BackendError` when they are not in time."""
        self._wait(0, count, f"rank 0 did not write copy {count} into the host pool")

    def acknowledge(self, count: int) -> None:
        """This peer's reads of the first `count` copies are ordered: what marks them may mark others."""
        self._write(self.rank, count)

    def _wait(self, rank: int, count: int, what: str) -> None:
        tries, until_s = 0, time.monotonic() + self._timeout_s
        while self._read(rank) < count:
            tries += 1
            if tries < _YIELDS:
                os.sched_yield()
                continue
            if time.monotonic() > until_s:
                raise BackendError(f"{what} within {self._timeout_s:g} s: it hangs, or is much slower than the others")
            time.sleep(_SLEEP_SECONDS)

    def _read(self, rank: int) -> int:
        number: int = _CELL.unpack(os.pread(self._fd, _CELL.size, rank * _CELL.size))[0]
        return number

    def _write(self, rank: int, count: int) -> None:
        os.pwrite(self._fd, _CELL.pack(count), rank * _CELL.size)
