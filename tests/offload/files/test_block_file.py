"""A block file says of every byte whether it is right."""

import dataclasses
import os
from mmap import mmap
from pathlib import Path

import pytest

from hisparse.offload.files.block_file import (
    HEADER_BYTES,
    BadFileError,
    Block,
    Fault,
    Header,
    is_ours,
    read_block,
    read_header,
    write_block,
)
from hisparse.offload.files.filesystem import LocalFileSystem
from tests.offload.files.driven import ShortFileSystem
from tests.offload.files.world import FILE_BYTES, IDENTITY, ROW_BYTES, aligned, block_file, is_whole, key_of, row_of

KEY = key_of(1)
LOCAL = LocalFileSystem()


class NoWatch:
    def check(self) -> None:
        pass


def page() -> memoryview:
    return memoryview(mmap(-1, HEADER_BYTES))


def block(content: bytes | int = ROW_BYTES) -> Block:
    return Block(IDENTITY.digest, KEY, memoryview(aligned(content)))


def write(path: Path, filesystem: LocalFileSystem = LOCAL, direct: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_block(filesystem, str(path), block(row_of(KEY)), page(), NoWatch(), direct=direct, sync=False)
    return path


def read(path: Path, filesystem: LocalFileSystem = LOCAL, direct: bool = False) -> bytes:
    target = block()
    read_block(filesystem, str(path), target, page(), NoWatch(), direct=direct)
    return bytes(target.payload)


@pytest.mark.parametrize("direct", [False, True])
def test_what_was_written_is_read(direct: bool, tmp_path: Path) -> None:
    path = write(block_file(tmp_path, KEY), direct=direct)
    assert is_whole(path, IDENTITY)
    assert read(path, direct=direct) == row_of(KEY)
    header, file_bytes = read_header(LOCAL, str(path), page())
    assert (header.identity, header.key, header.payload_bytes) == (IDENTITY.digest, KEY, ROW_BYTES)
    assert file_bytes == FILE_BYTES


@pytest.mark.parametrize("most", [1000, 4096, 4097, 5000])
def test_short_reads_and_writes_are_continued(most: int, tmp_path: Path) -> None:
    path = write(block_file(tmp_path, KEY), ShortFileSystem(most))
    assert is_whole(path, IDENTITY)
    assert read(path, ShortFileSystem(most)) == row_of(KEY)


def test_a_flipped_bit_is_seen_wherever_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "block")
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for at in range(FILE_BYTES):
            os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << at % 8]), at)
            with pytest.raises(BadFileError):
                read(path)
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    assert read(path) == row_of(KEY)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 4095, 4096, 4097, FILE_BYTES - 1, FILE_BYTES + 1, 2 * FILE_BYTES])
def test_a_file_that_is_cut_short_or_goes_on_is_bad(size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "block")
    os.truncate(path, size)
    with pytest.raises(BadFileError) as caught:
        read(path)
    assert caught.value.fault is Fault.SIZE
    with pytest.raises(BadFileError):  # noqa: PT012 - the header alone shows it as well
        header, file_bytes = read_header(LOCAL, str(path), page())
        header.expect(IDENTITY.digest, KEY, ROW_BYTES, file_bytes)


GOOD = Header(IDENTITY.digest, KEY, ROW_BYTES, 5, 6)


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (dataclasses.replace(GOOD, identity=b"another identity"), Fault.IDENTITY),
        (dataclasses.replace(GOOD, key=key_of(2)), Fault.KEY),
        (dataclasses.replace(GOOD, payload_bytes=ROW_BYTES * 2), Fault.SIZE),
    ],
)
def test_a_header_of_something_else_is_told_apart(header: Header, fault: Fault) -> None:
    area = page()
    header.write_to(area)
    read_back = Header.read_from(area, HEADER_BYTES)
    assert read_back == header
    with pytest.raises(BadFileError) as caught:
        read_back.expect(IDENTITY.digest, KEY, ROW_BYTES, FILE_BYTES)
    assert caught.value.fault is fault
    GOOD.expect(IDENTITY.digest, KEY, ROW_BYTES, FILE_BYTES)


def test_a_header_of_another_version_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    area = page()
    with monkeypatch.context() as patch:
        patch.setattr("hisparse.offload.files.block_file.VERSION", 2)
        GOOD.write_to(area)
    with pytest.raises(BadFileError) as caught:
        Header.read_from(area, HEADER_BYTES)
    assert caught.value.fault is Fault.VERSION


def test_only_files_that_start_like_ours_are_ours(tmp_path: Path) -> None:
    path = write(tmp_path / "block")
    assert is_ours(LOCAL, str(path))
    for content in (b"", b"HISPARK", b"hello world"):
        path.write_bytes(content)
        assert not is_ours(LOCAL, str(path))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path = write(tmp_path / "block")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        read(tmp_path / "link")
