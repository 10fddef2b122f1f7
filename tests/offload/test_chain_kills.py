"""Starts that are killed between caches and files: what is left, and what the next start makes of it."""

import signal
from dataclasses import replace

import pytest

from hisparse.offload.sharding import Topology
from tests.offload.chain import MissedError, Start, run_here, run_processes
from tests.offload.members import Step

KILLED = -signal.SIGKILL
FILES = "hisparse.offload.files"
KILLS = [
    (0, Step("hisparse.offload.shared_file:give_name", dies_after=True)),
    (1, Step("hisparse.offload.region_control:ControlPage.set_mapped", dies_after=False)),
    (0, Step("hisparse.offload.page_copies:copy_run", dies_after=False)),
    (1, Step("hisparse.offload.page_copies:copy_run", dies_after=True)),
    (0, Step(f"{FILES}.filesystem:LocalFileSystem.open", dies_after=True)),
    (0, Step(f"{FILES}.filesystem:LocalFileSystem.write", dies_after=True)),
    (0, Step(f"{FILES}.filesystem:LocalFileSystem.rename", dies_after=False)),
    (0, Step(f"{FILES}.filesystem:LocalFileSystem.rename", dies_after=True)),
]


@pytest.mark.parametrize("killed", KILLS, ids=lambda killed: f"rank {killed[0]} {killed[1]}")
def test_a_writer_that_is_killed_leaves_whole_chunks_or_none_and_the_next_start_works(
    start: Start, killed: tuple[int, Step]
) -> None:
    writer = replace(start, stores=(0, 1, 2), wait_s=5.0)
    reader = replace(start, topology=Topology(4), loads=(0, 1, 2))
    codes = run_processes(writer, killed=killed)
    assert codes[killed[0]] == KILLED
    assert list(start.memory.iterdir()) == []
    there = reader.stored()
    assert len(there) < 3
    with pytest.raises(MissedError) as missed:
        run_here(reader)
    assert (missed.value.found, missed.value.promised) == (there, there)
    assert list((start.files / ".hisparse").iterdir()) == [], "a start sweeps what a dead one was writing"
    assert run_processes(writer) == [0, 0]
    assert run_processes(reader) == [0] * 4


def test_the_kill_in_the_middle_of_publishing_leaves_a_part_of_the_chunks(start: Start) -> None:
    """The control of the test above: there is something to be seen in between, and temporaries to be swept."""
    writer = replace(start, stores=(0, 1, 2))
    reader = replace(start, loads=(0, 1, 2))
    rename = f"{FILES}.filesystem:LocalFileSystem.rename"
    assert run_processes(writer, killed=(0, Step(rename, dies_after=False)))[0] == KILLED
    assert any(path.suffix == ".tmp" for path in (start.files / ".hisparse").iterdir())
    assert reader.stored() == []
    run_here(replace(start, stores=(0,)))
    assert run_processes(replace(writer, stores=(1, 2)), killed=(0, Step(rename, dies_after=True)))[0] == KILLED
    assert 1 <= len(reader.stored()) <= 2


def test_starts_that_are_killed_one_after_the_other_on_one_root_lose_nothing_that_was_whole(start: Start) -> None:
    """Each loads what it finds and stores three chunks more, until one that nobody kills does the same."""
    there: list[int] = []
    for number, killed in enumerate([*KILLS, None]):
        new = tuple(range(3 * number, 3 * number + 3))
        topology = Topology(4 if number % 2 else 2)
        writer = replace(start, topology=topology, loads=tuple(there), stores=new, wait_s=5.0)
        codes = run_processes(writer, killed=killed)
        assert [code == KILLED for code in codes] == [
            killed is not None and rank == killed[0] for rank in range(topology.tp)
        ]
        assert list(start.memory.iterdir()) == []
        found = replace(start, loads=(*there, *new)).stored()
        assert found[: len(there)] == there
        there = found
    assert codes == [0, 0]
    assert there[-3:] == list(new)
    run_here(replace(start, topology=Topology(8), loads=tuple(there)))


@pytest.mark.parametrize(
    "killed",
    [
        (0, Step(f"{FILES}.filesystem:LocalFileSystem.read", dies_after=False)),
        (0, Step(f"{FILES}.filesystem:LocalFileSystem.read", dies_after=True)),
        (1, Step("hisparse.offload.page_copies:copy_run", dies_after=False)),
    ],
    ids=lambda killed: f"rank {killed[0]} {killed[1]}",
)
def test_a_reader_that_is_killed_leaves_the_files_as_they_were(start: Start, killed: tuple[int, Step]) -> None:
    run_here(replace(start, stores=(0, 1)))
    reader = replace(start, topology=Topology(4), loads=(0, 1), wait_s=5.0)
    assert run_processes(reader, killed=killed)[killed[0]] == KILLED
    assert list(start.memory.iterdir()) == []
    assert reader.stored() == [0, 1]
    assert run_processes(reader) == [0] * 4
