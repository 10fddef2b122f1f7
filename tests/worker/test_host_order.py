"""The one number that ranks share: it only grows, by one, and whoever waits for it in vain says for whom."""

import os
import threading
from collections.abc import Iterator

import pytest

from hisparse.errors import BackendError, InvariantError
from hisparse.worker.host_order import HostOrder, create_shared_file

SOON = 0.05
PATIENT = 20.0


@pytest.fixture
def file() -> Iterator[int]:
    fd = HostOrder.create_file(3)
    yield fd
    os.close(fd)


def test_what_rank_0_published_is_what_its_peers_see(file: int) -> None:
    writer, peer = HostOrder(file, 0, 3), HostOrder(file, 2, 3)
    assert peer.num_published == 0
    for count in (1, 2, 3):
        writer.publish(count)
        assert peer.num_published == count
        peer.wait_published(count)


def test_a_peer_waits_until_the_copy_is_published(file: int) -> None:
    writer, peer = HostOrder(file, 0, 3), HostOrder(file, 1, 3, PATIENT)
    waiting = threading.Thread(target=peer.wait_published, args=(2,))
    waiting.start()
    writer.publish(1)
    waiting.join(SOON)
    assert waiting.is_alive()
    writer.publish(2)
    waiting.join(PATIENT)
    assert not waiting.is_alive()


def test_a_peer_that_waits_in_vain_names_the_copy(file: int) -> None:
    HostOrder(file, 0, 3).publish(1)
    with pytest.raises(BackendError, match=r"rank 0 did not write copy 2 into the host pool within 0.05 s"):
        HostOrder(file, 1, 3, SOON).wait_published(2)


def test_rank_0_waits_for_all_peers_and_names_the_slow_one(file: int) -> None:
    writer = HostOrder(file, 0, 3, SOON)
    writer.wait_acknowledged(0)
    HostOrder(file, 1, 3).acknowledge(4)
    HostOrder(file, 2, 3).acknowledge(3)
    writer.wait_acknowledged(3)
    with pytest.raises(BackendError, match="rank 2 did not take note of copy 4"):
        writer.wait_acknowledged(4)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_copies_are_published_one_by_one(file: int, count: int) -> None:
    writer = HostOrder(file, 0, 3)
    writer.publish(1)
    with pytest.raises(InvariantError, match=f"published copy {count} of the host pool after copy 1"):
        writer.publish(count)


def test_a_peer_publishes_nothing(file: int) -> None:
    with pytest.raises(InvariantError, match="rank 1 published"):
        HostOrder(file, 1, 3).publish(1)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_is_one_of_the_ranks(file: int, rank: int) -> None:
    with pytest.raises(InvariantError, match="is not one of 3"):
        HostOrder(file, rank, 3)


def test_a_shared_file_has_no_name_and_is_zero_at_first() -> None:
    fd = create_shared_file("test", 1000)
    try:
        assert os.fstat(fd).st_nlink == 0
        assert os.pread(fd, 2000, 0) == bytes(1000)
    finally:
        os.close(fd)


def test_a_file_larger_than_any_is_refused_and_not_kept() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(BackendError, match="make the host pool smaller"):
        create_shared_file("test", 1 << 63)
    assert set(os.listdir("/proc/self/fd")) == before
