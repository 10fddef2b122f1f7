"""Ranks that share a host pool: one writes, all read what was written, and nobody reads before it was."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import InvariantError
from hisparse.geometry import BlockGeometry
from hisparse.protocol import DeviceBlockId, Direction, HostBlockId, PageCopy, SparseKVPageTransfer, TransferId
from hisparse.worker import CopyDelay, CpuStream, PagedCacheView, TransferEngine
from hisparse.worker.host_order import HostOrder, create_shared_file
from hisparse.worker.shared_pool import CpuPoolSharing
from hisparse.worker.views import all_layers
from tests.worker.world import World, make_plan

NUM_BLOCKS = 7
NUM_RANKS = 3
GEOMETRY = BlockGeometry(1, 1, 16, 16)
LAYOUT = all_layers(GEOMETRY, NUM_BLOCKS)
POOL_BYTES = NUM_BLOCKS * GEOMETRY.block_stride
SOON, PATIENT = 0.05, 20.0


class Heedless(HostOrder):
    """A peer that waits for nobody."""

    @property
    def num_published(self) -> int:
        return 1 << 40

    def wait_published(self, count: int) -> None:
        pass


class Rank:
    """A rank with a slab of its own, all of which hold the same, and the pool of all."""

    def __init__(self, rank: int, files: tuple[int, int], delay: int, order: type[HostOrder] = HostOrder) -> None:
        sharing = CpuPoolSharing(files[0], order(files[1], rank, NUM_RANKS, PATIENT))
        self.stream = CpuStream(CopyDelay(rank, delay))
        self.host = PagedCacheView.over(sharing.allocate_host(POOL_BYTES).storage, LAYOUT)
        self.slab = PagedCacheView.over(torch.zeros(POOL_BYTES, dtype=torch.uint8), LAYOUT)
        writes = sharing.host_writes(self.stream)
        self.transfers = TransferEngine(self.stream, self.slab, self.host, GEOMETRY, writes)

    def compute(self, block: int, value: int) -> None:
        """Write a page of the slab, as a forward pass does."""
        self.stream.order_before_compute()
        self.slab.rows(torch.uint8)[block] = value

    def read(self, view: PagedCacheView, block: int) -> int:
        row = view.rows(torch.uint8)[block]
        assert int(row.min()) == int(row.max()), "half a page"
        return int(row[0, 0])


class Ranks:
    """All ranks, told the same. What ought to be where: `device[d]` and `host[h]`, 0 for nothing."""

    def __init__(self, delays: tuple[int, ...], peers: type[HostOrder] = HostOrder) -> None:
        self._files = (create_shared_file("test", POOL_BYTES), HostOrder.create_file(NUM_RANKS))
        self.ranks = [Rank(rank, self._files, delay, peers if rank else HostOrder) for rank, delay in enumerate(delays)]
        self.device, self.host = [0] * NUM_BLOCKS, [0] * NUM_BLOCKS
        self._open: dict[TransferId, tuple[int, set[int]]] = {}
        self._ids, self._values = 0, 0

    def close(self) -> None:
        for fd in self._files:
            os.close(fd)

    def is_busy(self, host: int) -> bool:
        """Whether some rank may still read or write a host block: then nobody lends it."""
        return any(block == host for block, _ in self._open.values())

    def transfer(self, direction: Direction, device: int, host: int) -> None:
        self._ids += 1
        copy = PageCopy(DeviceBlockId(device), HostBlockId(host))
        transfer = SparseKVPageTransfer(TransferId(self._ids), direction, (copy,))
        self._open[transfer.transfer_id] = (host, set())
        for rank in reversed(self.ranks):
            rank.transfers.enqueue((transfer,))
            assert rank.transfers.take_enqueued() == (transfer.transfer_id,)

    def spill(self, device: int, host: int) -> None:
        self.transfer(Direction.DEVICE_TO_HOST, device, host)
        self.host[host] = self.device[device]

    def restore(self, host: int, device: int) -> None:
        self.transfer(Direction.HOST_TO_DEVICE, device, host)
        self.device[device] = self.host[host]

    def poll(self, rank: int) -> None:
        """Never waits for another rank, or the test would not end."""
        for transfer_id in self.ranks[rank].transfers.poll():
            _, done = self._open[transfer_id]
            done.add(rank)
            if len(done) == NUM_RANKS:
                del self._open[transfer_id]

    def compute(self, device: int) -> None:
        self._values = self._values % 255 + 1
        for rank in self.ranks:
            rank.compute(device, self._values)
        self.device[device] = self._values

    def assert_as_told(self) -> None:
        for number, rank in enumerate(self.ranks):
            rank.stream.order_before_compute()
            for block in range(1, NUM_BLOCKS):
                assert rank.read(rank.slab, block) == self.device[block], f"rank {number}, device block {block}"
                assert rank.read(rank.host, block) == self.host[block], f"rank {number}, host block {block}"


blocks = st.integers(1, NUM_BLOCKS - 1)
actions = st.one_of(
    st.tuples(st.just("spill"), blocks, blocks),
    st.tuples(st.just("restore"), blocks, blocks),
    st.tuples(st.just("compute"), blocks, blocks),
    st.tuples(st.just("poll"), st.integers(0, NUM_RANKS - 1), blocks),
    st.tuples(st.just("look"), blocks, blocks),
)


@given(delays=st.tuples(*[st.integers(0, 4)] * NUM_RANKS), told=st.lists(actions, max_size=60))
def test_whatever_ranks_are_told_and_however_late_they_are_all_see_the_same(
    delays: tuple[int, ...], told: list[tuple[str, int, int]]
) -> None:
    ranks = Ranks(delays)
    try:
        for action, first, second in told:
            if action == "spill" and not ranks.is_busy(second):
                ranks.spill(first, second)
            elif action == "restore" and not ranks.is_busy(first):
                ranks.restore(first, second)
            elif action == "compute":
                ranks.compute(first)
            elif action == "poll":
                ranks.poll(first)
            elif action == "look":
                ranks.assert_as_told()
        ranks.assert_as_told()
        for _ in range(10 * (1 + len(told))):  # one after the other is waited for
            for rank in range(NUM_RANKS):
                ranks.poll(rank)
        assert not any(ranks.is_busy(block) for block in range(NUM_BLOCKS)), "a transfer was never seen to be done"
    finally:
        ranks.close()


@pytest.fixture
def spilling() -> Iterator[Ranks]:
    """Device block 1 was spilled to host block 2 in all ranks; rank 0 is late with it."""
    ranks = Ranks((3, 0, 0))
    ranks.compute(1)
    ranks.spill(1, 2)
    yield ranks
    ranks.close()


def test_a_peer_copies_nothing_and_counts_nothing(spilling: Ranks) -> None:
    writer, peer = spilling.ranks[:2]
    peer.slab.rows(torch.uint8)[1] = 99  # no peer's bytes are wanted
    spilling.device[1] = 0
    writer.stream.synchronize()
    peer.stream.synchronize()
    assert peer.read(peer.host, 2) == 1
    assert writer.transfers.device_to_host_bytes == GEOMETRY.payload_bytes
    assert peer.transfers.device_to_host_bytes == 0


def test_a_peer_acknowledges_a_write_once_rank_0_has_made_it_and_not_before(spilling: Ranks) -> None:
    writer, peer = spilling.ranks[:2]
    assert [peer.transfers.poll() for _ in range(5)] == [()] * 5
    writer.stream.synchronize()
    assert peer.transfers.poll() == (1,)


def test_what_a_peer_computes_waits_for_the_write(spilling: Ranks) -> None:
    writer, peer = spilling.ranks[:2]
    waiting = threading.Thread(target=peer.stream.order_before_compute)
    waiting.start()
    waiting.join(SOON)
    assert waiting.is_alive()
    writer.stream.order_before_compute()
    waiting.join(PATIENT)
    assert not waiting.is_alive()
    assert peer.read(peer.host, 2) == 1


def test_a_restore_behind_a_write_does_not_overtake_it_on_a_peer(spilling: Ranks) -> None:
    spilling.restore(2, 3)
    writer, peer = spilling.ranks[:2]
    assert [peer.transfers.poll() for _ in range(5)] == [()] * 5
    assert peer.read(peer.slab, 3) == 0
    writer.stream.order_before_compute()
    assert peer.transfers.poll() == (1, 2)
    assert peer.read(peer.slab, 3) == 1


def test_control_a_peer_that_does_not_wait_reads_what_was_there_before() -> None:
    ranks = Ranks((3, 0, 0), peers=Heedless)
    try:
        ranks.compute(1)
        ranks.spill(1, 2)
        ranks.ranks.reverse()  # peers look first
        with pytest.raises(AssertionError, match="rank 0, host block 2"):
            ranks.assert_as_told()
    finally:
        ranks.close()


def test_a_pool_of_cpu_processes_takes_a_stream_of_the_cpu_only() -> None:
    sharing = CpuPoolSharing(0, HostOrder(0, 0, 1))
    with pytest.raises(InvariantError, match="no use for a object"):
        sharing.host_writes(object())  # type: ignore[arg-type]


def test_two_workers_over_one_pool_occupy_it_once_and_read_each_page_that_rank_0_spilled() -> None:
    plan = make_plan()
    files = (create_shared_file("test", plan.num_host_blocks * plan.host.block_stride), HostOrder.create_file(2))
    worlds = [World(plan=plan, sharing=CpuPoolSharing(files[0], HostOrder(files[1], rank, 2))) for rank in (0, 1)]
    try:
        for world in worlds:
            world.admit_on_host(slot=1, num_pages=5)
        for world in worlds:
            world.assert_decodes(1, [0, 3, 9, 15])
        writer, peer = (world.worker for world in worlds)
        assert torch.equal(writer.host_pool.storage, peer.host_pool.storage)
        assert writer.host_pool.physical_bytes == peer.host_pool.physical_bytes
        occupied = os.fstat(files[0]).st_blocks * 512
        assert 0 < occupied <= writer.host_pool.physical_bytes + os.sysconf("SC_PAGESIZE")
        assert writer.counters()["device_to_host_bytes"] > peer.counters()["device_to_host_bytes"] == 0
    finally:
        for world in worlds:
            world.worker.close()
        for fd in files:
            os.close(fd)
