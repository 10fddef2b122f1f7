"""A directory with everything in it that a file tier may meet, a run that uses all of the tier, and what must hold.

Whatever happens to the run, afterwards every block that has a name is whole, everybody else's files are as they were,
and a tier that starts on the directory finds no leavings.
"""

import os
import shutil
import struct
import time
from dataclasses import dataclass, replace
from mmap import mmap
from pathlib import Path

import xxhash

from hisparse.offload.files import FileSystem, FileTier, FileTierConfig, Identity

ROW_BYTES = 8192
FILE_BYTES = 4096 + ROW_BYTES
IDENTITY = Identity(
    model="org/tiny",
    revision="main",
    config_digest="00" * 16,
    hash_seed="0",
    family="packed-nhd",
    dtype="bfloat16",
    num_kv_heads=2,
    head_bytes=64,
    page_tokens=16,
    page_bytes=(4096, 4096),
    row_bytes=ROW_BYTES,
)
OTHER = replace(IDENTITY, model="org/other")


def key_of(number: int) -> bytes:
    """A key; neighbours lie in different folders."""
    return xxhash.xxh3_128_digest(number.to_bytes(4, "little"))


def row_of(key: bytes, num_bytes: int = ROW_BYTES) -> bytes:
    """The only bytes that are right under `key`."""
    return (xxhash.xxh3_128_digest(key) * (num_bytes // 16 + 1))[:num_bytes]


def aligned(content: bytes | int = ROW_BYTES) -> mmap:
    """A buffer on a page boundary, as rows of a region are."""
    buffer = mmap(-1, content if isinstance(content, int) else len(content))
    if isinstance(content, bytes):
        buffer[:] = content
    return buffer


def config(
    *directories: Path, blocks: int = 64, fsync: bool = False, threads: int = 1, deadline_s: float = 10.0
) -> FileTierConfig:
    """Room for `blocks` blocks in each directory."""
    capacity = len(directories) * blocks * FILE_BYTES
    return FileTierConfig(directories, capacity, threads=threads, deadline_s=deadline_s, fsync=fsync)


def store(tier: FileTier, key: bytes) -> bool:
    """Store the right bytes and wait."""
    return tier.store(key, aligned(row_of(key))).result(30)


def loads(tier: FileTier, key: bytes) -> bool:
    """Load and wait. A hit with wrong bytes ends the test, whatever it is about."""
    buffer = aligned()
    is_hit = tier.load(key, buffer).result(30)
    if is_hit and buffer[:] != row_of(key):
        raise AssertionError(f"wrong bytes were served under {key.hex()}")
    return is_hit


def namespace(root: Path, identity: Identity = IDENTITY) -> Path:
    """Where the blocks of an identity are."""
    return root / identity.name


def block_file(root: Path, key: bytes, identity: Identity = IDENTITY) -> Path:
    """Where one block is."""
    return namespace(root, identity) / key.hex()[:2] / f"{key.hex()}.kv"


def is_whole(path: Path, identity: Identity) -> bool:
    """Whether a file is a block, by an own reading of the format."""
    raw = path.read_bytes()
    if len(raw) != FILE_BYTES:
        return False
    magic, version, header_bytes, size, checksum, digest, key = struct.unpack_from("<8sIIQQ16s16s", raw)
    return (
        (magic, version, header_bytes, size) == (b"HISPARKV", 1, 4096, ROW_BYTES)
        and checksum == xxhash.xxh3_64_intdigest(raw[4096:])
        and struct.unpack_from("<Q", raw, 4088)[0] == xxhash.xxh3_64_intdigest(raw[:4088])
        and (digest, key.hex()) == (identity.digest, path.stem)
        and raw[4096:] == row_of(key)
    )


@dataclass
class World:
    """A directory in which blocks 0 to 3 are good, 4 is spoilt, 5 and 6 belong to another model, and 7 is foreign."""

    root: Path
    foreign: dict[Path, bytes]

    @classmethod
    def make(cls, root: Path) -> "World":
        """Build it. Blocks have ages in the order of their numbers, the oldest first."""
        for identity, numbers in ((IDENTITY, (0, 1, 2, 3, 4)), (OTHER, (5, 6))):
            tier = FileTier(config(root), identity)
            if not all(store(tier, key_of(number)) for number in numbers):
                raise AssertionError("the world cannot be made")
            tier.close()
            for number in numbers:
                os.utime(block_file(root, key_of(number), identity), (1000 + number, 1000 + number))
        with block_file(root, key_of(4)).open("r+b") as file:
            file.seek(5000)
            file.write(b"spoilt")
        os.utime(block_file(root, key_of(4)), (1004, 1004))
        foreign = {
            root / "notes.txt": b"mine",
            root / ".hisparse" / "upload.tmp": b"not of a tier",
            namespace(root) / "README": b"hands off",
            namespace(root) / "ab" / "thesis.kv": b"no key for a name",
            block_file(root, key_of(7)): b"a name like a block's",
        }
        for path, content in foreign.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            os.utime(path, (1, 1))
        for name in ("0123456789abcdef.lock", "0123456789abcdef-0.tmp", "fedcba9876543210-7.tmp"):
            (root / ".hisparse" / name).write_bytes(b"HISPARKV cut sh")
        return cls(root, foreign)

    def copy(self, root: Path) -> "World":
        """The same at another place."""
        shutil.copytree(self.root, root, copy_function=shutil.copy2)
        return World(root, {root / path.relative_to(self.root): content for path, content in self.foreign.items()})

    def run(self, filesystem: FileSystem) -> FileTier:
        """Start a tier, and look up, load, evict and store. Raises `InputError` when it does not start."""
        tier = FileTier(config(self.root, blocks=8, fsync=True), IDENTITY, filesystem, touch_after_ns=0)
        try:
            for number in (0, 4, 7, 20):
                tier.lookup(key_of(number))
                loads(tier, key_of(number))
            for number in (20, 21, 22, 20):
                store(tier, key_of(number))
            for number in (20, 21, 1):
                tier.lookup(key_of(number))
                loads(tier, key_of(number))
        finally:
            tier.close(5)
        return tier

    def check(self) -> None:
        """What must hold at any time, even while the tier is dead."""
        for identity in (IDENTITY, OTHER):
            for path in namespace(self.root, identity).glob("??/*.kv"):
                is_ours = path not in self.foreign and path != block_file(self.root, key_of(4))
                if is_ours and not is_whole(path, identity):
                    raise AssertionError(f"{path} is there but not whole")
        bad = list(namespace(self.root).glob("quarantine/*"))
        for path, content in self.foreign.items():
            found = path if path.exists() else next((b for b in bad if b.name.startswith(f"{path.stem}.")), None)
            if found is None or found.read_bytes() != content:
                raise AssertionError(f"{path} belongs to somebody else, and is gone or changed")

    def check_restart(self, times: int = 1) -> None:
        """A new start cleans up after whatever happened, and everything works."""
        for _ in range(times):
            FileTier(config(self.root, blocks=16), IDENTITY).close()
            left = {path.name for path in (self.root / ".hisparse").iterdir()}
            if left != {"upload.tmp"}:
                raise AssertionError(f"left behind: {left}")
        tier = FileTier(config(self.root, blocks=64), IDENTITY)
        works = store(tier, key_of(20)) and tier.lookup(key_of(20)) and loads(tier, key_of(20))
        tier.close()
        if not works:
            raise AssertionError("the directory cannot be used any more")
        self.check()


def wait_for_scans(tier: FileTier) -> None:
    """Until none is under way, and none about to be."""
    until = time.monotonic() + 20
    while any(directory.capacity.is_scanning for directory in tier._directories):
        assert time.monotonic() < until
        time.sleep(0.0005)
