"""How much memory a shared region may take: what is left of the file system, of the machine and of the cgroup.

Shared memory that a cgroup has no room for is not refused: the kernel kills a process instead. So it is asked before
anything is allocated.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hisparse.errors import BackendError, CapacityError
from hisparse.offload.region_control import CONTROL_BYTES, RegionShape

_UNLIMITED = 1 << 60
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Room:
    """What one limit leaves: its name for the message, the bytes, and how the limit is raised."""

    name: str
    free_bytes: int
    advice: str


def rooms(directory: Path, root: Path = _ROOT) -> tuple[Room, ...]:
    """Every limit that is known here. `root`: where `proc` and `sys` are. Raises `BackendError` without a directory."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise BackendError(
            f"there is no shared memory in {directory} ({error.strerror}): mount a tmpfs there"
        ) from None
    limits = [*_of_machine(root), *_of_cgroups(root)]
    if found.f_blocks:  # a tmpfs without a limit has none
        free = found.f_bavail * found.f_frsize
        limits.append(Room(str(directory), free, "enlarge it (--shm-size for a container), or free what lies there"))
    return tuple(limits)


def require_room(shape: RegionShape, limits: tuple[Room, ...]) -> None:
    """Raise `CapacityError` when a region does not fit one of `limits`; it says how many blocks would."""
    tightest = min(limits, key=lambda limit: limit.free_bytes, default=None)
    if tightest is None or shape.file_bytes <= tightest.free_bytes:
        return
    fits = max(0, tightest.free_bytes - CONTROL_BYTES) // shape.row_bytes
    raise CapacityError(
        f"a shared region of {shape.num_blocks} blocks takes {shape.file_bytes} bytes, but {tightest.name} has "
        f"{max(0, tightest.free_bytes)} bytes left: at most {fits} blocks fit; ask for fewer, or {tightest.advice}"
    )


def _of_machine(root: Path) -> Iterator[Room]:
    available = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        yield Room("the machine", available * 1024, "free memory")


def _of_cgroups(root: Path) -> Iterator[Room]:
    """The limit of every cgroup that this process is in, from its own up to the root of what is mounted."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files, top = ("memory.max", "memory.current", ""), mounted
        elif "memory" in controllers.split(","):
            files, top = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), mounted / "memory"
        else:
            continue
        # In a container the path may be the host's, of which nothing is mounted but the last part, as the root.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield from _of_cgroup(top.joinpath(*parts[:depth]), *files)


def _of_cgroup(folder: Path, limit_file: str, usage_file: str, prefix: str) -> Iterator[Room]:
    try:
        limit = int((folder / limit_file).read_text())
        used = int((folder / usage_file).read_text())
    except (OSError, ValueError):  # absent, or "max"
        return
    if limit >= _UNLIMITED:
        return
    # Cached files make room when memory is short. Shared memory is not on these two lists.
    stat = _numbers(folder / "memory.stat")
    cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    yield Room("the memory limit of the cgroup", limit - max(0, used - cached), "raise it (--memory for a container)")


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
