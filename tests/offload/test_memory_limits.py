"""The tightest limit is found wherever it is set, and cached files do not count against a cgroup."""

from pathlib import Path

import pytest

from hisparse.errors import CapacityError
from hisparse.offload.memory_limits import Room, require_room, rooms
from hisparse.offload.region_control import RegionShape

SHM = Path("/dev/shm")


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def free(root: Path) -> dict[str, int]:
    return {room.name: room.free_bytes for room in rooms(SHM, root)}


def test_without_a_limit_only_the_file_system_counts(tmp_path: Path) -> None:
    assert set(free(tmp_path)) == {"/dev/shm"}


def test_the_machines_memory_counts(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   64 kB\nHugePages_Total: 0\n"})
    assert free(tmp_path)["the machine"] == 64 * 1024


def test_a_cgroup_of_version_2_counts_without_its_cached_files(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/engine\n",
            "sys/fs/cgroup/pod/engine/memory.max": "1000\n",
            "sys/fs/cgroup/pod/engine/memory.current": "700\n",
            "sys/fs/cgroup/pod/engine/memory.stat": "anon 100\ninactive_file 150\nactive_file 50\nshmem 400\n",
        },
    )
    assert free(tmp_path)["the memory limit of the cgroup"] == 500


@pytest.mark.parametrize("tight", ["", "pod/", "pod/engine/"])
def test_the_limit_of_every_parent_counts(tmp_path: Path, tight: str) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/pod/engine\n"})
    for folder in ("", "pod/", "pod/engine/"):
        limit = "100" if folder == tight else "max"
        write(tmp_path, {f"sys/fs/cgroup/{folder}memory.max": limit, f"sys/fs/cgroup/{folder}memory.current": "40"})
    assert free(tmp_path)["the memory limit of the cgroup"] == 60


def test_a_cgroup_of_version_1_counts_and_its_lack_of_a_limit_does_not(tmp_path: Path) -> None:
    memory = "sys/fs/cgroup/memory/"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/\n4:memory:/of/the/host\n0::/\n",
            f"{memory}memory.limit_in_bytes": "5000",
            f"{memory}memory.usage_in_bytes": "3000",
            f"{memory}memory.stat": "total_inactive_file 600\ntotal_active_file 400\n",
        },
    )
    assert free(tmp_path)["the memory limit of the cgroup"] == 3000
    write(tmp_path, {f"{memory}memory.limit_in_bytes": "9223372036854771712"})
    assert "the memory limit of the cgroup" not in free(tmp_path)


def test_what_just_fits_is_taken_and_one_block_more_is_not() -> None:
    limits = (Room("large", 1 << 40, ""), Room("tight", 5 * 4096, "buy more"))
    require_room(RegionShape(4, 4096), limits)
    with pytest.raises(CapacityError, match="tight has 20480 bytes left: at most 4 blocks fit; ask for fewer, or buy"):
        require_room(RegionShape(5, 4096), limits)
    with pytest.raises(CapacityError, match="has 0 bytes left: at most 0 blocks fit"):
        require_room(RegionShape(1, 4096), (Room("full", -10, "empty it"),))
    require_room(RegionShape(5, 4096), ())
