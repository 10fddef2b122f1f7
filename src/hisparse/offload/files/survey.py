"""Looking at directories of stored KV from outside: what is there, whether it is whole, and what may go.

Works beside running tiers. Nothing here removes a file that does not start like a block of ours.
"""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import mmap

from hisparse.errors import InputError
from hisparse.offload.files import places
from hisparse.offload.files.block_file import HEADER_BYTES, BadFileError, Block, Fault, is_ours, read_block
from hisparse.offload.files.capacity import evictable
from hisparse.offload.files.directory import set_aside
from hisparse.offload.files.filesystem import FileSystem, LocalFileSystem
from hisparse.offload.files.namespace import FORMAT_VERSION, IDENTITY_FILE, NAMESPACE_NAME, Identity
from hisparse.offload.files.small_files import read_small_file
from hisparse.offload.files.work_folder import sweep

_LOCAL = LocalFileSystem()
_THREADS = 4
_BATCH = 64


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace as it was found. `identity` is None when it cannot be read, and `problem` then says why."""

    path: str
    identity: Identity | None
    problem: str | None

    @property
    def name(self) -> str:
        """Of its directory."""
        return os.path.basename(self.path)


@dataclass(frozen=True, slots=True)
class Survey:
    """What a namespace holds. Bytes are those of files; `oldest_s` and `newest_s` are Unix times of last use."""

    num_blocks: int
    block_bytes: int
    num_quarantined: int
    quarantined_bytes: int
    num_foreign: int
    oldest_s: float | None
    newest_s: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verification of one file came to. `problem` is None for a good one."""

    path: str
    key: bytes
    fault: Fault | None
    problem: str | None


def find(path: str | os.PathLike[str], filesystem: FileSystem = _LOCAL) -> list[Namespace]:
    """The namespaces of a directory, which may be a namespace itself.

    Raises `InputError` when it cannot be listed or has no namespace.
    """
    root = os.path.abspath(path)
    try:
        is_namespace = NAMESPACE_NAME.fullmatch(os.path.basename(root))
        paths = [root] if is_namespace and filesystem.list_directory(root) else places.namespaces(filesystem, root)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    if not paths:
        raise InputError(f"{path} holds no stored KV: no directory in it is named like a namespace of version 1")
    return [_open(filesystem, path) for path in paths]


def _open(filesystem: FileSystem, path: str) -> Namespace:
    match = NAMESPACE_NAME.fullmatch(os.path.basename(path))
    if match is None:
        raise InputError(f"{path} is not named like a namespace")
    if int(match[1]) != FORMAT_VERSION:
        return Namespace(path, None, f"it is of format {match[1]}, and this version reads format {FORMAT_VERSION}")
    try:
        raw = read_small_file(filesystem, f"{path}/{IDENTITY_FILE}")
        identity = Identity.from_json((raw or b"").decode())
    except (OSError, UnicodeDecodeError, InputError) as error:
        return Namespace(path, None, f"its {IDENTITY_FILE} cannot be read: {error}")
    if identity.digest.hex() != match[2]:
        return Namespace(path, None, f"its {IDENTITY_FILE} belongs to another directory")
    return Namespace(path, identity, None)


def survey(namespace: Namespace, filesystem: FileSystem = _LOCAL) -> Survey:
    """Count what a namespace holds, without reading any payload. Raises `InputError` when it cannot be listed."""
    try:
        found = list(places.blocks(filesystem, namespace.path))
        bad = places.quarantined(filesystem, namespace.path)
        num_foreign = _num_foreign(filesystem, namespace.path, len(found), len(bad))
    except OSError as error:
        raise InputError(f"{namespace.path}: {error.strerror or error}") from error
    used = [block.used_ns / 1e9 for block in found]
    return Survey(
        num_blocks=len(found),
        block_bytes=sum(block.num_bytes for block in found),
        num_quarantined=len(bad),
        quarantined_bytes=sum(block.num_bytes for block in bad),
        num_foreign=num_foreign,
        oldest_s=min(used, default=None),
        newest_s=max(used, default=None),
    )


def _num_foreign(filesystem: FileSystem, path: str, num_blocks: int, num_bad: int) -> int:
    """Names that are no part of a namespace: they are left alone, and said to be there."""
    num_names = 0
    for name in filesystem.list_directory(path):
        if places.SHARD_NAME.fullmatch(name) or name == places.QUARANTINE:
            with contextlib.suppress(NotADirectoryError):
                num_names += len(filesystem.list_directory(f"{path}/{name}"))
                continue
        num_names += name != IDENTITY_FILE
    return max(0, num_names - num_blocks - num_bad)


def verify(namespace: Namespace, filesystem: FileSystem = _LOCAL) -> Iterator[Verdict]:
    """Read every block of a namespace to its last byte, several at once, in the order of their paths.

    A block that vanishes meanwhile is left out. Raises `InputError` when the namespace's identity cannot be read.
    """
    identity = namespace.identity
    if identity is None:
        raise InputError(f"{namespace.path} cannot be verified: {namespace.problem}")
    found = sorted(places.blocks(filesystem, namespace.path), key=lambda block: block.path)
    with ThreadPoolExecutor(_THREADS) as threads:
        for start in range(0, len(found), _BATCH):
            batch = found[start : start + _BATCH]
            for verdict in threads.map(lambda block: _verify(filesystem, block, identity), batch):
                if verdict is not None:
                    yield verdict


class _NoWatch:
    def check(self) -> None:
        """Nobody calls a verification off."""


def read_into(namespace: Namespace, key: bytes, row: memoryview, filesystem: FileSystem = _LOCAL) -> Verdict | None:
    """Fill `row`, as long as the namespace's rows, with a block, and check it. None when there is no such block.

    Raises `InputError` when the namespace's identity cannot be read.
    """
    if namespace.identity is None:
        raise InputError(f"{namespace.path} cannot be read: {namespace.problem}")
    path = places.block_path(namespace.path, key)
    return _read(filesystem, path, Block(namespace.identity.digest, key, row.cast("B")))


def _verify(filesystem: FileSystem, found: places.Found, identity: Identity) -> Verdict | None:
    row = memoryview(mmap(-1, identity.row_bytes))
    return _read(filesystem, found.path, Block(identity.digest, found.key, row))


def _read(filesystem: FileSystem, path: str, block: Block) -> Verdict | None:
    try:
        read_block(filesystem, path, block, memoryview(bytearray(HEADER_BYTES)), _NoWatch(), direct=False)
    except FileNotFoundError:
        return None
    except BadFileError as error:
        return Verdict(path, block.key, error.fault, error.fault.words)
    except OSError as error:
        return Verdict(path, block.key, None, f"it cannot be read: {error.strerror or error}")
    return Verdict(path, block.key, None, None)


def quarantine(namespace: Namespace, verdict: Verdict, filesystem: FileSystem = _LOCAL) -> bool:
    """Set a bad file aside. False when the quarantine is full. Raises `InputError` when it cannot be moved."""
    if verdict.fault is None:
        return False
    try:
        return set_aside(filesystem, namespace.path, verdict.path, verdict.key, verdict.fault)
    except OSError as error:
        raise InputError(f"{verdict.path} cannot be moved: {error.strerror or error}") from error


def restore(namespace: Namespace, filesystem: FileSystem = _LOCAL) -> tuple[int, int]:
    """Put back those quarantined files that are whole, unless a block is in their place. Returns (put back, left)."""
    identity = namespace.identity
    if identity is None:
        raise InputError(f"nothing in {namespace.path} can be put back: {namespace.problem}")
    num_restored = num_left = 0
    for found in places.quarantined(filesystem, namespace.path):
        destination = places.block_path(namespace.path, found.key)
        verdict = _verify(filesystem, found, identity)
        if verdict is not None and verdict.problem is None and not os.path.lexists(destination):
            with contextlib.suppress(FileExistsError):
                filesystem.make_directory(os.path.dirname(destination))
            filesystem.rename(found.path, destination)
            num_restored += 1
        else:
            num_left += 1
    return num_restored, num_left


def purge(namespace: Namespace, filesystem: FileSystem = _LOCAL) -> tuple[int, int]:
    """Remove the quarantined files that start like blocks of ours. Returns (removed, bytes)."""
    found = evictable(filesystem, places.quarantined(filesystem, namespace.path))
    return _remove(filesystem, found)


@dataclass(frozen=True, slots=True)
class PruneLimits:
    """What may stay: at most `most_bytes` in all, and nothing that was last used before `oldest_s` (Unix time)."""

    most_bytes: int | None = None
    oldest_s: float | None = None


def prune(
    namespaces: list[Namespace], limits: PruneLimits, filesystem: FileSystem = _LOCAL, *, dry_run: bool = False
) -> tuple[int, int]:
    """Remove blocks past the limits, those used longest ago first. Returns (blocks, bytes) removed.

    With `dry_run` nothing is removed, and the numbers say what would be. Leavings of ended processes go as well.
    """
    found = [block for namespace in namespaces for block in places.blocks(filesystem, namespace.path)]
    blocks = evictable(filesystem, found)
    used = sum(block.num_bytes for block in blocks)
    going: list[places.Found] = []
    for block in blocks:
        is_old = limits.oldest_s is not None and block.used_ns / 1e9 < limits.oldest_s
        if is_old or (limits.most_bytes is not None and used > limits.most_bytes):
            going.append(block)
            used -= block.num_bytes
    if dry_run:
        return len(going), sum(block.num_bytes for block in going)
    for root in sorted({os.path.dirname(namespace.path) for namespace in namespaces}):
        sweep(filesystem, root)
    return _remove(filesystem, going)


def _remove(filesystem: FileSystem, found: list[places.Found]) -> tuple[int, int]:
    num_removed = num_bytes = 0
    for block in found:
        with contextlib.suppress(FileNotFoundError):
            if is_ours(filesystem, block.path):
                filesystem.unlink(block.path)
                num_removed += 1
                num_bytes += block.num_bytes
    return num_removed, num_bytes
