"""What ranks could leave behind when they end: processes, shared memory with and without a name, open files."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hisparse.engine import offload
from hisparse.engine.tp.failures import Rank
from hisparse.engine.tp.processes import RankProcesses
from hisparse.offload.region import new_region_name

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Check at the end that nothing is left of any rank that was started within. Gives their process ids."""
    pids: list[int] = []
    regions: list[str] = []

    def name_and_remember(label: str) -> str:
        regions.append(new_region_name(label))
        return regions[-1]

    monkeypatch.setattr(offload, "new_region_name", name_and_remember)
    start = RankProcesses._start

    def start_and_remember(*arguments: Any) -> Rank:
        rank = start(*arguments)
        pids.append(rank.process.pid or 0)
        return rank

    monkeypatch.setattr(RankProcesses, "_start", start_and_remember)
    assert shared_memory_of_this_process() == []
    yield pids
    assert [pid for pid in pids if is_alive(pid)] == []
    assert shared_memory_of_this_process() == []
    assert [file for file in os.listdir(SHARED_MEMORY) for name in regions if name in file] == []
    # As a CUDA driver names what it shares with other processes.
    assert [path for pid in pids for path in SHARED_MEMORY.glob(f"*.{pid:x}.*")] == []
    assert multiprocessing.active_children() == []


def shared_memory_of_this_process() -> list[str]:
    """Files of shared memory, ours by name, that it has open or mapped."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    links += Path("/proc/self/maps").read_text().split()
    return sorted({link for link in links if "memfd:hisparse" in link})


def is_alive(pid: int) -> bool:
    """Whether a process is there, and not only its exit code, which nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
