"""Pinned memory without a GPU: what is registered, what is undone, and what a refusal says. The driver is a fake."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from hisparse.errors import BackendError, InvariantError
from hisparse.worker.cuda import teardown
from hisparse.worker.cuda.host_memory import PinnedMapping, Pinning, PinRequest, chunks, pinning_advice, prefault
from hisparse.worker.host_memory import AnonymousMapping
from hisparse.worker.host_order import create_shared_file

CHUNK = 64 << 10


@dataclass
class FakeDriver:
    """Registers up to `limit` chunks; knows what is registered; `shift` moves the device's addresses."""

    limit: int = 1000
    shift: int = 0
    registered: dict[int, int] = field(default_factory=dict)
    devices: set[int] = field(default_factory=set)

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.registered) == self.limit:
            raise BackendError("pinning failed: out of memory")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def device_address(self, address: int) -> int:
        return address + self.shift

    @contextmanager
    def context(self, device_index: int) -> Iterator[None]:
        self.devices.add(device_index)
        yield

    def pinning(self) -> Pinning:
        return Pinning(self.register, self.unregister, self.device_address, self.context)


def request(num_bytes: int) -> PinRequest:
    return PinRequest(num_bytes, device_index=3, chunk_bytes=CHUNK)


def test_all_of_the_memory_is_registered_in_chunks_on_its_device() -> None:
    fake = FakeDriver()
    memory = PinnedMapping(request(5 * CHUNK + 100), fake.pinning())
    start = memory.storage.data_ptr()
    assert memory.storage.numel() == 5 * CHUNK + 100
    assert list(fake.registered) == [start + index * CHUNK for index in range(6)]
    assert sum(fake.registered.values()) == 5 * CHUNK + 4096, "whole pages are registered"
    assert fake.devices == {3}
    memory.release()


def test_release_undoes_every_registration_once() -> None:
    fake = FakeDriver()
    memory = PinnedMapping(request(3 * CHUNK), fake.pinning())
    memory.release()
    memory.release()
    assert not fake.registered
    with pytest.raises(InvariantError, match="after its release"):
        _ = memory.storage


def test_what_was_pinned_before_a_refusal_is_given_back() -> None:
    fake = FakeDriver(limit=2)
    with pytest.raises(BackendError, match=f"after {2 * CHUNK} of {4 * CHUNK} bytes"):
        PinnedMapping(request(4 * CHUNK), fake.pinning())
    assert not fake.registered


def test_a_device_with_addresses_of_its_own_is_refused() -> None:
    fake = FakeDriver(shift=4096)
    with pytest.raises(BackendError, match="unified addressing"):
        PinnedMapping(request(CHUNK), fake.pinning())
    assert not fake.registered


def test_an_exit_gives_back_what_nobody_released() -> None:
    fake = FakeDriver()
    memory = PinnedMapping(request(2 * CHUNK), fake.pinning())
    assert fake.registered
    assert teardown.run_all()
    assert not fake.registered
    memory.release()


@pytest.mark.parametrize("ended_at", range(4))
def test_a_process_that_ends_while_it_pins_gives_back_what_it_has_and_pins_no_more(ended_at: int) -> None:
    """It is told by another thread, or by a signal, while a chunk is being registered."""
    fake = FakeDriver()
    tried = 0

    def register(address: int, num_bytes: int) -> None:
        nonlocal tried
        tried += 1
        if tried == ended_at + 1:
            assert teardown.run_all()
            assert not fake.registered
        fake.register(address, num_bytes)

    with pytest.raises(BackendError, match=f"broken off after {(ended_at + 1) * CHUNK} bytes"):
        PinnedMapping(request(4 * CHUNK), Pinning(register, fake.unregister, fake.device_address, fake.context))
    assert tried == ended_at + 1
    assert not fake.registered


def test_a_low_limit_of_locked_memory_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert "ulimit -l unlimited" in pinning_advice("pinning failed", 1 << 30, 0)
    assert "65536 bytes" in pinning_advice("pinning failed", 1 << 30, 0)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "ulimit" not in pinning_advice("pinning failed", 1 << 30, 0)
    assert "make the host pool smaller" in pinning_advice("pinning failed", 1 << 30, 0)


def test_more_memory_than_there_is_is_one_clear_line() -> None:
    with pytest.raises(BackendError, match="make the host pool smaller"):
        PinnedMapping(request(1 << 60), FakeDriver().pinning())


def test_prefaulted_pages_are_in_memory_and_zero() -> None:
    mapping = AnonymousMapping(300 << 20)
    address = mapping.storage.data_ptr()
    before = resident_bytes()
    prefault(address, 300 << 20)
    assert resident_bytes() - before > 250 << 20
    assert not mapping.storage[:: 1 << 20].any()
    mapping.release()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_chunks_cover_an_allocation_once() -> None:
    assert list(chunks(10, 4)) == [(0, 4), (4, 4), (8, 2)]
    assert list(chunks(8, 4)) == [(0, 4), (4, 4)]


def test_a_shared_file_is_pinned_where_it_is_mapped_and_keeps_what_others_wrote() -> None:
    fake, fd = FakeDriver(), create_shared_file("test", 2 * CHUNK)
    try:
        os.pwrite(fd, b"theirs", CHUNK)
        memory = PinnedMapping(PinRequest(2 * CHUNK, device_index=3, chunk_bytes=CHUNK, file=fd), fake.pinning())
        assert bytes(memory.storage[CHUNK : CHUNK + 6].numpy()) == b"theirs"
        assert list(fake.registered) == [memory.storage.data_ptr() + start for start in (0, CHUNK)]
        memory.storage[0] = 7
        assert os.pread(fd, 1, 0) == bytes([7])
        memory.release()
        assert fake.registered == {}
        assert os.pread(fd, 6, CHUNK) == b"theirs", "one process threw away what is all processes'"
    finally:
        os.close(fd)
