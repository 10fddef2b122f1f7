"""Real processes that start, fail and are killed at every step: survivors end, and nothing stays in shared memory."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest

from hisparse.errors import BackendError
from hisparse.offload.region import Membership, SharedRegion, new_region_name
from tests.offload.members import NUM_BLOCKS, PROCESSES, ROW_BYTES, Step, be_member, end, shared_folder, start

KILLED = -signal.SIGKILL
SHORT_SECONDS = 0.05
PATIENT_SECONDS = 2.0
LONG_SECONDS = 20.0

REGION, FILE, CONTROL = ("hisparse.offload." + name for name in ("region", "shared_file", "region_control"))

CREATION = (
    f"{REGION}:sweep_regions",
    f"{REGION}:require_room",
    f"{FILE}:open_unnamed",
    f"{CONTROL}:lock_shared",
    f"{FILE}:set_size",
    f"{FILE}:map_shared",
    f"{FILE}:prefault",
    f"{CONTROL}:ControlPage.write",
    f"{CONTROL}:ControlPage.set_mapped",
    f"{FILE}:give_name",
    f"{REGION}:SharedRegion.wait_for_members",
    f"{REGION}:SharedRegion.row",
    f"{REGION}:SharedRegion.close",
)
ATTACHMENT = (
    f"{FILE}:open_named",
    f"{CONTROL}:lock_shared",
    f"{CONTROL}:read_shape",
    f"{FILE}:map_shared",
    f"{CONTROL}:remove_name",
    f"{CONTROL}:ControlPage.set_mapped",
    f"{FILE}:prefault",
    f"{REGION}:SharedRegion.wait_for_members",
    f"{REGION}:SharedRegion.row",
    f"{REGION}:SharedRegion.close",
)


def both_sides(places: tuple[str, ...]) -> list[Step]:
    return [Step(place, dies_after) for place in places for dies_after in (False, True)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as found:
        yield found
        assert list(found.iterdir()) == [], "a test left files in shared memory"


def run(folder: Path, steps: dict[int, Step], timeout_s: float = LONG_SECONDS) -> list[int]:
    """One start of two processes, of which some die. Their exit codes."""
    name = new_region_name("engine")
    processes = [
        start(be_member, name, Membership(member, 2, b"", timeout_s), folder, steps.get(member)) for member in (0, 1)
    ]
    return [end(process) for process in processes]


def test_processes_share_one_memory_and_leave_no_name(folder: Path) -> None:
    name = new_region_name("engine")
    own = SharedRegion.create(name, NUM_BLOCKS, ROW_BYTES, Membership(0, 4, b"", LONG_SECONDS), folder)
    others = [start(be_member, name, Membership(member, 4, b"", LONG_SECONDS), folder) for member in (1, 2, 3)]
    own.wait_for_members()
    assert list(folder.iterdir()) == []
    assert [end(process) for process in others] == [0, 0, 0]
    assert own.rows[:4].max(axis=1).tolist() == own.rows[:4].min(axis=1).tolist() == [0, 2, 3, 4]
    assert own.close() == ()


@pytest.mark.parametrize("step", both_sides(CREATION), ids=str)
def test_a_creator_that_is_killed_leaves_nothing_once_the_other_gave_up(folder: Path, step: Step) -> None:
    name = new_region_name("engine")
    creator = start(be_member, name, Membership(0, 2, b"", LONG_SECONDS), folder, step)
    while creator.is_alive() and not list(folder.iterdir()):
        time.sleep(0.001)
    with suppress(BackendError):  # where nothing appeared
        other = SharedRegion.attach(name, Membership(1, 2, b"", SHORT_SECONDS), folder)
        other.wait_for_members()
        assert other.close() == ()
    assert end(creator) == KILLED


@pytest.mark.parametrize("step", both_sides(ATTACHMENT), ids=str)
def test_a_member_that_is_killed_leaves_nothing_once_the_other_gave_up(folder: Path, step: Step) -> None:
    name = new_region_name("engine")
    region = SharedRegion.create(name, NUM_BLOCKS, ROW_BYTES, Membership(0, 2, b"", SHORT_SECONDS), folder)
    member = start(be_member, name, Membership(1, 2, b"", LONG_SECONDS), folder, step)
    assert end(member) == KILLED
    with suppress(BackendError):
        region.wait_for_members()
    assert region.close() == ()


def test_what_is_left_when_all_are_killed_in_the_middle_stays_until_the_next_start(folder: Path) -> None:
    """Also the control of the tests above: where nobody is left to give up, a file does stay."""
    name = new_region_name("engine")
    waiting = Step(f"{REGION}:SharedRegion.wait_for_members", dies_after=False)
    for member in (0, 1):
        assert end(start(be_member, name, Membership(member, 3), folder, waiting)) == KILLED
    assert len(list(folder.iterdir())) == 1
    SharedRegion.create(new_region_name("engine"), NUM_BLOCKS, ROW_BYTES, directory=folder).close()
    assert list(folder.iterdir()) == []


def test_five_restarts_each_killed_at_another_step_leak_nothing(folder: Path) -> None:
    steps = (
        {0: Step(f"{FILE}:prefault", dies_after=True)},
        {0: Step(f"{FILE}:give_name", dies_after=True), 1: Step(f"{FILE}:open_named", dies_after=True)},
        {1: Step(f"{CONTROL}:ControlPage.set_mapped", dies_after=False)},
        {0: Step(f"{REGION}:SharedRegion.row", dies_after=False), 1: Step(f"{REGION}:SharedRegion.row", True)},
        {},
    )
    for deadly in steps:
        codes = run(folder, deadly, timeout_s=PATIENT_SECONDS)
        assert [code == KILLED for code in codes] == [member in deadly for member in (0, 1)]
    assert codes == [0, 0]
    assert list(folder.iterdir()) == []


def hold(folder: Path, num_blocks: int, held: Event) -> None:
    region = SharedRegion.create("large", num_blocks, ROW_BYTES, directory=folder)
    held.set()
    time.sleep(LONG_SECONDS)
    region.close()


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_the_memory_of_a_killed_process_comes_back(folder: Path) -> None:
    """Other tests use shared memory at the same time, but far less than this."""
    size = 64 << 20
    before = free_bytes(folder)
    held = PROCESSES.Event()
    process = start(hold, folder, size // ROW_BYTES, held)
    assert held.wait(LONG_SECONDS)
    assert free_bytes(folder) < before - size // 2
    process.kill()
    assert end(process) == KILLED
    assert free_bytes(folder) > before - size // 2


def test_two_generations_that_overlap_do_not_touch_each_other(folder: Path) -> None:
    """The old one is still waiting for a member, or has it and is closing, while the new one starts and sweeps."""
    old_name = new_region_name("engine")
    old = SharedRegion.create(old_name, NUM_BLOCKS, ROW_BYTES, Membership(0, 2, b"", LONG_SECONDS), folder)
    assert run(folder, {}) == [0, 0]
    assert list(folder.iterdir()) == [old.path], "a start must not sweep a region that is waiting"
    late = start(be_member, old_name, Membership(1, 2, b"", LONG_SECONDS), folder)
    old.wait_for_members()
    assert end(late) == 0
    assert (old.row(1) == 2).all()
    assert old.close() == ()


def test_starts_that_run_at_the_same_time_all_succeed(folder: Path) -> None:
    names = [new_region_name("engine") for _ in range(4)]
    processes = [
        start(be_member, name, Membership(member, 2, b"", LONG_SECONDS), folder) for member in (1, 0) for name in names
    ]
    assert [end(process) for process in processes] == [0] * 8


def write_for_ever(name: str, folder: Path) -> None:
    region = SharedRegion.attach(name, Membership(1, 2, b"", LONG_SECONDS), folder)
    while True:
        region.row(0)[:] = 1
        region.row(0)[:] = 2


def test_a_member_that_is_killed_while_it_writes_leaves_the_region_to_the_others(folder: Path) -> None:
    name = new_region_name("engine")
    region = SharedRegion.create(name, NUM_BLOCKS, ROW_BYTES, Membership(0, 2, b"", LONG_SECONDS), folder)
    region.row(1)[:] = 9
    writer = start(write_for_ever, name, folder)
    region.wait_for_members()
    deadline = time.monotonic() + LONG_SECONDS
    while not region.row(0).any():
        assert time.monotonic() < deadline
    writer.kill()
    assert end(writer) == KILLED
    assert set(np.unique(region.row(0))) <= {1, 2}
    assert (region.row(1) == 9).all()
    assert region.close() == ()
