"""How much memory a shared region may take: what is left of the file system, of the machine and of the cgroup."""

import os
from pathlib import Path

from hisparse.errors import BackendError, CapacityError
from hisparse.offload.region_control import CONTROL_BYTES, RegionShape
from hisparse.worker.memory_limits import Room, memory_rooms, tightest

_ROOT = Path("/")


def rooms(directory: Path, root: Path = _ROOT) -> tuple[Room, ...]:
    """Every limit that is known here. `root`: where `proc` and `sys` are. Raises `BackendError` without a directory."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise BackendError(
            f"there is no shared memory in {directory} ({error.strerror}): mount a tmpfs there"
        ) from None
    limits = list(memory_rooms(root))
    if found.f_blocks:  # a tmpfs without a limit has none
        free = found.f_bavail * found.f_frsize
        limits.append(Room(str(directory), free, "enlarge it (--shm-size for a container), or free what lies there"))
    return tuple(limits)


def require_room(shape: RegionShape, limits: tuple[Room, ...]) -> None:
    """Raise `CapacityError` when a region does not fit one of `limits`; it says how many blocks would."""
    limit = tightest(limits)
    if limit is None or shape.file_bytes <= limit.free_bytes:
        return
    fits = max(0, limit.free_bytes - CONTROL_BYTES) // shape.row_bytes
    raise CapacityError(
        f"a shared region of {shape.num_blocks} blocks takes {shape.file_bytes} bytes, but {limit.name} has "
        f"{max(0, limit.free_bytes)} bytes left: at most {fits} blocks fit; ask for fewer, or {limit.advice}"
    )
