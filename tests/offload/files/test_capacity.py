"""A directory never holds more than its capacity, and what was read longest ago leaves first, over restarts too."""

import errno
import os
import threading
from pathlib import Path

import pytest

from hisparse.offload.files import FileTier
from hisparse.offload.files.capacity import Capacity
from tests.offload.files.driven import DrivenFileSystem
from tests.offload.files.world import (
    FILE_BYTES,
    IDENTITY,
    OTHER,
    aligned,
    block_file,
    config,
    key_of,
    loads,
    namespace,
    row_of,
    store,
    wait_for_scans,
)


def held(root: Path, *numbers: int) -> list[int]:
    return [number for number in numbers if block_file(root, key_of(number)).exists()]


def num_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and path.suffix in {".kv", ".bad"})


def test_the_block_that_was_read_longest_ago_leaves_over_restarts(tmp_path: Path) -> None:
    def tier() -> FileTier:
        return FileTier(config(tmp_path, blocks=4), IDENTITY, touch_after_ns=0)

    now = tier()
    for number in range(4):
        assert store(now, key_of(number))
        os.utime(block_file(tmp_path, key_of(number)), (1000 + number, 1000 + number))
    now.close()
    now = tier()
    assert loads(now, key_of(0))
    now.close()
    now = tier()
    assert store(now, key_of(4))
    assert held(tmp_path, 0, 1, 2, 3, 4) == [0, 2, 3, 4]
    assert loads(now, key_of(2))
    assert store(now, key_of(5))
    assert held(tmp_path, 0, 2, 3, 4, 5) == [0, 2, 4, 5]
    assert now.stats().evicted == 2
    now.close()


def test_a_read_renews_a_block_only_once_it_is_old(tmp_path: Path) -> None:
    filesystem = DrivenFileSystem()
    tier = FileTier(config(tmp_path), IDENTITY, filesystem)
    assert store(tier, key_of(1))
    assert loads(tier, key_of(1))
    assert "touch" not in filesystem.calls
    os.utime(block_file(tmp_path, key_of(1)), (1, 1))
    assert loads(tier, key_of(1))
    assert loads(tier, key_of(1))
    assert filesystem.calls.count("touch") == 1
    tier.close()


def test_the_capacity_holds_at_every_write(tmp_path: Path) -> None:
    most = 0

    def note(number: int, name: str, arguments: tuple[object, ...]) -> None:
        nonlocal most
        if name == "rename":
            most = max(most, num_bytes(tmp_path))

    tier = FileTier(config(tmp_path, blocks=8), IDENTITY, DrivenFileSystem(after=note))
    assert all(store(tier, key_of(number)) for number in range(40))
    assert 7 * FILE_BYTES <= most <= 8 * FILE_BYTES
    wait_for_scans(tier)
    # What a scan counted just before it was evicted is known to be gone later.
    assert num_bytes(tmp_path) <= tier.stats().used_bytes <= num_bytes(tmp_path) + FILE_BYTES
    tier.close()


def test_the_capacity_holds_with_many_threads(tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path, blocks=40, threads=4), IDENTITY)
    row = aligned(row_of(key_of(0)))
    transfers = [tier.store(key_of(number), row) for number in range(300)]
    assert sum(transfer.result(30) for transfer in transfers) > 250
    assert num_bytes(tmp_path) <= 40 * FILE_BYTES
    tier.close()


def test_blocks_of_a_model_that_nobody_runs_leave_first(tmp_path: Path) -> None:
    other = FileTier(config(tmp_path, blocks=6), OTHER)
    assert all(store(other, key_of(number)) for number in range(6))
    other.close()
    tier = FileTier(config(tmp_path, blocks=6), IDENTITY)
    assert all(store(tier, key_of(number)) for number in range(6))
    assert held(tmp_path, *range(6)) == list(range(6))
    assert list(namespace(tmp_path, OTHER).glob("??/*.kv")) == []
    assert (namespace(tmp_path, OTHER) / "identity.json").exists()
    tier.close()


def test_a_smaller_capacity_takes_hold_as_blocks_are_stored_and_never_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store makes room for two: so a tier that was given too little by mistake costs no more than it brings."""
    for identity, numbers in ((OTHER, range(10)), (IDENTITY, range(10, 20))):
        tier = FileTier(config(tmp_path, blocks=20), identity)
        assert all(store(tier, key_of(number)) for number in numbers)
        tier.close()
    tiers = [FileTier(config(tmp_path, blocks=5), identity) for identity in (IDENTITY, OTHER)]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} holds {20 * FILE_BYTES} bytes of KV, more than its capacity of {5 * FILE_BYTES} "
        "(--offload-capacity): nothing is removed at once, but what is stored from now on makes room for twice its "
        "size, until that fits"
    ]
    assert num_bytes(tmp_path) == 20 * FILE_BYTES
    for number in range(20, 40):
        assert store(tiers[0], key_of(number))
        assert num_bytes(tmp_path) == max(5, 20 - (number - 19)) * FILE_BYTES
    assert held(tmp_path, *range(40)) == [35, 36, 37, 38, 39]
    for tier in tiers:
        tier.close()


def test_a_tier_with_a_smaller_capacity_beside_a_larger_one_removes_twice_what_it_stores_at_most(
    tmp_path: Path,
) -> None:
    large, small = FileTier(config(tmp_path, blocks=200), IDENTITY), FileTier(config(tmp_path, blocks=5), OTHER)
    assert all(store(large, key_of(number)) for number in range(100))
    for number in range(20):
        assert store(small, key_of(number))
        wait_for_scans(small)
    # It learnt of the others while it stored; before that nothing was over its capacity.
    assert 100 - 2 * 20 <= len(held(tmp_path, *range(100))) < 100
    large.close()
    small.close()


def test_while_a_scan_hangs_stores_loads_and_closing_go_on(tmp_path: Path) -> None:
    scans, let_go = threading.Event(), threading.Event()

    def hang(number: int, name: str, arguments: tuple[object, ...]) -> None:
        if name == "list_directory":
            scans.set()
            let_go.wait(30)

    filesystem = DrivenFileSystem()
    tier = FileTier(config(tmp_path, blocks=8), IDENTITY, filesystem)
    filesystem.before = hang
    assert all(store(tier, key_of(number)) for number in range(40))
    assert scans.wait(10)
    assert held(tmp_path, *range(40)) == list(range(32, 40))
    assert all(loads(tier, key_of(number)) for number in range(32, 40))
    assert threading.active_count() > 1
    assert tier.close(5)
    let_go.set()


def test_what_is_stored_while_a_scan_lasts_is_counted_once(tmp_path: Path) -> None:
    listed, let_go = threading.Event(), threading.Event()

    def hang(number: int, name: str, arguments: tuple[object, ...]) -> None:
        """At what a scan looks at last, when it has seen all blocks."""
        if name == "status" and str(arguments[0]).endswith("quarantine"):
            listed.set()
            let_go.wait(30)

    filesystem = DrivenFileSystem()
    tier = FileTier(config(tmp_path, blocks=64), IDENTITY, filesystem)
    filesystem.before = hang
    assert all(store(tier, key_of(number)) for number in range(3))
    assert listed.wait(10)
    assert all(store(tier, key_of(number)) for number in range(3, 14))
    let_go.set()
    wait_for_scans(tier)
    assert tier.stats().used_bytes == num_bytes(tmp_path) == 14 * FILE_BYTES
    tier.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_whenever_a_scan_comes_between_no_byte_that_is_there_goes_uncounted(
    when: str, fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside each call of stores that evict, in turn, as far as there are calls."""
    monkeypatch.setattr(Capacity, "request_scan", lambda capacity: None)
    num_scans = 0
    for number in range(1000):
        filesystem, root = DrivenFileSystem(), fast_path / str(number)
        tier = FileTier(config(root, blocks=4), IDENTITY, filesystem)
        capacity = tier._directories[0].capacity
        assert all(store(tier, key_of(block)) for block in range(4))
        first = len(filesystem.calls)
        scans: list[int] = []

        def scan(
            at: int,
            name: str,
            arguments: tuple[object, ...],
            capacity: Capacity = capacity,
            this: int = first + number,
            scans: list[int] = scans,
        ) -> None:
            if at == this:
                scans.append(at)
                capacity.scan()

        setattr(filesystem, when, scan)
        for block in range(4, 8):
            assert store(tier, key_of(block))
            assert num_bytes(root) <= capacity.used_bytes
            assert num_bytes(root) <= 4 * FILE_BYTES
        tier.close()
        num_scans += len(scans)
        if first + number >= len(filesystem.calls):
            break
    assert num_scans > 20


@pytest.mark.parametrize("call", ["list_directory", "status"])
def test_a_scan_that_fails_costs_no_store(call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(number: int, name: str, arguments: tuple[object, ...]) -> None:
        if name == call and threading.current_thread().name.startswith("hisparse-scan"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    filesystem = DrivenFileSystem()
    tier = FileTier(config(tmp_path, blocks=8), IDENTITY, filesystem)
    filesystem.before = fail
    assert all(store(tier, key_of(number)) for number in range(40))
    assert held(tmp_path, *range(40)) == list(range(32, 40))
    tier.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot count what {tmp_path} holds: [Errno {errno.EIO}] Input/output error"
    ]


def test_what_is_set_aside_counts_and_is_never_evicted(tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path, blocks=2), IDENTITY)
    for number in (1, 2):
        assert store(tier, key_of(number))
        os.truncate(block_file(tmp_path, key_of(number)), FILE_BYTES - 1)
        assert not loads(tier, key_of(number))
    assert not store(tier, key_of(3))
    assert len(list((namespace(tmp_path) / "quarantine").iterdir())) == 2
    tier.close()


def test_a_foreign_file_under_a_blocks_name_is_not_evicted(tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path, blocks=2), IDENTITY)
    tier.close()
    foreign = block_file(tmp_path, key_of(9))
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(b"x" * FILE_BYTES)
    os.utime(foreign, (1, 1))
    tier = FileTier(config(tmp_path, blocks=2), IDENTITY)
    assert all(store(tier, key_of(number)) for number in range(5))
    assert foreign.read_bytes() == b"x" * FILE_BYTES
    tier.close()


def test_what_another_tier_wrote_is_counted_before_long(tmp_path: Path) -> None:
    one, two = (FileTier(config(tmp_path, blocks=64), IDENTITY) for _ in range(2))
    assert all(store(one, key_of(number)) for number in range(64))
    for number in range(100, 164):
        assert store(two, key_of(number))
        wait_for_scans(two)
    assert num_bytes(tmp_path) <= (64 + 2 * 3) * FILE_BYTES
    one.close()
    two.close()


@pytest.mark.parametrize("num_tiers", [2])
def test_tiers_that_evict_at_once_never_serve_wrong_bytes(num_tiers: int, tmp_path: Path) -> None:
    """Each load is compared inside `loads`; a block that was evicted under it is a miss."""
    tiers = [FileTier(config(tmp_path, blocks=10, threads=2), IDENTITY, touch_after_ns=0) for _ in range(num_tiers)]
    hits = []

    def use(tier: FileTier, seed: int) -> None:
        for step in range(80):
            key = key_of((step * 7 + seed) % 16)
            if not loads(tier, key):
                store(tier, key)
            else:
                hits.append(step)

    threads = [threading.Thread(target=use, args=(tier, 3 * seed)) for seed, tier in enumerate(tiers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert hits
    assert all(tier.stats().set_aside == 0 for tier in tiers)
    for tier in tiers:
        tier.close()
