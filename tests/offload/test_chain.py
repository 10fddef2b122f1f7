"""KV that one topology computed is loaded by another, by way of files, after all processes that stored it have ended.

A cell of the matrix runs with a process for each rank where its name says so, and otherwise with ranks that take turns
in the test's own process, each with a region mapping and caches of its own: the code of a rank is the same.
"""

import itertools
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hisparse.errors import InputError
from hisparse.offload.certificate import certify
from hisparse.offload.files import attention_config_digest
from hisparse.offload.layout import Family
from hisparse.offload.sharding import Topology
from tests.offload.chain import (
    MISSED,
    REFUSED,
    WRONG,
    Flaw,
    MissedError,
    Start,
    Worker,
    WrongBytesError,
    run_here,
    run_processes,
)
from tests.offload.chain_model import CONFIG, Model
from tests.offload.members import PROCESSES

SPAWN = multiprocessing.get_context("spawn")
HEADS = [family for family in Family if family is not Family.LATENT]
SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Cell:
    """Of the matrix: one topology that stores, and those that load."""

    runs: str
    family: Family
    num_kv_heads: int
    blocks_per_chunk: int
    writer: int
    readers: tuple[int, ...]

    def __str__(self) -> str:
        readers = ",".join(map(str, self.readers))
        model = f"{self.family.value}-heads{self.num_kv_heads}-chunk{self.blocks_per_chunk}"
        return f"{self.runs}-{model}-tp{self.writer}-to-{readers}"

    def run(self, start: Start) -> None:
        """Fails when any rank does."""
        if self.runs == "turns":
            run_here(start)
        else:
            codes = run_processes(start, SPAWN if self.runs == "spawned" else PROCESSES)
            assert codes == [0] * start.topology.world


IN_PROCESSES = [
    Cell("spawned", Family.PACKED_NHD, 4, 4, 2, (4,)),
    Cell("spawned", Family.LATENT, 1, 4, 4, (2,)),
    Cell("processes", Family.PACKED_NHD, 8, 1, 8, (1, 2)),
    Cell("processes", Family.PACKED_HND, 2, 4, 4, (8,)),
    Cell("processes", Family.PACKED_HND, 4, 1, 1, (8,)),
    Cell("processes", Family.SPLIT_NHD, 1, 4, 2, (4,)),
    Cell("processes", Family.SPLIT_NHD, 8, 4, 4, (2,)),
    Cell("processes", Family.SPLIT_HND, 8, 1, 2, (8,)),
    Cell("processes", Family.SPLIT_HND, 2, 4, 8, (4,)),
    Cell("processes", Family.LATENT, 1, 1, 8, (1,)),
]
BY_TURNS = [
    *(Cell("turns", *cell, SIZES) for cell in itertools.product(HEADS, SIZES, (1, 4), SIZES)),
    *(Cell("turns", Family.LATENT, 1, *cell, SIZES) for cell in itertools.product((1, 4), SIZES)),
]


@pytest.mark.parametrize("cell", [*IN_PROCESSES, *BY_TURNS], ids=str)
def test_what_any_tp_stored_any_other_loads_from_files(cell: Cell, tmp_path: Path, memory: Path) -> None:
    model = Model(cell.family, cell.num_kv_heads)
    writer = Start(model, Topology(cell.writer), cell.blocks_per_chunk, tmp_path, memory, stores=(0, 1))
    cell.run(writer)
    for tp in cell.readers:
        reader = replace(writer, topology=Topology(tp), loads=(0, 1), stores=())
        assert reader.stored() == [0, 1]
        cell.run(reader)


SHARED_TOKENS = [
    Topology(2, dcp=2),
    Topology(1, pcp=2),
    Topology(2, pcp=2, interleave=2),
    Topology(4, dcp=2, interleave=4),
    Topology(4, dcp=2, pcp=2),
    Topology(8, dcp=4, interleave=2),
    Topology(8, dcp=2, pcp=2, interleave=4),
]


@pytest.mark.parametrize("topology", SHARED_TOKENS, ids=str)
@pytest.mark.parametrize("family", Family, ids=lambda family: family.value)
def test_ranks_that_share_tokens_load_what_they_stored(
    family: Family, topology: Topology, tmp_path: Path, memory: Path
) -> None:
    """And so does one rank alone, where its blocks hold as many tokens: the canonical page is the same."""
    heads = 1 if family is Family.LATENT else 2 if topology.tp // 2 % topology.dcp == 0 else 1
    writer = Start(Model(family, heads, tokens=16), topology, 2, tmp_path, memory, stores=(0, 1))
    run_here(writer)
    reader = replace(writer, loads=(0, 1), stores=())
    assert reader.stored() == [0, 1]
    run_here(reader)
    run_here(replace(reader, topology=Topology(1)))


@pytest.mark.parametrize(
    ("family", "topology"),
    [(Family.PACKED_NHD, Topology(4, dcp=2, interleave=2)), (Family.LATENT, Topology(2, dcp=2, pcp=2))],
    ids=str,
)
def test_processes_that_share_tokens_load_what_they_stored(
    family: Family, topology: Topology, tmp_path: Path, memory: Path
) -> None:
    writer = Start(Model(family, 1, tokens=16), topology, 2, tmp_path, memory, stores=(0, 1))
    assert run_processes(writer) == [0] * 4
    assert run_processes(replace(writer, loads=(0, 1), stores=())) == [0] * 4


@pytest.mark.parametrize("runs", ["processes", "turns"])
def test_tp_4_and_tp_8_take_turns_on_one_root_and_nothing_is_deleted(runs: str, tmp_path: Path, memory: Path) -> None:
    """Every start loads all that those before it stored, and adds a chunk that is its own."""
    model = Model(Family.SPLIT_NHD, 4)
    first = Start(model, Topology(4), 2, tmp_path, memory)
    files: dict[Path, tuple[int, bytes]] = {}
    for number in range(6):
        start = replace(
            first, topology=Topology(4 if number % 2 == 0 else 8), loads=tuple(range(number)), stores=(number,)
        )
        if runs == "turns":
            run_here(start)
        else:
            assert run_processes(start) == [0] * start.topology.world
        found = {path: (path.stat().st_ino, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()}
        assert files.items() <= found.items(), "a file that was there is gone or another one"
        assert len(found) == 2 + number, "a file for each chunk, and the namespace's own"
        files = found


def digest_with(**changes: Any) -> str:
    return attention_config_digest({**CONFIG, **changes})


OTHERS: dict[str, Callable[[Start], Start]] = {
    "other order of heads and tokens": lambda s: replace(s, model=replace(s.model, family=Family.SPLIT_NHD)),
    "packed, not split": lambda s: replace(s, model=replace(s.model, family=Family.PACKED_HND)),
    "other rope theta": lambda s: replace(s, model=replace(s.model, config_digest=digest_with(rope_theta=5e5))),
    "other rope scaling": lambda s: replace(s, model=replace(s.model, config_digest=digest_with(rope_scaling=None))),
    "other dtype of as many bytes": lambda s: replace(s, model=replace(s.model, dtype="float16")),
    "other weights revision": lambda s: replace(s, model=replace(s.model, revision="7f3b")),
    "more blocks in a chunk": lambda s: replace(s, blocks_per_chunk=4),
    "other heads": lambda s: replace(s, model=replace(s.model, num_kv_heads=2, head_bytes=48)),
    "slots of ranks, not canonical pages": lambda s: replace(s, is_direct=True),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("other", OTHERS)
def test_what_another_configuration_stored_is_a_miss(start: Start, other: str, tp: int) -> None:
    run_here(replace(start, stores=(0, 1)))
    reader = replace(start, topology=Topology(tp), loads=(0, 1))
    stranger = OTHERS[other](reader)
    expect_miss(stranger)
    run_here(reader)
    # Nor do they meet when both have stored under the same keys.
    run_here(replace(stranger, loads=(), stores=(0, 1)))
    run_here(stranger)
    run_here(reader)


def expect_miss(stranger: Start) -> None:
    with pytest.raises(MissedError) as missed:
        run_here(stranger)
    assert (missed.value.found, missed.value.promised) == ([], [])


def test_what_ranks_stored_in_slots_of_their_own_is_a_miss_for_another_tp(start: Start) -> None:
    """Even where nothing but the topology tells them apart: one head, so that all ranks have pages alike."""
    model = replace(start.model, num_kv_heads=1)
    writer = replace(start, model=model, topology=Topology(1), is_direct=True, stores=(0, 1))
    run_here(writer)
    stranger = replace(writer, topology=Topology(2), loads=(0, 1), stores=())
    mine, theirs = writer.identity(), stranger.identity()
    assert replace(mine, topology=None) == replace(theirs, topology=None)
    expect_miss(stranger)
    run_here(replace(stranger, topology=Topology(1)))


def test_control_a_topology_left_out_of_the_identity_would_hit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(start.model, num_kv_heads=1)
    run_here(replace(start, model=model, topology=Topology(1), is_direct=True, stores=(0, 1)))
    stranger = replace(start, model=model, is_direct=True, loads=(0, 1))
    expect_miss(stranger)
    told_of = Start.identity
    monkeypatch.setattr(Start, "identity", lambda s: replace(told_of(s), topology=told_of(stranger).topology))
    run_here(replace(start, model=model, topology=Topology(1), is_direct=True, stores=(0, 1)))
    with pytest.raises(WrongBytesError):
        run_here(stranger)


def test_control_a_digest_without_rope_would_hit(start: Start) -> None:
    """What tells the two models apart is the digest of their configurations, and RoPE in it, nothing else."""

    def without_rope(**changes: Any) -> str:
        config = {**CONFIG, **changes}
        return attention_config_digest({key: value for key, value in config.items() if not key.startswith("rope")})

    for digest, is_hit in ((digest_with, False), (without_rope, True)):
        run_here(replace(start, model=replace(start.model, config_digest=digest()), stores=(0, 1)))
        other = replace(start, model=replace(start.model, config_digest=digest(rope_theta=5e5)), loads=(0, 1))
        if is_hit:
            run_here(other)
        else:
            expect_miss(other)


def test_processes_miss_what_another_model_stored(start: Start) -> None:
    assert run_processes(replace(start, stores=(0, 1))) == [0, 0]
    stranger = replace(start, model=replace(start.model, config_digest=digest_with(rope_theta=5e5)), loads=(0, 1))
    codes = run_processes(replace(stranger, topology=Topology(4)))
    assert codes[0] == MISSED
    assert 0 not in codes


@pytest.mark.parametrize("swapped", [0, 1])
def test_control_a_mapping_with_two_runs_in_each_others_place_is_seen(start: Start, swapped: int) -> None:
    """In the files, and by readers of the same topology and of another, though every byte is stored and loaded once.

    Readers that are wrong in the same way agree with the writers: therefore files are compared as well.
    """
    flawed = replace(start, flaw=Flaw(swapped=swapped))
    layers = zip(*(flawed.certified(rank)[0] for rank in start.topology.ranks()), strict=True)
    assert all(certify(mappings) for mappings in layers)
    run_here(replace(flawed, stores=(0, 1)))
    for reader in (start, replace(start, topology=Topology(4))):
        with pytest.raises(WrongBytesError, match="cache"):
            run_here(replace(reader, loads=(0, 1)))
    run_here(replace(flawed, loads=(0, 1)))
    with pytest.raises(WrongBytesError, match="file"):
        replace(start, loads=(0, 1)).stored()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_deals_tokens_otherwise_is_refused_before_a_byte_moves(start: Start, rank: int) -> None:
    """And the control: where nothing is certified, it is the readers who find out."""
    model, topology = Model(Family.LATENT), Topology(2, dcp=2)
    misled = replace(topology, interleave=2, rank=rank)
    writer = replace(start, model=model, topology=topology, stores=(0, 1), flaw=Flaw(misled=misled))
    with pytest.raises(InputError, match="another layout"):
        run_here(writer)
    assert replace(writer, loads=(0, 1)).stored() == []
    run_here(replace(writer, flaw=replace(writer.flaw, is_certified=False)))
    with pytest.raises(WrongBytesError, match="cache"):
        run_here(replace(start, model=model, loads=(0, 1)))


def test_a_process_that_deals_tokens_otherwise_ends_the_start(start: Start) -> None:
    misled = Topology(2, dcp=2, interleave=2, rank=1)
    writer = replace(start, model=Model(Family.LATENT), topology=Topology(2, dcp=2), stores=(0, 1))
    codes = run_processes(replace(writer, flaw=Flaw(misled=misled)))
    assert codes[1] == REFUSED
    assert codes[0] != 0
    assert replace(writer, loads=(0, 1)).stored() == []
    assert run_processes(replace(writer, flaw=Flaw(misled=misled, is_certified=False))) == [0, 0]
    assert WRONG in run_processes(replace(writer, loads=(0, 1), stores=()))


@pytest.mark.parametrize("at", [0, 4095, 4096, 5000, -1])
def test_one_flipped_byte_of_a_file_is_a_miss_for_that_chunk_alone(start: Start, at: int) -> None:
    run_here(replace(start, stores=(0, 1)))
    reader = replace(start, topology=Topology(4), loads=(0, 1))
    run_here(reader)
    content = bytearray(reader.file(1).read_bytes())
    content[at] ^= 1
    reader.file(1).write_bytes(content)
    with pytest.raises(MissedError) as missed:
        run_here(reader)
    assert missed.value.found == [0]
    assert reader.stored() == [0]
    assert len(list(reader.file(1).parent.parent.glob("quarantine/*.bad"))) == 1
    run_here(replace(reader, loads=(0,)))
    run_here(replace(start, stores=(1,)))
    run_here(reader)


def test_control_one_byte_that_changes_on_the_way_to_the_caches_is_seen(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(replace(start, stores=(0, 1)))
    reader = replace(start, topology=Topology(4), loads=(0, 1))
    fetch = Worker.fetch

    def fetch_badly(worker: Worker, tier: Any) -> None:
        fetch(worker, tier)
        worker.region.row(worker.rows[1])[100] ^= 1

    monkeypatch.setattr(Worker, "fetch", fetch_badly)
    with pytest.raises(WrongBytesError):
        run_here(reader)
