"""Leavings of ended processes go, those of living ones stay, and nobody else's file is touched."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hisparse.errors import InputError
from hisparse.offload.files.filesystem import LocalFileSystem
from hisparse.offload.files.work_folder import open_folder, sweep
from tests.offload.files.driven import DrivenFileSystem

LOCAL = LocalFileSystem()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".hisparse").iterdir())


def test_a_living_instance_keeps_its_temporaries(tmp_path: Path) -> None:
    folder = open_folder(LOCAL, str(tmp_path))
    temporary = Path(folder.new_path())
    temporary.write_bytes(b"half")
    assert sweep(LOCAL, str(tmp_path)) == 0
    assert temporary.exists()
    temporary.unlink()
    folder.close(is_idle=True)
    assert names(tmp_path) == []


def test_another_process_keeps_its_temporaries_while_it_lives(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from hisparse.offload.files.filesystem import LocalFileSystem\n"
        "from hisparse.offload.files.work_folder import open_folder\n"
        "path = open_folder(LocalFileSystem(), sys.argv[1]).new_path()\n"
        "open(path, 'w').write('half')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert sweep(LOCAL, str(tmp_path)) == 0
        assert len(names(tmp_path)) == 2
        process.kill()
        process.wait(10)
        assert sweep(LOCAL, str(tmp_path)) == 1
    assert names(tmp_path) == []


def test_only_names_of_ours_are_removed(tmp_path: Path) -> None:
    work = tmp_path / ".hisparse"
    work.mkdir()
    mine = ["0123456789abcdef-1.tmp", "0123456789abcdef.lock", "00000000000000ff-22.tmp"]
    foreign = ["upload.tmp", "0123456789abcdef-x.tmp", "0123456789ABCDEF-1.tmp", "0123456789abcdef.lock.bak"]
    for name in (*mine, *foreign):
        (work / name).write_bytes(b"x")
    assert sweep(LOCAL, str(tmp_path)) == 2
    assert names(tmp_path) == sorted(foreign)


def test_where_there_are_no_locks_nothing_is_swept(tmp_path: Path) -> None:
    """Nobody can tell there whether a writer lives."""

    def refuse(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "lock":
            raise OSError(95, os.strerror(95))

    filesystem = DrivenFileSystem(refuse)
    folder = open_folder(filesystem, str(tmp_path))
    temporary = Path(folder.new_path())
    temporary.write_bytes(b"half")
    assert sweep(filesystem, str(tmp_path)) == 0
    assert temporary.exists()
    folder.close(is_idle=True)


def test_a_sweep_between_creation_and_lock_costs_another_try(tmp_path: Path) -> None:
    swept = []

    def rival(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "lock" and not swept:
            swept.append(sweep(LOCAL, str(tmp_path)))

    folder = open_folder(DrivenFileSystem(rival), str(tmp_path))
    assert swept == [0]
    assert len(names(tmp_path)) == 1
    assert sweep(LOCAL, str(tmp_path)) == 0
    assert len(names(tmp_path)) == 1
    folder.close(is_idle=True)


def test_a_rival_that_never_rests_is_one_clear_line(tmp_path: Path) -> None:
    def rival(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "lock":
            sweep(LOCAL, str(tmp_path))

    with pytest.raises(InputError, match="removes lock files"):
        open_folder(DrivenFileSystem(rival), str(tmp_path))
