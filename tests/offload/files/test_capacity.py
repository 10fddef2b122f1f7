"""A directory never holds more than its capacity, and what was read longest ago leaves first, over restarts too."""

import os
import threading
from pathlib import Path

import pytest

from hisparse.offload.files import FileTier
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
    assert tier.stats().used_bytes == num_bytes(tmp_path)
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


def test_a_smaller_capacity_takes_hold_at_the_next_store(tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path, blocks=20), IDENTITY)
    assert all(store(tier, key_of(number)) for number in range(20))
    tier.close()
    tier = FileTier(config(tmp_path, blocks=5), IDENTITY)
    assert store(tier, key_of(20))
    assert num_bytes(tmp_path) <= 5 * FILE_BYTES
    tier.close()


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
    assert all(store(two, key_of(number)) for number in range(100, 164))
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
