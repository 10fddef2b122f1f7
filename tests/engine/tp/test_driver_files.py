"""What a CUDA driver leaves in shared memory for a rank goes when the ranks have it, and with the rank."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hisparse.engine import load_model
from hisparse.engine.tp import ProcessExecutor, TensorParallel, processes
from hisparse.engine.tp.driver_files import remove_driver_files
from hisparse.errors import BackendError
from tests.engine.parity import Case, prompt, run
from tests.engine.tp.faults import At, kill

CASE = Case((prompt(1, 40),), max_tokens=2, parallel=TensorParallel(2, start_s=60, step_s=60, close_s=10))


def driver_file(folder: Path, pid: int) -> Path:
    """Made as by the driver for process `pid`."""
    path = folder / f"cuda.shm.{os.getuid():x}.{pid:x}.1"
    path.write_bytes(bytes(4096))
    return path


def test_only_what_that_process_made_is_removed(tmp_path: Path) -> None:
    since_s = time.time() - 1
    own, other, older = (driver_file(tmp_path, pid) for pid in (0xABC, 0xBC, 0xABD))
    unlike = tmp_path / "abc"
    unlike.touch()
    os.utime(older, (since_s - 5, since_s - 5))
    for pid in (0xABC, 0xABD, 0xDEF):
        remove_driver_files(pid, since_s, tmp_path)
    assert not own.exists()
    assert all(path.exists() for path in (other, older, unlike))


@dataclass(frozen=True)
class LikeADriver:
    """Every rank has such a file from its first word on; one of them may break."""

    folder: Path
    fault: Callable[[int], None] | None = None

    def __call__(self, rank: int) -> None:
        driver_file(self.folder, os.getpid())
        if self.fault is not None:
            self.fault(rank)


def test_nothing_is_left_of_ranks_that_ended_or_were_killed_and_no_name_while_they_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = load_model("builtin:tiny-v32")
    seen: list[int] = []
    execute = ProcessExecutor.execute

    def look_and_execute(*arguments: object) -> object:
        seen.append(len(os.listdir(tmp_path)))
        return execute(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ProcessExecutor, "execute", look_and_execute)
    monkeypatch.setattr(
        processes, "remove_driver_files", lambda pid, since_s: remove_driver_files(pid, since_s - 1, tmp_path)
    )
    monkeypatch.setattr(ProcessExecutor, "prepare", LikeADriver(tmp_path))
    run(loaded, CASE)
    assert set(seen) == {0}
    monkeypatch.setattr(ProcessExecutor, "prepare", LikeADriver(tmp_path, At(kill, 1, "loads the model")))
    with pytest.raises(BackendError, match="SIGKILL"):
        run(loaded, CASE)
    assert os.listdir(tmp_path) == []
