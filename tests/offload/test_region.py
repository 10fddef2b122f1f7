"""A shared region is whole when others see it, has no name once all do, and is never another generation's to remove."""

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hisparse.errors import BackendError, CapacityError, InputError, InvariantError
from hisparse.offload import region_control, region_room, shared_file
from hisparse.offload.region import Membership, SharedRegion, new_region_name
from hisparse.offload.region_sweep import PREFIX, sweep_regions
from hisparse.worker.memory_limits import Room
from tests.offload.members import NUM_BLOCKS, ROW_BYTES, shared_folder

SHORT = 0.05


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as found:
        yield found
        assert list(found.iterdir()) == [], "a test left files in shared memory"


def create(folder: Path, name: str = "one", members: int = 1, digest: bytes = b"") -> SharedRegion:
    return SharedRegion.create(name, NUM_BLOCKS, ROW_BYTES, Membership(0, members, digest, SHORT), folder)


def attach(folder: Path, name: str = "one", member: int = 1, members: int = 2, digest: bytes = b"") -> SharedRegion:
    return SharedRegion.attach(name, Membership(member, members, digest, SHORT), folder)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_rows_are_zero_at_first_and_the_same_memory_for_every_member(folder: Path) -> None:
    first, second = create(folder, members=2), attach(folder)
    assert not second.rows.any()
    assert second.rows.shape == (NUM_BLOCKS, ROW_BYTES)
    first.row(3)[5:9] = 7
    second.row(NUM_BLOCKS - 1)[-1] = 8
    assert np.array_equal(first.rows, second.rows)
    assert first.address != second.address
    assert (second.rows[3, 5:9] == 7).all()
    assert first.rows[-1, -1] == 8
    assert first.close() == second.close() == ()


def test_rows_start_on_system_pages(folder: Path) -> None:
    region = create(folder)
    assert region.address % 4096 == 0
    assert region.row(1).ctypes.data == region.address + region.row_bytes
    region.close()


def test_the_name_is_there_from_creation_until_the_last_member_has_mapped_the_region(folder: Path) -> None:
    regions = [create(folder, members=3)]
    assert names(folder) == [f"{PREFIX}one"]
    assert stat.S_IMODE(regions[0].path.stat().st_mode) == 0o600
    regions.append(attach(folder, member=2, members=3))
    assert names(folder) == [f"{PREFIX}one"]
    assert not regions[0].is_shared_by_all()
    regions.append(attach(folder, member=1, members=3))
    assert names(folder) == []
    for region in regions:
        region.wait_for_members()
        region.close()


def test_a_region_of_one_member_never_has_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "give_name", None)
    region = create(folder)
    assert region.is_shared_by_all()
    region.close()


def test_all_pages_are_backed_before_others_see_them(folder: Path) -> None:
    region = create(folder, members=2)
    assert region.path.stat().st_blocks * 512 == NUM_BLOCKS * ROW_BYTES + region_control.CONTROL_BYTES
    region.close()


@pytest.mark.parametrize("code", sorted(shared_file._NO_POPULATE))
def test_kernels_that_cannot_populate_allocate_and_keep_what_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(shared_file, "_madvise_function", lambda: lambda *_: code)
    first = create(folder, members=2)
    assert first.path.stat().st_blocks * 512 == NUM_BLOCKS * ROW_BYTES + region_control.CONTROL_BYTES
    first.rows[:] = 9
    second = attach(folder)
    assert (second.rows == 9).all()
    first.close()
    second.close()


def test_members_that_do_not_come_are_named_and_closing_removes_the_file(folder: Path) -> None:
    region = create(folder, members=4)
    other = attach(folder, member=2, members=4)
    with pytest.raises(BackendError, match=r"members 1, 3 did not map the shared region .*one in 0.05 s"):
        region.wait_for_members()
    assert names(folder) == [f"{PREFIX}one"]
    assert region.close() == ()
    assert names(folder) == []
    with pytest.raises(BackendError, match="before another member gave up"):
        other.wait_for_members()
    other.close()


def test_a_region_that_is_dropped_before_all_have_it_leaves_no_file_and_no_descriptor(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    region = create(folder, members=2)
    del region
    assert names(folder) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_close_reports_views_that_keep_the_memory_and_they_stay_valid(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    region = create(folder)
    view = region.row(2)
    view[:] = 5
    with caplog.at_level(logging.WARNING):
        (problem,) = region.close()
    assert "36864 bytes" in problem
    assert "stay mapped: views of its rows are in use" in problem
    assert problem in caplog.text
    assert (view == 5).all()
    assert region.close() == ()
    for use in (lambda: region.rows, lambda: region.address, region.is_shared_by_all, region.wait_for_members):
        with pytest.raises(InvariantError, match="used after it was closed"):
            use()


def test_close_reports_a_file_that_it_could_not_remove(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region = create(folder, members=2)
    with monkeypatch.context() as patch:
        patch.setattr(region_control, "remove_name", _refuse)
        (problem,) = region.close()
    assert problem == f"{region.path} could not be removed (Permission denied); the next start sweeps it"
    assert sweep_regions(folder).removed == (region.path,)


def _refuse(*_: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_generations_of_one_name_cannot_remove_each_others_file(folder: Path) -> None:
    """The older one stays alive: one of its members waits for one that never comes."""
    old = create(folder, members=2)
    old.path.unlink()  # whoever it was
    new = create(folder, members=2)
    assert old.close() == ()
    assert names(folder) == [f"{PREFIX}one"], "the new generation's file must stay"
    other = attach(folder)
    new.row(0)[:] = 1
    assert (other.row(0) == 1).all()
    new.close()
    other.close()


def test_a_name_that_is_in_use_is_refused_and_stays(folder: Path) -> None:
    first = create(folder, members=2)
    with pytest.raises(InputError, match="exists and is in use, or is not ours: give every start a region name"):
        create(folder, members=2)
    second = attach(folder)
    first.wait_for_members()
    first.close()
    second.close()


def test_names_of_two_starts_differ() -> None:
    assert len({new_region_name("engine") for _ in range(100)}) == 100
    with pytest.raises(InputError, match="cannot name a region"):
        new_region_name("../engine")


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "x" * 201])
def test_names_that_are_no_file_names_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot name a region"):
        create(folder, name)


def test_a_member_of_another_layout_or_number_is_refused_and_the_region_goes_on(folder: Path) -> None:
    first = create(folder, members=2, digest=b"layout")
    with pytest.raises(InputError, match="has another layout than member 1"):
        attach(folder, digest=b"other")
    with pytest.raises(InputError, match="is for 2 members; this process expects 3"):
        attach(folder, members=3, digest=b"layout")
    with pytest.raises(InputError, match=r"member 0 of the shared region .* is there already"):
        attach(folder, member=0, digest=b"layout")
    second = attach(folder, digest=b"layout")
    first.wait_for_members()
    first.close()
    second.close()


def test_attaching_to_what_is_no_region_is_refused_and_leaves_it(folder: Path) -> None:
    path = folder / f"{PREFIX}one"
    for content in (b"", b"x" * 4095, b"x" * 8192):
        path.write_bytes(content)
        with pytest.raises(InputError, match="is not a shared region of version 1: it is left alone"):
            attach(folder)
        assert path.read_bytes() == content
    path.unlink()
    path.symlink_to("/dev/null")
    with pytest.raises(InputError, match="cannot be opened as a shared region"):
        attach(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="cannot be opened as a shared region"):
        attach(folder)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(InputError, match="it is not a regular file"):
        attach(folder)
    path.unlink()


def test_a_region_that_never_appears_ends_the_wait(folder: Path) -> None:
    with pytest.raises(BackendError, match=r"no shared region appeared as .*one in 0.05 s: did its creator start"):
        attach(folder)


def test_a_sweep_removes_only_regions_that_nobody_uses(folder: Path) -> None:
    living = create(folder, "living", members=2)
    dead = create(folder, "dead", members=2)
    content = dead.path.read_bytes()
    dead.close()
    dead.path.write_bytes(content)  # as a process that was killed leaves it
    version = bytearray(content)
    version[-region_control.CONTROL_BYTES + 8] += 1
    foreign = {
        f"{PREFIX}later": bytes(version),
        f"{PREFIX}cut": content[:-1],
        f"{PREFIX}text": b"mine",
        "other": content,
    }
    for name, data in foreign.items():
        (folder / name).write_bytes(data)
    (folder / f"{PREFIX}link").symlink_to(folder / "other")

    report = sweep_regions(folder)
    assert report.removed == (dead.path,)
    assert report.in_use == (living.path,)
    assert {path.name for path in report.foreign} == foreign.keys() - {"other"}
    assert len(report.failed) == 1
    assert "link cannot be opened as a shared region" in report.failed[0]
    assert {name: (folder / name).read_bytes() for name in foreign} == foreign
    for name in (*foreign, f"{PREFIX}link"):
        (folder / name).unlink()
    living.close()


def test_a_file_that_cannot_be_removed_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / f"{PREFIX}dead"
    region = create(folder, "dead", members=2)
    content = path.read_bytes()
    region.close()
    path.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(region_control, "remove_name", _refuse)
        report = sweep_regions(folder)
    assert report.failed == (f"{path} could not be removed (Permission denied)",)
    assert not report.removed
    assert sweep_regions(folder).removed == (path,)


def test_creation_sweeps_what_the_dead_left_before_it_looks_for_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = create(folder, members=2)
    content = region.path.read_bytes()
    region.close()
    region.path.write_bytes(content)

    def room_that_the_file_takes(directory: Path) -> tuple[Room, ...]:
        return (Room("it", 0 if region.path.exists() else 1 << 30, "remove the file"),)

    monkeypatch.setattr("hisparse.offload.region.rooms", room_that_the_file_takes)
    create(folder, members=2).close()


def test_a_sweep_that_looks_at_the_file_only_delays_a_member(folder: Path) -> None:
    region = create(folder, members=2)
    content = region.path.read_bytes()
    region.close()
    region.path.write_bytes(content)
    with region.path.open("rb") as sweeper:
        fcntl.flock(sweeper, fcntl.LOCK_EX)
        with pytest.raises(BackendError, match="no shared region appeared"):
            attach(folder)
    assert sweep_regions(folder).removed == (region.path,)


@pytest.mark.parametrize(
    ("num_blocks", "row_bytes", "message"),
    [
        (0, 4096, "it takes at least one"),
        (-1, 4096, "it takes at least one"),
        (1, 4097, "rows are a multiple of 4096 bytes"),
        (1, 0, "rows are a multiple of 4096 bytes"),
        (1 << 51, 4096, "larger than any file"),
    ],
)
def test_sizes_that_no_region_has_are_refused(folder: Path, num_blocks: int, row_bytes: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SharedRegion.create("one", num_blocks, row_bytes, directory=folder)


def test_members_that_cannot_be_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="member 2 is not one of 2"):
        Membership(2, 2)
    with pytest.raises(InputError, match="1 to 2048 members, not 2049"):
        SharedRegion.create("one", 1, 4096, Membership(0, 2049), folder)
    with pytest.raises(InputError, match="a digest of 33 bytes is too long"):
        SharedRegion.create("one", 1, 4096, Membership(0, 1, bytes(33)), folder)


def test_a_block_that_is_not_there_is_refused(folder: Path) -> None:
    region = create(folder)
    for block in (-1, NUM_BLOCKS):
        with pytest.raises(InputError, match=f"block {block} is not one of the 8"):
            region.row(block)
    region.close()


def test_a_region_larger_than_shared_memory_is_refused_in_one_line_before_anything_is_allocated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "open_unnamed", None)
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with pytest.raises(CapacityError, match=r"at most \d+ blocks fit; ask for fewer, or") as caught:
        SharedRegion.create("one", 2 * free // 4096, 4096, directory=folder)
    assert "\n" not in str(caught.value)


def test_a_region_larger_than_the_cgroup_allows_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (Room("/dev/shm", 1 << 30, "enlarge it"), Room("the memory limit of the cgroup", 5 * 4096, "raise it"))
    monkeypatch.setattr("hisparse.offload.region.rooms", lambda _: limits)
    with pytest.raises(CapacityError) as caught:
        create(folder)
    assert str(caught.value) == (
        "a shared region of 8 blocks takes 36864 bytes, but the memory limit of the cgroup has 20480 bytes left: "
        "at most 4 blocks fit; ask for fewer, or raise it"
    )
    SharedRegion.create("one", 4, ROW_BYTES, directory=folder).close()


def test_memory_that_runs_out_meanwhile_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(shared_file, "_madvise_function", lambda: lambda *_: shared_file._FULL[0])
    with pytest.raises(CapacityError, match=r"could not back 36864 bytes of shared memory \(no space is left"):
        create(folder, members=2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_without_shared_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"there is no shared memory in .*missing"):
        SharedRegion.create("one", 1, 4096, directory=tmp_path / "missing")
    with pytest.raises(BackendError, match=r"there is no shared memory in .*missing"):
        region_room.rooms(tmp_path / "missing")
