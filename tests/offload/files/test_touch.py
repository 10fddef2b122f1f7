"""Of a prefix that was used the end leaves first, since its beginning is in more prompts than its end."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hisparse.offload.files import FileTier
from tests.offload.files.driven import DrivenFileSystem
from tests.offload.files.world import IDENTITY, aligned, block_file, config, key_of, row_of, store

CHAIN = range(10)
KEYS = [key_of(number) for number in CHAIN]


def times(root: Path, numbers: range = CHAIN) -> list[int]:
    return [block_file(root, key_of(number)).stat().st_mtime_ns for number in numbers]


def left_after(tier: FileTier, root: Path, num_stores: int) -> list[int]:
    """Those of the chain that are there once so many others were stored, by a later tick of the file system's clock."""
    time.sleep(0.02)
    assert all(store(tier, key_of(100 + number)) for number in range(num_stores))
    return [number for number in CHAIN if block_file(root, key_of(number)).exists()]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("touched", [True, False])
def test_of_a_chain_that_was_touched_the_end_leaves_first(restarts: bool, touched: bool, tmp_path: Path) -> None:
    """Control: of one that was not, the beginning, which was stored first."""
    tier = FileTier(config(tmp_path, blocks=10), IDENTITY)
    assert all(store(tier, key) for key in KEYS)
    if touched:
        tier.touch(KEYS)
    if restarts or touched:
        tier.close()
        tier = FileTier(config(tmp_path, blocks=10), IDENTITY)
    if not touched:
        # Files that were written within one tick of the clock have no order.
        for number in CHAIN:
            os.utime(block_file(tmp_path, key_of(number)), (1000 + number, 1000 + number))
        tier.close()
        tier = FileTier(config(tmp_path, blocks=10), IDENTITY)
    assert left_after(tier, tmp_path, 4) == ([0, 1, 2, 3, 4, 5] if touched else [4, 5, 6, 7, 8, 9])
    tier.close()


def test_a_running_tier_goes_by_it_at_once(tmp_path: Path) -> None:
    filesystem = DrivenFileSystem()
    tier = FileTier(config(tmp_path, blocks=10), IDENTITY, filesystem)
    assert all(store(tier, key) for key in KEYS)
    begun = threading.Event()
    done = threading.Semaphore(0)
    filesystem.after = lambda number, name, arguments: done.release() if name == "touch" else begun.set()
    tier.touch(KEYS)
    assert all(done.acquire(timeout=10) for _ in KEYS)
    assert left_after(tier, tmp_path, 4) == [0, 1, 2, 3, 4, 5]
    tier.close()


def test_the_chain_that_was_touched_last_is_the_younger_and_what_they_share_the_youngest(tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path), IDENTITY)
    assert all(store(tier, key) for key in KEYS)
    one, two = [0, 1, 2, 3, 4], [0, 1, 5, 6, 7]
    tier.touch([KEYS[number] for number in one])
    tier.touch([KEYS[number] for number in two])
    tier.close()
    ages = times(tmp_path)
    assert sorted(range(8), key=lambda number: ages[number]) == [4, 3, 2, 7, 6, 5, 1, 0]
    assert max(ages[8:]) < min(ages[:8])


def test_blocks_of_several_directories_keep_their_order(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    tier = FileTier(config(*roots), IDENTITY)
    assert all(store(tier, key) for key in KEYS)
    tier.touch(KEYS)
    tier.close()
    for root in roots:
        here = [number for number in CHAIN if block_file(root, key_of(number)).exists()]
        assert here
        ages = [block_file(root, key_of(number)).stat().st_mtime_ns for number in here]
        assert ages == sorted(ages, reverse=True)


def test_blocks_that_are_still_being_stored_get_their_place_when_they_are_there(tmp_path: Path) -> None:
    hangs, let_go = threading.Event(), threading.Event()

    def hang(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "write" and not hangs.is_set():
            hangs.set()
            let_go.wait(20)

    filesystem = DrivenFileSystem()
    tier = FileTier(config(tmp_path), IDENTITY, filesystem)
    assert all(store(tier, key) for key in KEYS[:5])
    filesystem.before = hang
    late = [tier.store(key, aligned(row_of(key))) for key in KEYS[5:]]
    assert hangs.wait(10)
    touched = threading.Semaphore(0)
    filesystem.after = lambda number, name, arguments: touched.release() if name == "touch" else None
    tier.touch(KEYS)
    assert all(touched.acquire(timeout=10) for _ in KEYS[:5])
    let_go.set()
    assert all(transfer.result(10) for transfer in late)
    tier.close()
    ages = times(tmp_path)
    assert ages == sorted(ages, reverse=True)
    assert len(set(ages)) == len(ages)


def test_what_is_not_there_or_cannot_be_touched_is_ignored(tmp_path: Path) -> None:
    def refuse(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "touch" and arguments[0].endswith(f"{KEYS[1].hex()}.kv"):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    tier = FileTier(config(tmp_path), IDENTITY, DrivenFileSystem(refuse))
    assert all(store(tier, key) for key in KEYS[:3])
    os.utime(block_file(tmp_path, KEYS[0]), (1, 1))
    tier.touch([])
    tier.touch(KEYS)
    assert tier.close()
    assert times(tmp_path, range(1))[0] > times(tmp_path, range(2, 3))[0] > 10**18
    tier.touch(KEYS)


def test_touching_waits_for_no_disk_and_closing_for_no_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse.offload.files.tier.MAX_TOUCHES", 3)
    hangs, let_go = threading.Event(), threading.Event()

    def hang(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "touch":
            hangs.set()
            let_go.wait(20)

    filesystem = DrivenFileSystem(hang)
    tier = FileTier(config(tmp_path), IDENTITY, filesystem)
    assert store(tier, KEYS[0])
    for _ in range(20):
        tier.touch(KEYS[:1])
    assert hangs.wait(10)
    assert store(tier, KEYS[1])
    tier.close(0.1)
    let_go.set()
    # One hung, two more were taken, and none of them is worth closing late.
    assert filesystem.calls.count("touch") == 1
