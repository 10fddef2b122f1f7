"""What a tier stores comes back, and what goes wrong on the way is a miss."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from hisparse.errors import CapacityError, InputError
from hisparse.offload.files import FileTier, FileTierConfig, Identity, directory
from hisparse.offload.files.filesystem import DIRECT
from tests.offload.files.driven import DrivenFileSystem, ShortFileSystem
from tests.offload.files.world import (
    FILE_BYTES,
    IDENTITY,
    ROW_BYTES,
    aligned,
    block_file,
    config,
    is_whole,
    key_of,
    loads,
    namespace,
    row_of,
    store,
)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def quarantine(root: Path) -> list[str]:
    return sorted(path.name.split(".")[1] for path in (namespace(root) / "quarantine").glob("*"))


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("direct_io", [False, True])
def test_what_is_stored_is_found_and_loaded_by_the_next_process_too(
    fsync: bool, direct_io: bool, tmp_path: Path
) -> None:
    options = FileTierConfig((tmp_path / "a" / "b",), 1 << 20, fsync=fsync, direct_io=direct_io)
    for generation in range(3):
        tier = FileTier(options, IDENTITY)
        assert [tier.lookup(key_of(number)) for number in range(4)] == [number < generation for number in range(4)]
        assert [loads(tier, key_of(number)) for number in range(4)] == [number < generation for number in range(4)]
        assert store(tier, key_of(generation))
        assert is_whole(block_file(tmp_path / "a" / "b", key_of(generation)), IDENTITY)
        assert tier.close()


def test_after_close_everything_is_a_miss(tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path), IDENTITY)
    assert store(tier, key_of(1))
    assert tier.close()
    assert tier.close()
    assert (tier.lookup(key_of(1)), loads(tier, key_of(1)), store(tier, key_of(2))) == (False, False, False)
    assert list((tmp_path / ".hisparse").iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "fault", "is_seen_by_lookup"),
    [
        (lambda path: flip(path, 0), "magic", True),
        (lambda path: flip(path, 9), "header", True),
        (lambda path: flip(path, 3000), "header", True),
        (lambda path: flip(path, 4096), "checksum", False),
        (lambda path: flip(path, FILE_BYTES - 1), "checksum", False),
        (lambda path: os.truncate(path, FILE_BYTES - 1), "size", True),
        (lambda path: os.truncate(path, 4096), "size", True),
        (lambda path: os.truncate(path, FILE_BYTES + 4096), "size", True),
    ],
    ids=["magic", "version", "padding", "first byte", "last byte", "short", "header only", "long"],
)
def test_a_bad_file_is_a_miss_and_is_set_aside(
    damage: Any, fault: str, is_seen_by_lookup: bool, tmp_path: Path
) -> None:
    tier = FileTier(config(tmp_path), IDENTITY)
    for number in (1, 2):
        assert store(tier, key_of(number))
        damage(block_file(tmp_path, key_of(number)))
    assert tier.lookup(key_of(1)) is not is_seen_by_lookup
    assert not loads(tier, key_of(1))
    assert not loads(tier, key_of(2))
    assert quarantine(tmp_path) == [fault, fault]
    assert not tier.lookup(key_of(1))
    assert store(tier, key_of(1))
    assert loads(tier, key_of(1))
    tier.close()


def test_a_file_deleted_between_lookup_and_load_is_a_plain_miss(tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path), IDENTITY)
    assert store(tier, key_of(1))
    assert tier.lookup(key_of(1))
    block_file(tmp_path, key_of(1)).unlink()
    assert not loads(tier, key_of(1))
    assert store(tier, key_of(1))
    assert loads(tier, key_of(1))
    assert quarantine(tmp_path) == []
    tier.close()


class Failing(DrivenFileSystem):
    """Fails every call of some names, with one error, while it is told to."""

    def __init__(self, *names: str, code: int = errno.EIO) -> None:
        super().__init__(self._fail)
        self.names, self.code, self.is_failing = names, code, False

    def _fail(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if self.is_failing and name in self.names:
            raise OSError(self.code, os.strerror(self.code))


def test_a_block_that_cannot_be_read_is_a_miss_until_it_is_stored_again(tmp_path: Path) -> None:
    """Else lookup and load would disagree for ever."""
    filesystem = Failing("read")
    tier = FileTier(config(tmp_path), IDENTITY, filesystem)
    assert store(tier, key_of(1))
    filesystem.is_failing = True
    assert not loads(tier, key_of(1))
    filesystem.is_failing = False
    assert not tier.lookup(key_of(1))
    before = filesystem.calls.count("write")
    assert store(tier, key_of(1))
    assert filesystem.calls.count("write") > before
    assert tier.lookup(key_of(1))
    assert loads(tier, key_of(1))
    assert quarantine(tmp_path) == []
    tier.close()


def test_a_bad_file_that_cannot_be_set_aside_is_no_hit_again(tmp_path: Path) -> None:
    filesystem = Failing("rename")
    tier = FileTier(config(tmp_path), IDENTITY, filesystem)
    assert store(tier, key_of(1))
    flip(block_file(tmp_path, key_of(1)), 5000)
    filesystem.is_failing = True
    assert tier.lookup(key_of(1))
    assert not loads(tier, key_of(1))
    assert not tier.lookup(key_of(1))
    assert block_file(tmp_path, key_of(1)).exists()
    tier.close()


def test_a_full_quarantine_takes_no_more_and_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MAX_QUARANTINED", 1)
    tier = FileTier(config(tmp_path), IDENTITY)
    for number in (1, 2):
        assert store(tier, key_of(number))
        flip(block_file(tmp_path, key_of(number)), 0)
        assert not loads(tier, key_of(number))
    left = block_file(tmp_path, key_of(2)).read_bytes()
    assert (tier.lookup(key_of(2)), store(tier, key_of(2))) == (False, False)
    assert block_file(tmp_path, key_of(2)).read_bytes() == left
    assert quarantine(tmp_path) == ["magic"]
    assert store(tier, key_of(1))
    tier.close()


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    filesystem = DrivenFileSystem()
    tier = FileTier(config(tmp_path), IDENTITY, filesystem)
    assert store(tier, key_of(1))
    before = filesystem.calls.count("write")
    assert store(tier, key_of(1))
    assert filesystem.calls.count("write") == before
    tier.close()


def is_direct(arguments: tuple[Any, ...]) -> bool:
    return bool(arguments[1] & DIRECT)


class NoDirect(DrivenFileSystem):
    """Refuses direct I/O: when a file is opened, when it is first written, or when it is first read."""

    def __init__(self, at: str) -> None:
        super().__init__(self._refuse, self._note)
        self.at = at
        self.num_direct = 0
        self._is_direct_open = False

    def _refuse(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            self._is_direct_open = is_direct(arguments)
            self.num_direct += self._is_direct_open
        if self._is_direct_open and name == self.at:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def _note(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "close":
            self._is_direct_open = False


@pytest.mark.parametrize("at", ["open", "write", "read"])
def test_a_directory_without_direct_io_is_used_through_the_page_cache(
    at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filesystem = NoDirect(at)
    tier = FileTier(config(tmp_path), IDENTITY, filesystem)
    for number in range(3):
        assert store(tier, key_of(number))
        assert loads(tier, key_of(number))
    direct_until_refused = {"open": 1, "write": 1, "read": 2}
    assert filesystem.num_direct == direct_until_refused[at]
    assert [record.message for record in caplog.records if "direct I/O" in record.message] == [
        f"{tmp_path} does not take direct I/O: its files go through the page cache"
    ]
    assert list((tmp_path / ".hisparse").glob("*.tmp")) == []
    tier.close()


def test_direct_io_is_used_where_it_can_be(tmp_path: Path) -> None:
    filesystem = NoDirect("never")
    tier = FileTier(config(tmp_path), IDENTITY, filesystem)
    assert store(tier, key_of(1))
    assert loads(tier, key_of(1))
    assert filesystem.num_direct == 2
    unaligned = memoryview(bytearray(ROW_BYTES + 1))[1:]
    assert tier.load(key_of(1), unaligned).result(10)
    assert bytes(unaligned) == row_of(key_of(1))
    assert filesystem.num_direct == 2
    tier.close()


def test_short_transfers_are_continued(tmp_path: Path) -> None:
    for most in (4096, 5000):
        tier = FileTier(config(tmp_path / str(most)), IDENTITY, ShortFileSystem(most))
        assert store(tier, key_of(1))
        assert loads(tier, key_of(1))
        tier.close()


def test_directories_share_the_blocks_and_one_more_moves_only_its_own(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in "abc"]
    two = FileTier(config(*roots[:2]), IDENTITY)
    assert all(store(two, key_of(number)) for number in range(60))
    two.close()
    per_root = [len(list(root.rglob("*.kv"))) for root in roots[:2]]
    assert sum(per_root) == 60
    assert min(per_root) > 15
    three = FileTier(config(*roots), IDENTITY)
    num_found = sum(three.lookup(key_of(number)) for number in range(60))
    assert 30 < num_found < 50
    three.close()


def test_two_tiers_on_one_directory_see_each_others_blocks(tmp_path: Path) -> None:
    one, two = (FileTier(config(tmp_path), IDENTITY) for _ in range(2))
    assert store(one, key_of(1))
    assert loads(two, key_of(1))
    assert store(two, key_of(1))
    assert store(two, key_of(2))
    one.close()
    assert loads(two, key_of(2))
    assert store(two, key_of(3))
    two.close()


def make_unwritable(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("a file where a directory should be")


@pytest.mark.parametrize(
    ("name", "said"), [("file", "Not a directory"), ("file/below", "Not a directory"), ("null", "cannot keep KV in")]
)
def test_a_directory_that_cannot_be_used_is_one_clear_line(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "null").symlink_to("/dev/null")
    with pytest.raises(InputError, match=said) as caught:
        FileTier(config(tmp_path / "good", tmp_path / name), IDENTITY)
    assert str(tmp_path / name) in str(caught.value)
    assert list((tmp_path / "good" / ".hisparse").iterdir()) == []
    assert (tmp_path / "file").read_text() == "a file"


def test_a_full_disk_at_the_start_is_one_clear_line(tmp_path: Path) -> None:
    filesystem = Failing("write", code=errno.ENOSPC)
    filesystem.is_failing = True
    with pytest.raises(InputError, match=f"cannot keep KV in {tmp_path}: No space left on device"):
        FileTier(config(tmp_path), IDENTITY, filesystem)


def test_an_identity_file_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    FileTier(config(tmp_path), IDENTITY).close()
    path = namespace(tmp_path) / "identity.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="does not describe its directory"):
        FileTier(config(tmp_path), IDENTITY)
    assert path.read_text() == "{}"


@pytest.mark.parametrize("left", [b"", b"\0" * 30, b"{\n"])
def test_an_identity_file_that_a_loss_of_power_cut_short_is_written_again(left: bytes, tmp_path: Path) -> None:
    FileTier(config(tmp_path), IDENTITY).close()
    path = namespace(tmp_path) / "identity.json"
    path.write_bytes(left)
    FileTier(config(tmp_path), IDENTITY).close()
    assert Identity.from_json(path.read_text()) == IDENTITY


def test_wrong_sizes_are_refused_before_anything_happens(tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path), IDENTITY)
    for key, buffer in ((b"short", aligned()), (key_of(1), aligned(4096)), (key_of(1), memoryview(b"x" * 16384)[::2])):
        for call in (tier.store, tier.load):
            with pytest.raises(InputError, match="keys of 16 and contiguous buffers of 8192 bytes"):
                call(key, buffer)
    with pytest.raises(InputError, match="can be written"):
        tier.load(key_of(1), bytes(ROW_BYTES))
    tier.close()
    with pytest.raises(CapacityError, match=f"at least {2 * FILE_BYTES}"):
        FileTier(FileTierConfig((tmp_path, tmp_path / "b"), 2 * FILE_BYTES - 1), IDENTITY)
    with pytest.raises(InputError, match="each of them once"):
        FileTier(FileTierConfig((tmp_path, tmp_path / "x" / ".."), 1 << 20), IDENTITY)


def test_a_fault_of_ours_is_a_miss_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fault(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open" and arguments[0].endswith(".kv"):
            raise ZeroDivisionError

    tier = FileTier(config(tmp_path), IDENTITY, DrivenFileSystem(fault))
    with caplog.at_level(logging.ERROR):
        assert not store(tier, key_of(1))
        assert not loads(tier, key_of(1))
    assert "ZeroDivisionError" in caplog.text
    tier.close()
