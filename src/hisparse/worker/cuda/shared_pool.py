"""One pinned host pool for the ranks of a node: each pins the same memory, rank 0 writes it, events order its peers.

Rank 0 records an interprocess event behind every copy into the pool, and then publishes the copy's number. A peer that
is given the same copy waits on the CPU until the number is published, which is soon, because rank 0 is given its
commands at the same time; then it has its stream of copies wait for the event, and takes note of the number. A wait
refers to the recording that it finds, so an event may be recorded again once every peer has taken note: `NUM_EVENTS` of
them serve any number of steps, and rank 0 waits, if at all, for peers that are so many copies behind.

The peer's own event behind that wait is what it reports as the copy's completion, and what the computations of its
next step wait for, as for copies of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hisparse.errors import InvariantError
from hisparse.worker.cuda import driver, numa
from hisparse.worker.cuda.host_memory import PinnedMapping, PinRequest
from hisparse.worker.cuda.stream import CudaStream
from hisparse.worker.host_memory import HostMemory
from hisparse.worker.host_order import HostOrder
from hisparse.worker.shared_pool import HostWrites
from hisparse.worker.stream import CopyEvent, CopyStream
from hisparse.worker.views import BlockCopies

NUM_EVENTS = 32
"""Copies into the pool that rank 0 may be ahead of its slowest peer."""

Exchange = Callable[["EventHandles | None"], "EventHandles"]
"""Called once by every rank: rank 0 gives what all get; the others give None."""


@dataclass(frozen=True, slots=True)
class EventHandles:
    """Rank 0's events as other processes open them, and the index of the device that they belong to."""

    device_index: int
    handles: tuple[bytes, ...]


class CudaPoolSharing:
    """`PoolSharing` between processes that compute on GPUs of one node, on the same one or on one each."""

    def __init__(self, fd: int, order: HostOrder, device: torch.device, exchange: Exchange) -> None:
        """`fd`: the pool's file, whole pages of it; it stays the caller's. `device`: this rank's."""
        self._fd = fd
        self._order = order
        self._device = torch.empty(0, device=device).device
        self._exchange = exchange

    def allocate_host(self, num_bytes: int) -> HostMemory:
        index = self._device.index
        node = None
        # Where pages lie is decided by who asks for them first; peers have no wish of their own.
        if self._order.is_writer and len(numa.nodes()) > 1:
            node = numa.node_of_device(driver.bus_id(index))
        return PinnedMapping(PinRequest(num_bytes, index, node, file=self._fd))

    def host_writes(self, stream: CopyStream) -> HostWrites:
        if not isinstance(stream, CudaStream):
            raise InvariantError(f"a pool of GPU processes has no use for a {type(stream).__name__}")
        if self._order.is_writer:
            events = make_events(self._device)
            self._exchange(handles_of(events, self._device))
            return CudaHostWriter(stream, self._order, events)
        handles = self._exchange(None)
        writer_device = torch.device("cuda", handles.device_index)
        relay = torch.cuda.Stream(writer_device) if writer_device != self._device else None
        return CudaHostReader(stream, self._order, open_events(handles), relay)


def make_events(device: torch.device) -> tuple[torch.cuda.Event, ...]:
    """Rank 0's ring of events."""
    with torch.cuda.device(device):
        return tuple(torch.cuda.Event(interprocess=True) for _ in range(NUM_EVENTS))


def handles_of(events: Sequence[torch.cuda.Event], device: torch.device) -> EventHandles:
    """What `open_events` takes in another process. They are made on `device`."""
    with torch.cuda.device(device):
        return EventHandles(device.index, tuple(bytes(event.ipc_handle()) for event in events))


def open_events(handles: EventHandles) -> tuple[torch.cuda.Event, ...]:
    """Rank 0's events, in another process that sees rank 0's device under the same index."""
    device = torch.device("cuda", handles.device_index)
    return tuple(torch.cuda.Event.from_ipc_handle(device, handle) for handle in handles.handles)


class CudaHostWriter:
    """Rank 0 on a GPU. `events`: the ring, that of copy n being `n % len(events)`."""

    is_writer = True

    def __init__(self, stream: CudaStream, order: HostOrder, events: Sequence[torch.cuda.Event]) -> None:
        self._stream = stream
        self._order = order
        self._events = events
        self._count = 0

    def submit(self, copies: BlockCopies) -> CopyEvent:
        # The last copy that was marked by the event at hand must not need it any more.
        self._order.wait_acknowledged(self._count - len(self._events) + 1)
        done = self._stream.submit(copies)
        self._events[self._count % len(self._events)].record(self._stream.stream)
        self._count += 1
        self._order.publish(self._count)
        return done


class CudaHostReader:
    """A peer on a GPU. `events`: rank 0's ring, opened here.

    `relay`: a stream of this process on rank 0's GPU, where this rank has another one. The driver crashes where a
    stream waits for another process's event of another GPU; what waits on that GPU can be waited for anywhere.
    """

    is_writer = False

    def __init__(
        self,
        stream: CudaStream,
        order: HostOrder,
        events: Sequence[torch.cuda.Event],
        relay: torch.cuda.Stream | None = None,
    ) -> None:
        self._stream = stream
        self._order = order
        self._events = events
        self._relay = relay
        self._count = 0

    def submit(self, copies: BlockCopies) -> CopyEvent:
        self._order.wait_published(self._count + 1)
        (self._relay or self._stream.stream).wait_event(self._events[self._count % len(self._events)])
        self._count += 1
        self._order.acknowledge(self._count)
        if self._relay is not None:
            self._stream.stream.wait_stream(self._relay)
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return self._stream.submit(BlockCopies(copies.source, copies.destination, none, none))
