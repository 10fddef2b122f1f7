"""Options of the offload path, parsed once from what an engine passes through, and checked before anything is made.

Everything behind `OffloadConfig.parse` works with frozen values: no other module looks into a mapping of options.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from hisparse.config import parse_size
from hisparse.errors import InputError
from hisparse.offload.policies import POLICIES


@dataclass(frozen=True, slots=True)
class FileOptions:
    """The file tier below the CPU tier.

    `directories`: where files are striped by hash. `capacity_bytes`: of all files together, whoever wrote them. Where
    there are more already, a file that is stored makes room for two until they fit, and never for more; where the disk
    holds less, that counts. `threads`: of the I/O pool. `deadline_s`: after this an I/O counts as failed. `fsync`:
    whether a file is on disk before it has its name. `direct_io`: whether to bypass the page cache where the file
    system can.
    """

    directories: tuple[Path, ...]
    capacity_bytes: int
    threads: int = 4
    deadline_s: float = 30.0
    fsync: bool = False
    direct_io: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, object], where: str = "files") -> "FileOptions":
        """Check a mapping of options. `where` is how messages name it. Raises `InputError`."""
        return cls(**_parse(cls, _FILE_PARSERS, options, where))


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """How KV is kept below the GPU.

    `cpu_bytes`: size of the CPU region of one node; `RowLayout.num_rows_in` says how many chunks
    that is. `canonical_layout`: whether chunks are stored without
    parallelism, so that any topology reads them; otherwise every worker has a slot of its own in each row.
    `blocks_per_chunk`: device blocks that are stored, found and evicted together. `policy`: what goes first, a name
    of `hisparse.offload.policies.POLICIES`. `max_stores`: chunks on their way from the device at once; what comes on
    top is not stored. `max_tier_writes`: chunks on their way to the tier below at once; what comes on top waits in
    the CPU tier for its turn. `max_tier_loads`: chunks on their way up from there at once; what comes on top waits.
    `lookup_deadline_s`: for how long a request is told to ask again while nothing that it waits for gets any further.
    `lookup_limit_s`: for how long it is told so all in all; no shorter than `lookup_deadline_s`.
    `transfer_deadline_s`: after this a copy that some worker has not finished counts as failed. It begins when the
    copy is handed to the workers.
    `files`: the tier below, or None.
    """

    cpu_bytes: int
    canonical_layout: bool = True
    blocks_per_chunk: int = 1
    policy: str = "arc"
    max_stores: int = 256
    max_tier_writes: int = 512
    max_tier_loads: int = 1024
    lookup_deadline_s: float = 2.0
    lookup_limit_s: float = 30.0
    transfer_deadline_s: float = 30.0
    files: FileOptions | None = None

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> "OffloadConfig":
        """Check a mapping of options, such as the extra configuration of an engine's connector.

        Sizes are bytes as an integer, or text such as "64GiB". Raises `InputError` for an option that is unknown
        (with the nearest known one), missing, of the wrong type or outside its range.
        """
        return cls(**_parse(cls, _PARSERS, options, "offload"))


Parser = Callable[[str, object], object]
"""Takes the name of an option, for messages, and its raw value; gives the checked value."""


def _size(name: str, value: object) -> int:
    if isinstance(value, str):
        return parse_size(value, name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise InputError(f"{name} must be a size such as 1073741824 or '64GiB', not {value!r}")
    return value


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def _flag(name: str, value: object) -> bool:
    # "false" and 0 would be taken for true and for a number elsewhere: neither is guessed at.
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, not {value!r}")
    return value


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InputError(f"{name} must be a number of seconds above 0, not {value!r}")
    return float(value)


def _policy(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in POLICIES:
        raise InputError(f"{name} must be one of {', '.join(sorted(POLICIES))}, not {value!r}")
    return value


def _directories(name: str, value: object) -> tuple[Path, ...]:
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, str) and part for part in parts):
        raise InputError(f"{name} must be a path or a list of paths, not {value!r}")
    paths = tuple(Path(part) for part in parts)
    if len(set(paths)) != len(paths):
        raise InputError(f"{name} names a directory twice: {', '.join(map(str, paths))}")
    return paths


def _files(name: str, value: object) -> FileOptions | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must be a mapping of options such as directories and capacity_bytes, not {value!r}")
    return FileOptions.parse(value, name)


_FILE_PARSERS: dict[str, Parser] = {
    "directories": _directories,
    "capacity_bytes": _size,
    "threads": _count,
    "deadline_s": _seconds,
    "fsync": _flag,
    "direct_io": _flag,
}

_PARSERS: dict[str, Parser] = {
    "cpu_bytes": _size,
    "canonical_layout": _flag,
    "blocks_per_chunk": _count,
    "policy": _policy,
    "max_stores": _count,
    "max_tier_writes": _count,
    "max_tier_loads": _count,
    "lookup_deadline_s": _seconds,
    "lookup_limit_s": _seconds,
    "transfer_deadline_s": _seconds,
    "files": _files,
}


def _parse(cls: type, parsers: dict[str, Parser], options: Mapping[str, object], where: str) -> dict[str, Any]:
    """Checked values of `options`, which may leave out every option that has a default."""
    for name in options:
        if name not in parsers:
            near = difflib.get_close_matches(str(name), parsers, n=1, cutoff=0.0)[0]
            raise InputError(f"{where} has no option {name!r}: the nearest is {near!r}")
    missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in options]
    if missing:
        raise InputError(f"{where} needs the option {missing[0]!r}")
    return {name: parsers[name](f"{where}.{name}", value) for name, value in options.items()}
