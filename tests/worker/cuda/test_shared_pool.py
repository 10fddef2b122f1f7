"""A bounded ring of events marks any number of copies: every peer waits for the recording that is meant."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hisparse.errors import BackendError
from hisparse.worker.cuda.shared_pool import NUM_EVENTS, CudaHostReader, CudaHostWriter
from hisparse.worker.host_order import HostOrder
from hisparse.worker.views import BlockCopies, PagedCacheView, all_layers
from tests.worker.test_stream import GEOMETRY, NUM_BLOCKS

NUM_COPIES = 20 * NUM_EVENTS
PATIENT, SOON = 30.0, 0.05
VIEW = PagedCacheView.over(torch.zeros(NUM_BLOCKS * 16, dtype=torch.uint8), all_layers(GEOMETRY, NUM_BLOCKS))
ONE = BlockCopies(VIEW, VIEW, torch.tensor([1]), torch.tensor([2]))


class FakeEvent:
    """As CUDA's: a wait is for the latest recording that was made when it was asked for."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, stream: "FakeStream") -> None:
        self.recorded = stream.num_submitted


class FakeStream:
    """Counts copies. `waits`: for which copy each of a peer's copies waits."""

    def __init__(self) -> None:
        self.num_submitted = 0
        self.num_blocks = 0
        self.waits: list[int] = []

    @property
    def stream(self) -> "FakeStream":
        return self

    def submit(self, copies: BlockCopies) -> Any:
        self.num_submitted += 1
        self.num_blocks += int(copies.source_blocks.numel())
        return object()

    def wait_event(self, event: FakeEvent) -> None:
        self.waits.append(event.recorded)

    def wait_stream(self, other: "FakeStream") -> None:
        self.waits.append(other.waits[-1])


class Ring:
    """Rank 0, two peers, and the events between them. The second peer is on another GPU."""

    def __init__(self, order: type[HostOrder] = HostOrder, timeout_s: float = PATIENT) -> None:
        self.file = HostOrder.create_file(3)
        self.events: Any = [FakeEvent() for _ in range(NUM_EVENTS)]
        self.streams: Any = [FakeStream() for _ in range(3)]
        orders = [order(self.file, rank, 3, timeout_s) for rank in range(3)]
        self.writer = CudaHostWriter(self.streams[0], orders[0], self.events)
        self.relay: Any = FakeStream()
        self.readers = [
            CudaHostReader(self.streams[rank], orders[rank], self.events, relay)
            for rank, relay in ((1, None), (2, self.relay))
        ]


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring(timeout_s=SOON)
    yield ring
    os.close(ring.file)


def test_every_copy_is_waited_for_by_every_peer_however_many_there_are() -> None:
    ring = Ring()

    def take_all(rank: Any) -> None:
        for _ in range(NUM_COPIES):
            rank.submit(ONE)

    threads = [threading.Thread(target=take_all, args=(rank,)) for rank in (ring.writer, *ring.readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT)
    os.close(ring.file)
    waits = [stream.waits for stream in (*ring.streams, ring.relay)]
    assert waits == [[], *[list(range(1, NUM_COPIES + 1))] * 3]
    assert [stream.num_blocks for stream in ring.streams] == [NUM_COPIES, 0, 0]


def test_rank_0_is_no_further_ahead_of_its_slowest_peer_than_the_ring_is_long(ring: Ring) -> None:
    for _ in range(NUM_EVENTS):
        ring.writer.submit(ONE)
    for _ in range(3):
        ring.readers[0].submit(ONE)
    with pytest.raises(BackendError, match="rank 2 did not take note of copy 1"):
        ring.writer.submit(ONE)
    ring.readers[1].submit(ONE)
    ring.writer.submit(ONE)
    assert ring.streams[0].num_submitted == NUM_EVENTS + 1


def test_a_peer_takes_no_copy_that_rank_0_has_not_recorded(ring: Ring) -> None:
    with pytest.raises(BackendError, match="rank 0 did not write copy 1"):
        ring.readers[0].submit(ONE)
    assert ring.streams[1].waits == []


class Careless(HostOrder):
    """A rank 0 that does not look how far its peers are."""

    def wait_acknowledged(self, count: int) -> None:
        pass


def test_control_a_ring_that_is_reused_too_early_has_a_peer_wait_for_another_copy() -> None:
    ring = Ring(Careless)
    for _ in range(NUM_EVENTS + 1):
        ring.writer.submit(ONE)
    ring.readers[0].submit(ONE)
    os.close(ring.file)
    assert ring.streams[1].waits == [NUM_EVENTS + 1]
