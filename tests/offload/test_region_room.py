"""What a shared region may take: the least that the machine and the file system leave."""

from pathlib import Path

import pytest

from hisparse.errors import CapacityError
from hisparse.offload.region_control import RegionShape
from hisparse.offload.region_room import require_room, rooms
from hisparse.worker.memory_limits import Room

SHM = Path("/dev/shm")


def free(root: Path) -> dict[str, int]:
    return {room.name: room.free_bytes for room in rooms(SHM, root)}


def test_without_a_limit_only_the_file_system_counts(tmp_path: Path) -> None:
    assert set(free(tmp_path)) == {"/dev/shm"}


def test_the_file_system_counts_beside_the_machines_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert set(free(tmp_path)) == {"/dev/shm", "the machine"}
    assert free(tmp_path)["the machine"] == 64 * 1024


def test_what_just_fits_is_taken_and_one_block_more_is_not() -> None:
    limits = (Room("large", 1 << 40, ""), Room("tight", 5 * 4096, "buy more"))
    require_room(RegionShape(4, 4096), limits)
    with pytest.raises(CapacityError, match="tight has 20480 bytes left: at most 4 blocks fit; ask for fewer, or buy"):
        require_room(RegionShape(5, 4096), limits)
    with pytest.raises(CapacityError, match="has 0 bytes left: at most 0 blocks fit"):
        require_room(RegionShape(1, 4096), (Room("full", -10, "empty it"),))
    require_room(RegionShape(5, 4096), ())
