"""Processes of one topology store, processes of another load; any of them is killed anywhere, and starts go on."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hisparse.offload.region import Membership, SharedRegion, new_region_name
from hisparse.offload.row_layout import RowLayout
from hisparse.offload.sharding import Topology
from hisparse.offload.transfer import PageBatch
from tests.offload.logical_kv import PageForm
from tests.offload.members import PROCESSES, Step, end, shared_folder, start
from tests.offload.ranks import NUM_LAYERS, WAIT_SECONDS, WRONG_BYTES, Job, load, store

KILLED = -signal.SIGKILL
NUM_ROWS = 6
COPIES = "hisparse.offload.page_copies"

STEPS = [
    Step(f"{COPIES}:{name}", dies_after)
    for name in ("CpuCopies.begin", "_CpuPageCopier.copy", "copy_run", "CpuCopies.end", "DoneEvent.wait")
    for dies_after in (False, True)
]


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as found:
        yield found
        assert list(found.iterdir()) == [], "a test left files in shared memory"


class Generation:
    """One start: this process holds the region, beside `writers` and `readers` ranks in processes of their own."""

    def __init__(self, folder: Path, form: PageForm, writers: int, readers: int, blocks_per_chunk: int = 4) -> None:
        random = np.random.default_rng(writers * 10 + readers)
        rows = random.permutation(NUM_ROWS)[:2].astype(np.int64)
        blocks = random.permutation(16)[: 2 * blocks_per_chunk].reshape(2, -1).astype(np.int64)
        self.pages = PageBatch.of_chunks(blocks, rows)
        self.contents = self.pages.rows * blocks_per_chunk + self.pages.chunk_blocks
        self.form, self.writers, self.readers = form, writers, readers
        self.layout = RowLayout.canonical([form.page_bytes] * NUM_LAYERS, blocks_per_chunk)
        name = new_region_name("engine")
        self.job = Job(name, folder, form, blocks_per_chunk, self.pages, self.contents)
        self.region = SharedRegion.create(name, NUM_ROWS, self.layout.row_bytes, self.member(0), folder)
        self.stored = PROCESSES.Event()

    def member(self, number: int) -> Membership:
        return Membership(number, 1 + self.writers + self.readers, b"layout", WAIT_SECONDS)

    def run(self, killed_writer: Step | None = None, killed_reader: Step | None = None) -> tuple[list[int], list[int]]:
        """Exit codes of writers and of readers, of which the first one may be killed. Closes the region."""
        writers = [
            start(
                store,
                self.job,
                self.member(1 + rank),
                Topology(self.writers, rank=rank),
                None if rank else killed_writer,
            )
            for rank in range(self.writers)
        ]
        readers = [
            start(
                load,
                self.job,
                self.member(1 + self.writers + rank),
                Topology(self.readers, rank=rank),
                self.stored,
                None if rank else killed_reader,
            )
            for rank in range(self.readers)
        ]
        self.region.wait_for_members()
        stored = [end(process) for process in writers]
        self.stored.set()
        loaded = [end(process) for process in readers]
        self.untouched = np.delete(self.region.rows, self.pages.rows, axis=0).copy()
        self.pages_in_region = [
            self.layout.view(self.region.rows, layer)[self.pages.rows, self.pages.chunk_blocks]
            for layer in range(NUM_LAYERS)
        ]
        assert self.region.close() == ()
        return stored, loaded

    def has_canonical_bytes(self) -> bool:
        """Whether the region held what one worker alone would have stored."""
        return all(
            np.array_equal(page, self.form.canonical(self.form.logical(1000 * layer + seed)))
            for layer in range(NUM_LAYERS)
            for page, seed in zip(self.pages_in_region[layer], self.contents, strict=True)
        )


@pytest.mark.parametrize(("writers", "readers"), [(1, 4), (2, 8), (4, 2), (8, 1)])
@pytest.mark.parametrize("form", ["packed-nhd", "split-hnd", "latent"])
def test_fresh_processes_of_another_topology_read_what_was_stored(
    folder: Path, form: str, writers: int, readers: int
) -> None:
    generation = Generation(folder, PageForm(form, 4, 32, 8), writers, readers)
    assert generation.run() == ([0] * writers, [0] * readers)
    assert generation.has_canonical_bytes()
    assert not generation.untouched.any()


def test_a_reader_sees_the_bytes_that_a_killed_writer_owed(folder: Path) -> None:
    """The control of the comparison: where a writer is missing, readers of its heads do not find them."""
    generation = Generation(folder, PageForm("split-hnd", 4, 32, 8), 2, 4)
    stored, loaded = generation.run(killed_writer=Step(f"{COPIES}:CpuCopies.begin", dies_after=False))
    assert stored == [KILLED, 0]
    assert loaded == [WRONG_BYTES, WRONG_BYTES, 0, 0]
    assert not generation.has_canonical_bytes()


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_writer_killed_anywhere_in_a_store_touches_no_other_row_and_leaves_no_file(folder: Path, step: Step) -> None:
    generation = Generation(folder, PageForm("packed-nhd", 4, 32, 8), 2, 0)
    assert generation.run(killed_writer=step) == ([KILLED, 0], [])
    assert not generation.untouched.any()


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_reader_killed_anywhere_in_a_load_leaves_the_stored_bytes_to_the_others(folder: Path, step: Step) -> None:
    generation = Generation(folder, PageForm("packed-nhd", 4, 32, 8), 1, 2)
    assert generation.run(killed_reader=step) == ([0], [KILLED, 0])
    assert generation.has_canonical_bytes()
    assert not generation.untouched.any()


def test_five_restarts_after_kills_end_in_one_that_works(folder: Path) -> None:
    form = PageForm("split-nhd", 4, 32, 8)
    for step in STEPS[1:8:2]:
        stored, loaded = Generation(folder, form, 2, 2).run(killed_writer=step, killed_reader=step)
        assert (stored[0], loaded[0]) == (KILLED, KILLED)
        assert list(folder.iterdir()) == []
    generation = Generation(folder, form, 4, 2)
    assert generation.run() == ([0] * 4, [0] * 2)
    assert generation.has_canonical_bytes()
