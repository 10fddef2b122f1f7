"""Starts of an engine on a node, and all of the way that KV goes: caches, region, files, and back into caches.

Every rank of a start derives the mapping of its own tensors, certifies it, maps the region and copies; rank 0 moves
rows between region and files as well. What is stored and what must come back is `global_kv`'s word alone. The same
`life` runs in a process of its own for each rank (`run_processes`), or by turns in this one (`run_here`).
"""

import sys
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError

import numpy as np

from hisparse.errors import HiSparseError
from hisparse.offload.files import DirectTopology, FileTier, FileTierConfig, Identity
from hisparse.offload.layout import KVGeometry, LayerMapping, Run, TensorView
from hisparse.offload.page_copies import CpuCopies
from hisparse.offload.region import Membership, SharedRegion, new_region_name
from hisparse.offload.row_layout import RowLayout
from hisparse.offload.sharding import Certificate, Topology, certify_worker, derive_mapping
from hisparse.offload.transfer import LayerPages, PageBatch, RegionTransfers
from tests.offload.chain_model import NUM_LAYERS, Model
from tests.offload.files.world import key_of
from tests.offload.global_kv import memory, put
from tests.offload.members import PROCESSES, Step

WAIT_SECONDS = 30.0

REFUSED, WRONG, MISSED, ABANDONED = 1, 3, 4, 5
"""How a rank's process ends when all is not well: refused by the library, wrong bytes, a miss, another rank's end."""


class WrongBytesError(Exception):
    """A cache does not hold what the model means."""


class MissedError(Exception):
    """Some chunks to load were not there: `found` were, and lookups `promised` these."""

    def __init__(self, found: list[int], promised: list[int]) -> None:
        super().__init__(f"found {found}, promised {promised}")
        self.found, self.promised = found, promised


@lru_cache(maxsize=1024)
def _certificate(views: tuple[TensorView, ...], geometries: tuple[KVGeometry, ...], rank: Topology) -> Certificate:
    """Proved once in this process: starts that take turns here would prove the same again and again."""
    return certify_worker(views, geometries, rank)


@dataclass(frozen=True)
class Flaw:
    """What is wrong with a start. `swapped`: on this rank, two pieces of each page are in each other's places.

    `misled`: the rank takes its topology for another. `is_certified`: whether mappings are proved and compared.
    """

    swapped: int | None = None
    misled: Topology | None = None
    is_certified: bool = True


@dataclass(frozen=True)
class Start:
    """One start, which loads chunks `loads` into caches that are empty, then computes and stores chunks `stores`.

    `files` and `memory`: where the file tier and the shared region are. `is_direct`: a slot for every rank.
    """

    model: Model
    topology: Topology
    blocks_per_chunk: int
    files: Path
    memory: Path
    loads: tuple[int, ...] = ()
    stores: tuple[int, ...] = ()
    is_direct: bool = False
    flaw: Flaw = Flaw()
    wait_s: float = WAIT_SECONDS

    @property
    def chunks(self) -> tuple[int, ...]:
        return self.loads + self.stores

    @property
    def num_rows(self) -> int:
        return len(self.chunks) + 2

    @property
    def num_blocks(self) -> int:
        return len(self.chunks) * self.blocks_per_chunk + 3

    def layout(self) -> RowLayout:
        mappings = self.mappings(replace(self.topology, rank=0))
        sizes = [mapping.canonical_page_bytes for mapping in mappings]
        if self.is_direct:
            return RowLayout.direct(sizes, self.blocks_per_chunk, self.topology.world)
        return RowLayout.canonical(sizes, self.blocks_per_chunk)

    def identity(self) -> Identity:
        """What this start calls its bytes."""
        model, topology, layout = self.model, self.topology, self.layout()
        direct = DirectTopology(topology.tp, 1, topology.dcp, topology.pcp, topology.interleave)
        return Identity(
            model="org/tiny",
            revision=model.revision,
            config_digest=model.config_digest,
            hash_seed="0",
            family=model.family.value,
            dtype=model.dtype,
            num_kv_heads=model.num_kv_heads,
            head_bytes=model.head_bytes,
            page_tokens=model.tokens // (topology.context_ranks if self.is_direct else 1),
            page_bytes=layout.page_bytes,
            row_bytes=layout.row_bytes,
            blocks_per_chunk=self.blocks_per_chunk,
            topology=direct if self.is_direct else None,
        )

    def tier(self) -> FileTier:
        return FileTier(FileTierConfig((self.files,), 64 << 20, threads=2, deadline_s=WAIT_SECONDS), self.identity())

    def mappings(self, rank: Topology) -> list[LayerMapping]:
        """As derived from the rank's tensors, without proof."""
        found = []
        for layer in range(NUM_LAYERS):
            view, geometry = self.model.view(layer, rank, self.num_blocks), self.model.geometry(layer, rank)
            if self.is_direct:
                heads = max(1, self.model.num_kv_heads // rank.tp)
                found.append(derive_mapping(view, replace(geometry, num_kv_heads=heads), Topology(1), layer=layer))
            else:
                found.append(derive_mapping(view, geometry, rank, layer=layer))
        return found

    def certified(self, rank: Topology) -> tuple[list[LayerMapping], bytes]:
        """The rank's mappings, and what all ranks must have in common; where the flaw says so, without proof."""
        flaw = self.flaw
        if flaw.misled is not None and flaw.misled.rank == rank.rank:
            rank = flaw.misled
        mappings, digest = self.mappings(rank), b"unproved"
        if flaw.is_certified:
            views = [self.model.view(layer, rank, self.num_blocks) for layer in range(NUM_LAYERS)]
            geometries = [self.model.geometry(layer, rank) for layer in range(NUM_LAYERS)]
            certificate = _certificate(tuple(views), tuple(geometries), rank)
            digest = certificate.digest
            if not self.is_direct:
                mappings = list(certificate.mappings)
        if flaw.swapped == rank.rank:
            mappings = [swapped(mapping) for mapping in mappings]
        return mappings, digest

    def row(self, chunk: int) -> bytes:
        """A chunk's row of canonical pages, as the oracle has it."""
        family = self.model.family
        blocks = range(self.blocks_per_chunk)
        pages = [self.model.page(chunk, b, layer).canonical(family) for layer in range(NUM_LAYERS) for b in blocks]
        data = b"".join(page.tobytes() for page in pages)
        return data + bytes(-len(data) % 4096)

    def file(self, chunk: int) -> Path:
        """Where the chunk is stored."""
        key = key_of(chunk).hex()
        return self.files / self.identity().name / key[:2] / f"{key}.kv"

    def stored(self) -> list[int]:
        """Chunks of `loads` whose files are there. Raises `WrongBytesError` unless they are whole and right."""
        there = [chunk for chunk in self.loads if self.file(chunk).exists()]
        if any(self.file(chunk).read_bytes()[4096:] != self.row(chunk) for chunk in there):
            raise WrongBytesError("in a file")
        return there


def swapped(mapping: LayerMapping) -> LayerMapping:
    """The mapping with two pieces of a size in each other's places: its last two, a piece being a run of its own."""
    found = mapping.pieces()
    columns = found.local_offsets.tolist(), found.canonical_offsets.tolist(), found.sizes.tolist()
    *pieces, one, other = (
        Run(*piece, count=1, local_stride=0, canonical_stride=0) for piece in zip(*columns, strict=True)
    )
    if one.size != other.size:
        raise AssertionError("pieces of different sizes cannot change places")
    one, other = replace(one, local_offset=other.local_offset), replace(other, local_offset=one.local_offset)
    return replace(mapping, runs=(*pieces, one, other))


class Worker:
    """One rank: its caches, its place in the region and, for rank 0, the files."""

    def __init__(self, start: Start, rank: Topology, region: SharedRegion, mappings: list[LayerMapping]) -> None:
        self.start, self.rank, self.region = start, rank, region
        self.views = [start.model.view(layer, rank, start.num_blocks) for layer in range(NUM_LAYERS)]
        self.caches = [memory(view) for view in self.views]
        layers = [
            LayerPages(cache.ctypes.data, view.block_stride, view.num_blocks, mapping)
            for cache, view, mapping in zip(self.caches, self.views, mappings, strict=True)
        ]
        slot = rank.rank if start.is_direct else 0
        self.transfers = RegionTransfers(layers, region, start.layout(), CpuCopies(), slot)
        # The scheduler's choice, so the same on every rank, and another in every start that is otherwise than this.
        random = np.random.default_rng([rank.tp, rank.dcp, rank.pcp, len(start.loads)])
        self.rows = dict(zip(start.chunks, random.permutation(start.num_rows).tolist(), strict=False))
        blocks = random.permutation(start.num_blocks)[: len(start.chunks) * start.blocks_per_chunk]
        self.blocks = dict(zip(start.chunks, blocks.reshape(len(start.chunks), -1).tolist(), strict=True))

    def fetch(self, tier: FileTier) -> None:
        """Files to region."""
        loads = self.start.loads
        promised = [chunk for chunk in loads if tier.lookup(key_of(chunk))]
        answers = [(chunk, tier.load(key_of(chunk), self.region.row(self.rows[chunk]))) for chunk in loads]
        found = [chunk for chunk, answer in answers if answer.result(WAIT_SECONDS)]
        if found != list(loads):
            raise MissedError(found, promised)

    def load(self) -> None:
        """Region to caches, which must then be right to the last byte, with nothing in between."""
        self.transfers.load(self._batch(self.start.loads)).wait()
        expected = [memory(view) for view in self.views]
        self._compute(expected, self.start.loads)
        if any(not np.array_equal(*pair) for pair in zip(self.caches, expected, strict=True)):
            raise WrongBytesError(f"in a cache of {self.rank}")

    def store(self) -> None:
        """Compute, then caches to region."""
        self._compute(self.caches, self.start.stores)
        self.transfers.store(self._batch(self.start.stores)).wait()

    def publish(self, tier: FileTier) -> None:
        """Region to files."""
        answers = [tier.store(key_of(chunk), self.region.row(self.rows[chunk])) for chunk in self.start.stores]
        if not all([answer.result(WAIT_SECONDS) for answer in answers]):
            raise AssertionError("the file tier did not store")

    def _compute(self, caches: list[np.ndarray], chunks: tuple[int, ...]) -> None:
        for layer, (cache, view) in enumerate(zip(caches, self.views, strict=True)):
            for chunk in chunks:
                for number, block in enumerate(self.blocks[chunk]):
                    put(cache, view, block, self.start.model.part(chunk, number, layer, self.rank))

    def _batch(self, chunks: tuple[int, ...]) -> PageBatch:
        blocks = np.array([self.blocks[chunk] for chunk in chunks], dtype=np.int64)
        return PageBatch.of_chunks(blocks, np.array([self.rows[chunk] for chunk in chunks], dtype=np.int64))


def life(start: Start, name: str, number: int, step: Step | None = None) -> Generator[None]:
    """All that rank `number` does. No rank passes a `yield` before all have come to it. With `step` it is killed there.

    Raises what the library does, `MissedError` and `WrongBytesError`.
    """
    rank = replace(start.topology, rank=number)
    mappings, digest = start.certified(rank)
    membership = Membership(number, rank.world, digest, start.wait_s)
    tier = None if number else start.tier()
    region = None
    try:
        if step is not None:
            step.arm()
        if number == 0:
            region = SharedRegion.create(name, start.num_rows, start.layout().row_bytes, membership, start.memory)
        else:
            region = SharedRegion.attach(name, membership, start.memory)
        yield
        region.wait_for_members()
        yield from _work(Worker(start, rank, region, mappings), tier)
    finally:
        problems = region.close() if region is not None else ()
        if tier is not None:
            tier.close()
    if problems:
        raise AssertionError(problems)


def _work(worker: Worker, tier: FileTier | None) -> Generator[None]:
    if worker.start.loads:
        if tier is not None:
            worker.fetch(tier)
        yield
        worker.load()
    if worker.start.stores:
        worker.store()
        yield
        if tier is not None:
            worker.publish(tier)


def run_here(start: Start) -> None:
    """A start whose ranks take turns in this process. Raises like `life`."""
    name = new_region_name("chain")
    lives = [life(start, name, number) for number in range(start.topology.world)]
    try:
        for _ in zip(*lives, strict=True):  # a step of every rank at a time
            pass
    finally:
        for one in lives:
            one.close()


def live(start: Start, name: str, number: int, barrier: Barrier, step: Step | None) -> None:
    """A rank's process."""
    code = 0
    try:
        for _ in life(start, name, number, step):
            barrier.wait(WAIT_SECONDS)
    except HiSparseError:
        code = REFUSED
    except WrongBytesError:
        code = WRONG
    except MissedError:
        code = MISSED
    except BrokenBarrierError:
        code = ABANDONED
    if code:
        barrier.abort()
    sys.exit(code)


def run_processes(start: Start, context: BaseContext = PROCESSES, killed: tuple[int, Step] | None = None) -> list[int]:
    """A start with a process for each rank; the exit code of each. `killed`: a rank, and where it is killed."""
    name = new_region_name("chain")
    barrier = context.Barrier(start.topology.world)
    processes = {}
    for number in range(start.topology.world):
        step = killed[1] if killed is not None and killed[0] == number else None
        process = context.Process(target=live, args=(start, name, number, barrier, step), daemon=True)  # type: ignore[attr-defined]
        process.start()
        processes[process.sentinel] = process
    running = set(processes)
    while running:
        ended = wait(running, WAIT_SECONDS)
        if not ended:
            for sentinel in running:
                processes[sentinel].kill()
            raise TimeoutError(f"ranks of {start} do not end")
        for sentinel in ended:
            running.discard(sentinel)
            processes[sentinel].join()
            if processes[sentinel].exitcode:
                barrier.abort()
    return [process.exitcode for process in processes.values()]
