"""The tightest limit of memory is found wherever it is set, and cached files do not count against a cgroup."""

from pathlib import Path

import pytest

from hisparse.errors import CapacityError
from hisparse.worker.backend import CpuBackend
from hisparse.worker.memory_limits import Room, memory_rooms, require_memory, tightest

AVAILABLE_KB = 64


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def free(root: Path) -> dict[str, int]:
    return {room.name: room.free_bytes for room in memory_rooms(root)}


def test_where_no_limit_is_known_there_is_none(tmp_path: Path) -> None:
    assert memory_rooms(tmp_path) == ()
    assert tightest(()) is None
    require_memory("a pool", 1 << 60, tmp_path)


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


def test_the_least_of_all_limits_counts() -> None:
    assert tightest((Room("large", 1 << 40, ""), Room("tight", 5, ""), Room("other", 6, ""))) == Room("tight", 5, "")


def test_a_pool_may_take_all_that_is_left_and_not_one_byte_more(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": f"MemAvailable: {AVAILABLE_KB} kB\n"})
    require_memory("a pool", AVAILABLE_KB << 10, tmp_path)
    with pytest.raises(
        CapacityError, match="a pool takes 65537 bytes of memory, but the machine has 65536 bytes left: make it"
    ):
        require_memory("a pool", (AVAILABLE_KB << 10) + 1, tmp_path)


def test_a_pool_that_this_machine_has_no_memory_for_is_refused_before_it_is_mapped() -> None:
    limit = tightest(memory_rooms())
    assert limit is not None
    with pytest.raises(CapacityError, match=r"the host pool takes .* make it smaller"):
        CpuBackend().allocate_host(2 * limit.free_bytes)
    with pytest.raises(CapacityError, match=r"the device's KV takes .* make it smaller"):
        CpuBackend().allocate_device(2 * limit.free_bytes)
