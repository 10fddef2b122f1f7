"""Every call of a tier's life fails once, in more than one way; nothing is ever worse than a miss."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse.errors import InputError
from tests.offload.files.driven import DrivenFileSystem, nothing
from tests.offload.files.world import IDENTITY, World, block_file, key_of, namespace

MOST_CALLS = 2000


def failing(number: int, code: int) -> Callable[[int, str, tuple[Any, ...]], None]:
    def act(at: int, name: str, arguments: tuple[Any, ...]) -> None:
        if at == number:
            raise OSError(code, os.strerror(code))

    return act


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def worlds(fast_path: Path) -> Iterator[World]:
    first = World.make(fast_path / "first")
    for number in range(MOST_CALLS):
        yield (world := first.copy(fast_path / str(number)))
        shutil.rmtree(world.root)


def run_to_the_end(world: World, filesystem: DrivenFileSystem) -> bool:
    """Whether the tier started. That it does not is one clear line that names the directory."""
    said = None
    try:
        world.run(filesystem)
    except InputError as error:
        said = str(error)
    assert said is None or (str(world.root) in said and "\n" not in said)
    return said is None


def check_afterwards(world: World, descriptors: int, threads: int) -> None:
    """Nothing that must hold was lost, the next tier starts well, and no descriptor or thread is left of either."""
    world.check()
    world.check_restart()
    assert num_descriptors() == descriptors
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("code", "late"),
    [
        (errno.EIO, False),
        (errno.EIO, True),
        (errno.EINVAL, False),
        (errno.ENOSPC, False),
        (errno.EDQUOT, True),
        (errno.ENOENT, False),
    ],
    ids=["error instead", "error afterwards", "refusal instead", "full instead", "quota afterwards", "gone instead"],
)
def test_whichever_call_fails_nothing_partial_is_visible_and_nothing_foreign_is_lost(
    code: int, late: bool, fast_path: Path
) -> None:
    """`instead`: the call does nothing and fails. `afterwards`: it does its work and fails all the same."""
    descriptors, threads = num_descriptors(), threading.active_count()
    failed: list[str] = []
    num_started = 0
    for number, world in enumerate(worlds(fast_path)):
        act = failing(number, code)
        filesystem = DrivenFileSystem(nothing, act) if late else DrivenFileSystem(act)
        num_started += run_to_the_end(world, filesystem)
        check_afterwards(world, descriptors, threads)
        if len(filesystem.calls) <= number:
            break
        failed.append(filesystem.calls[number])
    assert set(failed) >= {"open", "close", "read", "write", "sync", "rename", "unlink", "touch", "lock"}
    assert set(failed) >= {"status", "status_of", "list_directory", "make_directory"}
    assert 0 < num_started < len(failed)


MAKES_SOMETHING = ("write", "sync", "make_directory", "rename", "close")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_from_whichever_call_on_nothing_can_be_written_nothing_partial_is_visible(code: int, fast_path: Path) -> None:
    """Not once but for good, as on a disk that is full or was remounted; afterwards all is well again."""
    descriptors, threads = num_descriptors(), threading.active_count()
    num_started = 0
    for number, world in enumerate(worlds(fast_path)):

        def refuse(at: int, name: str, arguments: tuple[Any, ...], first: int = number) -> None:
            is_new = name == "open" and arguments[1] & os.O_CREAT
            if at >= first and (name in MAKES_SOMETHING or is_new):
                raise OSError(code, os.strerror(code))

        filesystem = DrivenFileSystem(refuse)
        num_started += run_to_the_end(world, filesystem)
        check_afterwards(world, descriptors, threads)
        if len(filesystem.calls) <= number:
            break
    assert 0 < num_started < number


def test_a_fault_free_run_does_all_that_the_faults_are_to_meet(fast_path: Path) -> None:
    """Else a call would never be failed where it matters."""
    world = World.make(fast_path)
    stats = world.run(DrivenFileSystem()).stats()
    assert (stats.stores, stats.loads, stats.set_aside, stats.swept) == (4, 3, 2, 2)
    assert stats.evicted > 0
    assert block_file(fast_path, key_of(22)).exists()
    world.check()
    world.check_restart()


def test_a_full_disk_in_mid_store_drops_the_store_and_leaves_nothing(fast_path: Path) -> None:
    def full(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "write" and sum(part.nbytes for part in arguments[1]) > 4096:
            os.pwrite(arguments[0], b"x" * 4096, 0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world = World.make(fast_path)
    stats = world.run(DrivenFileSystem(full)).stats()
    assert (stats.stores, stats.stores_failed) == (0, 4)
    assert [path.name for path in (fast_path / ".hisparse").iterdir()] == ["upload.tmp"]
    world.check()
    world.check_restart()


def test_the_check_sees_a_partial_file_and_a_lost_one(fast_path: Path) -> None:
    world = World.make(fast_path)
    world.check()
    whole = block_file(fast_path, key_of(0)).read_bytes()
    block_file(fast_path, key_of(0)).write_bytes(whole[:-1])
    with pytest.raises(AssertionError, match="not whole"):
        world.check()
    block_file(fast_path, key_of(0)).write_bytes(whole)
    (namespace(fast_path, IDENTITY) / "README").unlink()
    with pytest.raises(AssertionError, match="belongs to somebody else"):
        world.check()
