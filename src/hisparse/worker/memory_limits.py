"""How much memory is left: of the machine, and of the cgroups that this process is in.

Memory that a cgroup has no room for is not refused when it is asked for: the kernel kills a process when it is used.
So it is looked at before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hisparse.errors import CapacityError

_UNLIMITED = 1 << 60
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Room:
    """What one limit leaves: its name for the message, the bytes, and how the limit is raised."""

    name: str
    free_bytes: int
    advice: str


def memory_rooms(root: Path = _ROOT) -> tuple[Room, ...]:
    """Every limit of memory that is known here. `root`: where `proc` and `sys` are."""
    return (*_of_machine(root), *_of_cgroups(root))


def tightest(limits: Sequence[Room]) -> Room | None:
    """The limit that leaves least, None without any."""
    return min(limits, key=lambda limit: limit.free_bytes, default=None)


def require_memory(what: str, num_bytes: int, root: Path = _ROOT) -> None:
    """Raise `CapacityError` when `num_bytes` for `what`, which may be copies of it, could not be filled."""
    limit = tightest(memory_rooms(root))
    if limit is not None and num_bytes > limit.free_bytes:
        raise CapacityError(
            f"{what} takes {num_bytes} bytes of memory, but {limit.name} has {max(0, limit.free_bytes)} bytes left: "
            f"make it smaller, or {limit.advice}"
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
