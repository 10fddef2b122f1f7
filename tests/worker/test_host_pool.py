"""The host pool: how much it holds, and how it ends."""

import logging
import os
import weakref

import pytest
import torch

from hisparse.errors import BackendError, InputError, InvariantError
from hisparse.geometry import RowFormat, host_blocks
from hisparse.worker import HostPool, host_pool_bytes
from hisparse.worker.host_memory import AnonymousMapping, SharedMapping
from hisparse.worker.host_order import create_shared_file

GEOMETRY = host_blocks(RowFormat("float32", 48), num_layers=2, block_size=4)


def test_capacity_counts_payload_and_physical_size_counts_alignment() -> None:
    with HostPool(GEOMETRY, 10, AnonymousMapping) as pool:
        assert pool.usable_bytes == 9 * 2 * 4 * 48
        assert pool.physical_bytes == 10 * 2 * 4 * 128
        assert pool.storage.numel() == pool.physical_bytes


def test_what_was_realised_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hisparse.worker.host_pool"), HostPool(GEOMETRY, 10, AnonymousMapping):
        pass
    assert caplog.messages == ["host pool: 3456 bytes usable in 9 blocks of 4 tokens, 10240 bytes of memory"]


def test_layers_are_views_of_one_allocation_at_offsets_of_their_own() -> None:
    with HostPool(GEOMETRY, 4, AnonymousMapping) as pool:
        for layer in range(2):
            pool.layer(layer).write(torch.tensor([5]), torch.full((1, 12), layer + 1.0))
        both = pool.pages().read(torch.tensor([8 + 1, 8 + 4 + 1]), torch.float32)
        assert torch.equal(both, torch.tensor([[1.0], [2.0]]).expand(2, 12))


def test_after_close_old_views_raise_and_new_ones_cannot_be_made() -> None:
    pool = HostPool(GEOMETRY, 4, AnonymousMapping)
    view = pool.layer(0)
    view.read(torch.tensor([5]), torch.float32)
    pool.close()
    pool.close()
    with pytest.raises(InvariantError, match="host pool was closed"):
        view.read(torch.tensor([5]), torch.float32)
    with pytest.raises(InvariantError, match="host pool was closed"):
        view.write(torch.tensor([5]), torch.ones(1, 12))
    with pytest.raises(InvariantError, match="host pool was closed"):
        pool.layer(0)


def test_close_unmaps_the_memory() -> None:
    memory = AnonymousMapping(1 << 16)
    mapping = weakref.ref(memory._mapping)
    pool = HostPool(GEOMETRY, 4, lambda _: memory)
    view = pool.layer(0)
    view.write(torch.tensor([5]), torch.ones(1, 12))
    assert mapping() is not None
    pool.close()
    assert mapping() is None, "a view kept the memory"


def test_a_tensor_that_outlives_the_pool_reads_zeros_and_does_not_crash() -> None:
    pool = HostPool(GEOMETRY, 4, AnonymousMapping)
    stray = pool.storage
    stray.fill_(1)
    pool.close()
    assert int(stray.count_nonzero()) == 0


def test_released_memory_is_not_given_out() -> None:
    memory = AnonymousMapping(4096)
    memory.release()
    memory.release()
    with pytest.raises(InvariantError, match="after its release"):
        _ = memory.storage


def test_memory_that_cannot_be_had_names_the_amount_and_the_fix() -> None:
    with pytest.raises(BackendError, match=rf"cannot map {1 << 60} bytes .* make the host pool smaller"):
        AnonymousMapping(1 << 60)


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(InvariantError, match="beside the null block"):
        HostPool(GEOMETRY, 1, AnonymousMapping)


@pytest.mark.parametrize(("gib", "num_bytes"), [(1, 1 << 30), (0.5, 1 << 29), (64.0, 64 << 30)])
def test_host_pool_gib_is_payload_in_bytes(gib: float, num_bytes: int) -> None:
    assert host_pool_bytes(gib) == num_bytes


@pytest.mark.parametrize("gib", [0, -1, float("nan"), float("inf"), 1e-12])
def test_a_host_pool_that_is_no_positive_size_is_refused(gib: float) -> None:
    with pytest.raises(InputError, match="GiB is not a size"):
        host_pool_bytes(gib)


def test_a_shared_mapping_is_the_file_and_outlives_its_descriptor() -> None:
    fd = create_shared_file("test", 8192)
    mine, theirs = SharedMapping(fd, 8192), SharedMapping(fd, 8192)
    os.close(fd)
    mine.storage[5000] = 9
    assert int(theirs.storage[5000]) == 9
    mine.release()
    mine.release()
    assert int(theirs.storage[5000]) == 9
    with pytest.raises(InvariantError, match="after its release"):
        _ = mine.storage


def test_a_shared_mapping_that_cannot_be_had_names_the_amount_and_the_fix() -> None:
    fd = create_shared_file("test", 4096)
    with pytest.raises(BackendError, match=r"cannot map 8192 bytes of shared memory .* make the host pool smaller"):
        SharedMapping(fd, 8192)
    os.close(fd)
