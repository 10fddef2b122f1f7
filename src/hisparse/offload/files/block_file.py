"""One block as a file: a header of one page, then the payload.

```
byte 0     8 magic "HISPARKV"    16 payload bytes (u64)     32 identity (16 bytes)    64 written, Unix seconds (u64)
byte 8       version (u32)       24 payload xxh3_64 (u64)   48 key (16 bytes)         72 zeros
byte 12      header bytes (u32)                                                       4088 xxh3_64 of bytes 0..4087
```

All numbers are little endian. The header is a whole page, so that header and payload are written and read past the page
cache in one call; its own checksum covers the zeros as well, so no byte of a file can change unseen.
"""

import contextlib
import errno
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import xxhash

from hisparse.offload.files.filesystem import DIRECT, NEW_FILE, OLD_FILE, FileSystem

MAGIC = b"HISPARKV"
VERSION = 1
HEADER_BYTES = 4096
ALIGNMENT = 4096
"""What direct I/O asks of addresses, offsets and lengths, on the strictest of common devices."""
PIECE_BYTES = 2 << 20
"""Buffered reads are checked in pieces that are still in the core's cache when the checksum reads them."""
DIRECT_PIECE_BYTES = 16 << 20
_FIELDS = struct.Struct("<8sIIQQ16s16sQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = HEADER_BYTES - _CHECKSUM.size
_ZEROS = bytes(HEADER_BYTES)


class Fault(Enum):
    """What is wrong with a file. The value is part of its name in quarantine."""

    MAGIC = "magic"
    HEADER = "header"
    VERSION = "version"
    IDENTITY = "identity"
    KEY = "key"
    SIZE = "size"
    CHECKSUM = "checksum"

    @property
    def words(self) -> str:
        """The fault for people."""
        return _WORDS[self]


_WORDS = {
    Fault.MAGIC: "it does not start like a block of KV",
    Fault.HEADER: "its header fails its checksum",
    Fault.VERSION: f"its version is not {VERSION}",
    Fault.IDENTITY: "it belongs to another namespace",
    Fault.KEY: "it is stored under another block's key",
    Fault.SIZE: "it is shorter or longer than its header says",
    Fault.CHECKSUM: "its payload fails its checksum",
}


class BadFileError(Exception):
    """A file that is there but is not what its name promises. Never leaves the tier: it ends as a miss."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.words)
        self.fault = fault


class Watch(Protocol):
    """Whoever may call off a transfer in the middle."""

    def check(self) -> None:
        """Raise if the transfer should not go on."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself. `written_s` is Unix time in seconds; `checksum` is xxh3_64 of the payload."""

    identity: bytes
    key: bytes
    payload_bytes: int
    checksum: int
    written_s: int

    def write_to(self, page: memoryview) -> None:
        """Fill `page`, `HEADER_BYTES` long."""
        page[:] = _ZEROS
        _FIELDS.pack_into(
            page,
            0,
            *(MAGIC, VERSION, HEADER_BYTES, self.payload_bytes, self.checksum),
            *(self.identity, self.key, self.written_s),
        )
        _CHECKSUM.pack_into(page, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(page[:_CHECKSUM_AT]))

    @classmethod
    def read_from(cls, page: memoryview, num_bytes: int) -> "Header":
        """Check and read the first `num_bytes` of a file. Raises `BadFileError`; a file of this version is whole."""
        if num_bytes < len(MAGIC) or page[: len(MAGIC)] != MAGIC:
            raise BadFileError(Fault.MAGIC)
        if num_bytes < HEADER_BYTES:
            raise BadFileError(Fault.SIZE)
        _, version, header_bytes, payload_bytes, checksum, identity, key, written_s = _FIELDS.unpack_from(page)
        if _CHECKSUM.unpack_from(page, _CHECKSUM_AT)[0] != xxhash.xxh3_64_intdigest(page[:_CHECKSUM_AT]):
            raise BadFileError(Fault.HEADER)
        if version != VERSION or header_bytes != HEADER_BYTES:
            raise BadFileError(Fault.VERSION)
        return cls(identity, key, payload_bytes, checksum, written_s)

    def expect(self, identity: bytes, key: bytes, payload_bytes: int, file_bytes: int) -> None:
        """Raise `BadFileError` unless the file is that block of that namespace, of that size on disk and inside."""
        if self.identity != identity:
            raise BadFileError(Fault.IDENTITY)
        if self.key != key:
            raise BadFileError(Fault.KEY)
        if self.payload_bytes != payload_bytes or file_bytes != HEADER_BYTES + payload_bytes:
            raise BadFileError(Fault.SIZE)


@dataclass(frozen=True, slots=True)
class Block:
    """What one file is to hold, or has to prove that it holds. `identity` and `key` have 16 bytes."""

    identity: bytes
    key: bytes
    payload: memoryview

    @property
    def file_bytes(self) -> int:
        """The size of its file."""
        return HEADER_BYTES + self.payload.nbytes

    @property
    def is_aligned(self) -> bool:
        """Whether direct I/O can take the payload as it lies in memory."""
        address = np.frombuffer(self.payload, np.uint8).__array_interface__["data"][0]
        return self.payload.nbytes % ALIGNMENT == 0 and address % ALIGNMENT == 0


def write_block(
    filesystem: FileSystem, path: str, block: Block, page: memoryview, watch: Watch, *, direct: bool, sync: bool
) -> None:
    """Write a new file at `path`, header and payload. `page` is an aligned header page to work in.

    Raises `OSError` and what `watch` raises; the caller removes what is left at `path`.
    """
    checksum = xxhash.xxh3_64_intdigest(block.payload)
    Header(block.identity, block.key, block.payload.nbytes, checksum, int(time.time())).write_to(page)
    descriptor = filesystem.open(path, NEW_FILE | (DIRECT if direct else 0))
    try:
        written = 0
        while written < block.file_bytes:
            watch.check()
            num_bytes = filesystem.write(descriptor, _views(page, block.payload, written, DIRECT_PIECE_BYTES), written)
            if num_bytes <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            written += num_bytes
        if sync:
            filesystem.sync(descriptor)
    except BaseException:
        _close_quietly(filesystem, descriptor)
        raise
    # Some file systems tell only here that they could not keep what was written.
    filesystem.close(descriptor)


def read_block(filesystem: FileSystem, path: str, block: Block, page: memoryview, watch: Watch, *, direct: bool) -> int:
    """Fill `block.payload` from its file and check every byte. Returns the file's time of modification in ns.

    Raises `BadFileError` when the file is not that block, `OSError`, and what `watch` raises. The payload's bytes mean
    nothing after an exception.
    """
    piece_bytes = DIRECT_PIECE_BYTES if direct else PIECE_BYTES
    descriptor = filesystem.open(path, OLD_FILE | (DIRECT if direct else 0))
    try:
        status = filesystem.status_of(descriptor)
        if status.st_size != block.file_bytes:
            raise BadFileError(Fault.SIZE)
        digest = xxhash.xxh3_64()
        read = checked = 0
        header: Header | None = None
        while read < block.file_bytes:
            watch.check()
            num_bytes = filesystem.read(descriptor, _views(page, block.payload, read, piece_bytes), read)
            if num_bytes <= 0:
                raise BadFileError(Fault.SIZE)
            read += num_bytes
            if header is None and read >= HEADER_BYTES:
                header = Header.read_from(page, HEADER_BYTES)
                header.expect(block.identity, block.key, block.payload.nbytes, status.st_size)
            if read > HEADER_BYTES:
                digest.update(block.payload[checked : read - HEADER_BYTES])
                checked = read - HEADER_BYTES
        if header is None or digest.intdigest() != header.checksum:
            raise BadFileError(Fault.CHECKSUM)
    finally:
        _close_quietly(filesystem, descriptor)
    return status.st_mtime_ns


def _views(page: memoryview, payload: memoryview, done: int, piece_bytes: int) -> Sequence[memoryview]:
    """Where the next bytes of a file lie, of which `done` are through: what is left of the header, and a piece."""
    if done < HEADER_BYTES:
        return (page[done:], payload[:piece_bytes])
    start = done - HEADER_BYTES
    return (payload[start : start + piece_bytes],)


def read_header(filesystem: FileSystem, path: str, page: memoryview) -> tuple[Header, int]:
    """The header of a file, and the file's size. Raises `BadFileError` and `OSError`."""
    descriptor = filesystem.open(path, OLD_FILE)
    try:
        file_bytes = filesystem.status_of(descriptor).st_size
        return Header.read_from(page, filesystem.read(descriptor, (page,), 0)), file_bytes
    finally:
        _close_quietly(filesystem, descriptor)


def is_ours(filesystem: FileSystem, path: str) -> bool:
    """Whether a file starts like one that this package wrote: nothing else is ever removed. Raises `OSError`."""
    start = bytearray(len(MAGIC))
    descriptor = filesystem.open(path, OLD_FILE)
    try:
        filesystem.read(descriptor, (memoryview(start),), 0)
    finally:
        _close_quietly(filesystem, descriptor)
    return start == MAGIC


def _close_quietly(filesystem: FileSystem, descriptor: int) -> None:
    """Close where nothing hangs on it: after reading, or behind another error."""
    with contextlib.suppress(OSError):
        filesystem.close(descriptor)
