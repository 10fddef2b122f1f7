"""Which files of a directory are blocks, by name alone, and where each of them belongs.

```
DIRECTORY/
  .hisparse/                               temporaries and locks
  v1-<family>-<model>-<32 hex digits>/     a namespace
    identity.json
    <2 hex digits>/<32 hex digits>.kv      a block: its key, below the key's first byte
    quarantine/<32 hex digits>.<fault>.<8 hex digits>.bad
```

Everything else belongs to somebody else.
"""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from hisparse.offload.files.filesystem import FileSystem
from hisparse.offload.files.namespace import NAMESPACE_NAME

KEY_BYTES = 16
QUARANTINE = "quarantine"
SHARD_NAME = re.compile(r"[0-9a-f]{2}")
BLOCK_NAME = re.compile(r"([0-9a-f]{32})\.kv")
BAD_NAME = re.compile(r"([0-9a-f]{32})\.([a-z]+)\.[0-9a-f]{8}\.bad")


@dataclass(frozen=True, slots=True)
class Found:
    """A file with the name of a block. `used_ns` is when it was written or last read, Unix time in ns."""

    path: str
    key: bytes
    num_bytes: int
    used_ns: int


def block_path(namespace: str, key: bytes) -> str:
    """Where a block of `key` is, below the path of its namespace."""
    name = key.hex()
    return f"{namespace}/{name[:2]}/{name}.kv"


def namespaces(filesystem: FileSystem, root: str) -> list[str]:
    """Paths of the namespaces below `root`, sorted. Raises `OSError` if `root` cannot be listed."""
    names = sorted(name for name in filesystem.list_directory(root) if NAMESPACE_NAME.fullmatch(name))
    return [path for path in (f"{root}/{name}" for name in names) if _is_directory(filesystem, path)]


def blocks(filesystem: FileSystem, namespace: str) -> Iterator[Found]:
    """The blocks of a namespace. What vanishes meanwhile is left out. Raises `OSError` if it cannot be listed."""
    for shard in sorted(filesystem.list_directory(namespace)):
        if SHARD_NAME.fullmatch(shard) and _is_directory(filesystem, f"{namespace}/{shard}"):
            for name in _names(filesystem, f"{namespace}/{shard}"):
                match = BLOCK_NAME.fullmatch(name)
                if match and name.startswith(shard):
                    yield from _found(filesystem, f"{namespace}/{shard}/{name}", match[1])


def quarantined(filesystem: FileSystem, namespace: str) -> list[Found]:
    """The files in a namespace's quarantine, sorted by name. Raises `OSError` if that cannot be listed."""
    folder = f"{namespace}/{QUARANTINE}"
    if not _is_directory(filesystem, folder):
        return []
    matches = [(name, BAD_NAME.fullmatch(name)) for name in sorted(_names(filesystem, folder))]
    return [found for name, match in matches if match for found in _found(filesystem, f"{folder}/{name}", match[1])]


def _names(filesystem: FileSystem, path: str) -> list[str]:
    """The names in a directory, none if it vanished."""
    try:
        return filesystem.list_directory(path)
    except FileNotFoundError:
        return []


def _found(filesystem: FileSystem, path: str, key: str) -> Iterator[Found]:
    status = _status(filesystem, path)
    if status is not None and stat.S_ISREG(status.st_mode):
        yield Found(path, bytes.fromhex(key), status.st_size, status.st_mtime_ns)


def _is_directory(filesystem: FileSystem, path: str) -> bool:
    status = _status(filesystem, path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _status(filesystem: FileSystem, path: str) -> os.stat_result | None:
    try:
        return filesystem.status(path)
    except FileNotFoundError:
        return None
