"""A shared region is pinned row by row in chunks, and whatever happens everything is unpinned or reported."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hisparse.errors import BackendError, InputError
from hisparse.offload.pinning import PinnedRegion
from hisparse.offload.region import SharedRegion
from hisparse.worker.cuda import teardown
from hisparse.worker.cuda.host_memory import Pinning
from tests.offload.members import shared_folder

ROW_BYTES = 12288
NUM_BLOCKS = 7


@dataclass
class FakeDriver:
    """Registers up to `limit` chunks, and refuses to unregister those that lie `stuck` chunks from the start."""

    limit: int = 1000
    shift: int = 0
    stuck: set[int] = field(default_factory=set)
    registered: dict[int, int] = field(default_factory=dict)

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.registered) == self.limit:
            raise BackendError("pinning failed: out of memory")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        if address in self.stuck:
            raise BackendError("unpinning failed: not permitted")
        del self.registered[address]

    @contextmanager
    def context(self, device_index: int) -> Iterator[None]:
        assert device_index == 3
        yield

    def pinning(self) -> Pinning:
        return Pinning(self.register, self.unregister, lambda address: address + self.shift, self.context)


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    with shared_folder() as folder:
        found = SharedRegion.create("one", NUM_BLOCKS, ROW_BYTES, directory=Path(folder))
        yield found
        assert found.close() == (), "nothing of a region is in use after it was unpinned"


def pin(region: SharedRegion, fake: FakeDriver, chunk_bytes: int = 2 * ROW_BYTES + 1) -> PinnedRegion:
    return PinnedRegion(region, 3, fake.pinning(), chunk_bytes)


def test_chunks_are_whole_rows_and_cover_them_all(region: SharedRegion) -> None:
    fake = FakeDriver()
    pinned = pin(region, fake)
    assert fake.registered == {
        region.address + first * ROW_BYTES: min(2, NUM_BLOCKS - first) * ROW_BYTES for first in range(0, NUM_BLOCKS, 2)
    }
    assert pinned.num_chunks == 4
    assert pinned.release() == ()
    assert pinned.release() == ()
    assert not fake.registered


def test_what_was_pinned_before_a_refusal_is_given_back(region: SharedRegion) -> None:
    fake = FakeDriver(limit=2)
    with pytest.raises(BackendError, match=f"after {4 * ROW_BYTES} of {7 * ROW_BYTES} bytes"):
        pin(region, fake)
    assert not fake.registered


def test_a_device_with_addresses_of_its_own_is_refused(region: SharedRegion) -> None:
    fake = FakeDriver(shift=4096)
    with pytest.raises(BackendError, match="unified addressing"):
        pin(region, fake)
    assert not fake.registered


def test_chunks_that_hold_no_row_are_refused(region: SharedRegion) -> None:
    with pytest.raises(InputError, match="chunks of 12287 bytes hold no row of 12288 bytes"):
        pin(region, FakeDriver(), ROW_BYTES - 1)


def test_release_goes_on_after_a_failure_and_reports_it(region: SharedRegion) -> None:
    fake = FakeDriver(stuck={region.address})
    (problem,) = pin(region, fake).release()
    assert problem == f"a chunk at {region.address:#x} stays pinned: unpinning failed: not permitted"
    assert list(fake.registered) == [region.address]


def test_a_process_that_ends_unpins(region: SharedRegion) -> None:
    fake = FakeDriver()
    pinned = pin(region, fake)
    assert teardown.run_all(seconds=5)
    assert not fake.registered
    assert pinned.release() == ()
