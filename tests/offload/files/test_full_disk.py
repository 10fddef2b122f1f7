"""A disk that is full, and directories that somebody empties, cost blocks and never the tier."""

import contextlib
import errno
import itertools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hisparse.offload.files import FileTier, Identity, LocalFileSystem
from hisparse.offload.files import capacity as capacity_module
from hisparse.offload.files.work_folder import sweep
from tests.offload.files.driven import DrivenFileSystem
from tests.offload.files.world import (
    FILE_BYTES,
    IDENTITY,
    OTHER,
    block_file,
    config,
    is_whole,
    key_of,
    loads,
    namespace,
    store,
    wait_for_scans,
)

CAPACITY_BLOCKS = 1000


class SmallDisk(DrivenFileSystem):
    """Has room for `num_blocks` blocks below `root`, whoever wrote them; what is over that meets `code`."""

    def __init__(self, root: Path, num_blocks: int, code: int = errno.ENOSPC) -> None:
        super().__init__(self._measure)
        self.root, self.num_blocks, self.code = root, num_blocks, code
        self.num_refused = 0

    def _measure(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name != "write":
            return
        used = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # evicted by another thread
                    used += os.lstat(os.path.join(folder, name)).st_size
        if used + sum(part.nbytes for part in arguments[1]) >= (self.num_blocks + 1) * FILE_BYTES:
            self.num_refused += 1
            raise OSError(self.code, os.strerror(self.code))


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(capacity_module, "_now", lambda: self.now)

    def wait(self) -> None:
        """Until more is tried than fitted."""
        self.now += capacity_module.FULL_S


def held(root: Path, numbers: range, identity: Identity = IDENTITY) -> list[int]:
    return [number for number in numbers if block_file(root, key_of(number), identity).exists()]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_disk_smaller_than_the_capacity_new_blocks_take_the_place_of_old_ones(
    code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SmallDisk(tmp_path, 20, code)
    tier = FileTier(config(tmp_path, blocks=CAPACITY_BLOCKS), IDENTITY, disk)
    assert all(store(tier, key_of(number)) for number in range(100))
    assert held(tmp_path, range(100))[-18:] == list(range(82, 100))
    # What fits was learnt: the disk is not tried with each of the eighty that came later.
    assert disk.num_refused == 1
    assert len(warnings(caplog)) == 1
    assert f"{tmp_path} is full ({os.strerror(code)})" in warnings(caplog)[0]
    tier.close()


def test_with_many_threads_too(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path, 20)
    tier = FileTier(config(tmp_path, blocks=CAPACITY_BLOCKS, threads=4), IDENTITY, disk)
    rows = [tier.store(key_of(number), bytes(8192)) for number in range(200)]
    assert all(row.result(30) for row in rows)
    assert len(held(tmp_path, range(200))) >= 12
    # Each thread met it once at most.
    assert 1 <= disk.num_refused <= 4
    tier.close()


def test_what_fits_is_tried_again_once_the_disk_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, disk = Clock(monkeypatch), SmallDisk(tmp_path, 20)
    tier = FileTier(config(tmp_path, blocks=64), IDENTITY, disk)
    assert all(store(tier, key_of(number)) for number in range(40))
    clock.wait()
    assert all(store(tier, key_of(number)) for number in range(40, 60))
    assert len(held(tmp_path, range(60))) <= 20
    # Full once when it filled up, and once when a little more was tried.
    assert disk.num_refused == 2
    disk.num_blocks = CAPACITY_BLOCKS
    sizes = []
    for number in range(60, 200):
        clock.now += 10
        assert store(tier, key_of(number))
        sizes.append(len(held(tmp_path, range(number + 1))))
    assert sizes[-1] == 64
    # Not all at once: two blocks more a minute.
    assert max(after - before for before, after in itertools.pairwise(sizes)) == 1
    assert sizes[30] < 40
    tier.close()


def test_a_disk_that_others_fill_costs_a_block_or_two_and_is_left_alone_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else whoever fills the disk would have the whole cache evicted in moments, for nothing."""
    disk = SmallDisk(tmp_path, CAPACITY_BLOCKS)
    tier = FileTier(config(tmp_path, blocks=CAPACITY_BLOCKS), IDENTITY, disk)
    assert all(store(tier, key_of(number)) for number in range(30))
    disk.num_blocks = 0
    assert not any(store(tier, key_of(number)) for number in range(30, 60))
    assert disk.num_refused == 2
    assert len(held(tmp_path, range(30))) >= 28
    assert len(warnings(caplog)) == 2
    assert warnings(caplog)[1].startswith(f"cannot keep KV in {tmp_path}: ")
    assert all(loads(tier, key_of(number)) for number in held(tmp_path, range(30)))
    tier.close()


def test_a_full_disk_with_nothing_of_ours_on_it_takes_nothing_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, disk = Clock(monkeypatch), SmallDisk(tmp_path, 5)
    tier = FileTier(config(tmp_path), IDENTITY, disk)
    mine = tmp_path / "mine"
    mine.write_bytes(bytes(6 * FILE_BYTES))
    assert not any(store(tier, key_of(number)) for number in range(3))
    assert mine.stat().st_size == 6 * FILE_BYTES
    mine.unlink()
    clock.wait()
    assert all(store(tier, key_of(number)) for number in range(5))
    tier.close()


def test_a_tier_that_evicts_nothing_does_so_on_a_full_disk_too(tmp_path: Path) -> None:
    """As for a conversion, whose source may lie in the same directory."""
    disk = SmallDisk(tmp_path, 10)
    tier = FileTier(config(tmp_path, blocks=CAPACITY_BLOCKS), IDENTITY, disk, evicts=False)
    assert [store(tier, key_of(number)) for number in range(15)] == [True] * 10 + [False] * 5
    assert held(tmp_path, range(15)) == list(range(10))
    tier.close()


def test_an_error_that_every_store_meets_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def read_only(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open" and arguments[0].endswith(".tmp"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    tier = FileTier(config(tmp_path), IDENTITY)
    tier.close()
    tier = FileTier(config(tmp_path), IDENTITY, DrivenFileSystem(read_only))
    assert not any(store(tier, key_of(number)) for number in range(20))
    assert warnings(caplog) == [f"cannot keep KV in {tmp_path}: [Errno {errno.EROFS}] Read-only file system"]
    tier.close()


# Directories that are emptied.


def empty(root: Path) -> None:
    for path in root.iterdir():
        shutil.rmtree(path)


def remove_lock_and_sweep(root: Path) -> None:
    """What is written from here on is nobody's, as others see it."""
    for path in (root / ".hisparse").glob("*.lock"):
        path.unlink()
    sweep(LocalFileSystem(), str(root))


REMOVALS: dict[str, Callable[[Path], None]] = {
    "everything in it": empty,
    "the directory itself": shutil.rmtree,
    "all that a shell's star names": lambda root: shutil.rmtree(namespace(root)),
    "the work folder": lambda root: shutil.rmtree(root / ".hisparse"),
    "the lock": remove_lock_and_sweep,
}


@pytest.mark.parametrize("removal", REMOVALS)
def test_a_tier_whose_directory_is_emptied_goes_on_with_a_new_one(
    removal: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "kv"
    tier = FileTier(config(root, blocks=20), IDENTITY)
    assert all(store(tier, key_of(number)) for number in range(10))
    REMOVALS[removal](root)
    assert all(store(tier, key_of(number)) for number in range(10, 50))
    assert all(loads(tier, key_of(number)) for number in held(root, range(10, 50)))
    assert len(held(root, range(50))) == 20
    if removal != "the lock":
        assert warnings(caplog) == [f"{root} was emptied while it was in use: it is begun anew"]
    assert Identity.from_json((namespace(root) / "identity.json").read_text()) == IDENTITY
    tier.close()
    assert list((root / ".hisparse").iterdir()) == []
    # The next one on it finds everything as it should be.
    again = FileTier(config(root, blocks=20), IDENTITY)
    assert all(loads(again, key_of(number)) for number in held(root, range(50)))
    again.close()


def test_while_a_new_work_folder_is_in_use_nobody_sweeps_it(tmp_path: Path) -> None:
    writing: list[list[str]] = []

    def look(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "write":
            FileTier(config(tmp_path), OTHER).close()
            writing.append(sorted(path.suffix for path in (tmp_path / ".hisparse").iterdir()))

    filesystem = DrivenFileSystem()
    tier = FileTier(config(tmp_path), IDENTITY, filesystem)
    empty(tmp_path)
    assert store(tier, key_of(1))
    filesystem.before = look
    assert store(tier, key_of(2))
    assert writing == [[".lock", ".tmp"]]
    tier.close()


@pytest.mark.parametrize("emptying", [empty, shutil.rmtree], ids=["emptied", "removed"])
def test_whenever_the_directory_is_emptied_a_later_store_is_kept(
    emptying: Callable[[Path], None], fast_path: Path
) -> None:
    """Before each call of two stores in turn, as far as there are calls."""
    for number in range(1000):
        root = fast_path / str(number)
        filesystem = DrivenFileSystem()
        tier = FileTier(config(root, fsync=True), IDENTITY, filesystem)
        assert store(tier, key_of(0))
        begin = len(filesystem.calls)

        def act(at: int, name: str, arguments: tuple[Any, ...], root: Path = root, when: int = begin + number) -> None:
            if at == when:
                emptying(root)

        filesystem.before = act
        is_kept = [store(tier, key_of(1)), store(tier, key_of(2))]
        num_calls = len(filesystem.calls) - begin
        # A scan beside may be the one that empties it, and not be done.
        wait_for_scans(tier)
        filesystem.before = lambda *_: None
        assert store(tier, key_of(3))
        assert loads(tier, key_of(3))
        for path in namespace(root).glob("??/*.kv"):
            assert is_whole(path, IDENTITY)
        # Only the last thing that a store does can come too late for it: its folder's sync, and what comes after.
        assert all(is_kept), filesystem.calls[begin:]
        assert tier.close()
        assert list((root / ".hisparse").iterdir()) == []
        if number >= num_calls:
            break
    assert number > 10
