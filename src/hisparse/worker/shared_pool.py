"""One host pool for all ranks of a node: rank 0 writes it, its peers wait for the writes and copy nothing.

The rows of the latents are the same in all ranks, so one copy of a page serves them all. What differs between kinds of
devices is how a peer waits: on a CPU its stream of copies does not move beyond a count; on a GPU its stream waits for
an event of rank 0 (`worker.cuda.shared_pool`).
"""

from dataclasses import dataclass
from typing import Protocol

from hisparse.errors import InvariantError
from hisparse.worker.host_memory import HostMemory, SharedMapping
from hisparse.worker.host_order import HostOrder
from hisparse.worker.stream import CopyEvent, CopyStream, CpuStream
from hisparse.worker.views import BlockCopies


class HostWrites(Protocol):
    """How a worker's pages get into the host pool, in the order of the worker's stream."""

    @property
    def is_writer(self) -> bool:
        """Whether this worker's own bytes are written."""
        ...

    def submit(self, copies: BlockCopies) -> CopyEvent:
        """Whatever is in the stream behind this call sees the pages in the pool."""
        ...


class PoolSharing(Protocol):
    """A rank's part in a shared pool, for `HiSparseWorker`."""

    def allocate_host(self, num_bytes: int) -> HostMemory:
        """The pool's memory, mapped here. Raises `BackendError`."""
        ...

    def host_writes(self, stream: CopyStream) -> HostWrites:
        """Rank 0's writes, or a peer's waits for them."""
        ...


class OwnWrites:
    """`HostWrites` of a worker that has a pool for itself."""

    is_writer = True

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream

    def submit(self, copies: BlockCopies) -> CopyEvent:
        return self._stream.submit(copies)


class CpuPoolSharing:
    """`PoolSharing` between processes that compute on the CPU."""

    def __init__(self, fd: int, order: HostOrder) -> None:
        """`fd`: the pool's file, as long as the pool at least; it stays the caller's."""
        self._fd = fd
        self._order = order

    def allocate_host(self, num_bytes: int) -> HostMemory:
        return SharedMapping(self._fd, num_bytes)

    def host_writes(self, stream: CopyStream) -> HostWrites:
        if not isinstance(stream, CpuStream):
            raise InvariantError(f"a pool of CPU processes has no use for a {type(stream).__name__}")
        return CpuHostWriter(stream, self._order) if self._order.is_writer else CpuHostReader(stream, self._order)


class CpuHostWriter:
    """Rank 0 on a CPU: a copy is published when its bytes have moved, however late that is."""

    is_writer = True

    def __init__(self, stream: CpuStream, order: HostOrder) -> None:
        self._stream = stream
        self._order = order
        self._count = 0

    def submit(self, copies: BlockCopies) -> CopyEvent:
        self._count += 1
        return self._stream.submit(_Published(copies, self._order, self._count))


class CpuHostReader:
    """A peer on a CPU: its stream does not move beyond a copy that rank 0 has not published."""

    is_writer = False

    def __init__(self, stream: CpuStream, order: HostOrder) -> None:
        self._stream = stream
        self._order = order
        self._count = 0

    def submit(self, copies: BlockCopies) -> CopyEvent:
        self._count += 1
        return self._stream.submit(_Awaited(self._order, self._count))


@dataclass(slots=True)
class _Published:
    """Copy number `count` into the pool, by rank 0."""

    copies: BlockCopies
    order: HostOrder
    count: int

    @property
    def is_ready(self) -> bool:
        return True

    def run(self) -> None:
        self.copies.run()
        self.order.publish(self.count)


@dataclass(slots=True)
class _Awaited:
    """The same, where rank 0 does it."""

    order: HostOrder
    count: int

    @property
    def is_ready(self) -> bool:
        return self.order.num_published >= self.count

    def run(self) -> None:
        self.order.wait_published(self.count)
