"""A rank of some topology with caches of its own, which stores into a region and loads from it, for tests."""

import os
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from hisparse.offload.page_copies import CpuCopies
from hisparse.offload.region import Membership, SharedRegion
from hisparse.offload.row_layout import RowLayout
from hisparse.offload.sharding import Topology
from hisparse.offload.transfer import LayerPages, PageBatch, RegionTransfers
from tests.offload.logical_kv import BLOCK_GAP_BYTES, PageForm
from tests.offload.members import Step

NUM_LAYERS = 2
NUM_BLOCKS = 16
WAIT_SECONDS = 20.0
WRONG_BYTES = 3


class Rank:
    """One rank's caches: `pages[l]` is uint8 `[num_blocks, page bytes]`; blocks lie some bytes further apart."""

    def __init__(self, form: PageForm, topology: Topology, region: SharedRegion, layout: RowLayout) -> None:
        self.form, self.topology = form, topology
        mappings = [form.mapping(layer, topology) for layer in range(NUM_LAYERS)]
        size = mappings[0].local_page_bytes
        self.storage = np.full((NUM_LAYERS, NUM_BLOCKS, size + BLOCK_GAP_BYTES), 255, dtype=np.uint8)
        self.pages = self.storage[:, :, :size]
        layers = [
            LayerPages(layer.ctypes.data, size + BLOCK_GAP_BYTES, NUM_BLOCKS, mapping)
            for layer, mapping in zip(self.storage, mappings, strict=True)
        ]
        self.transfers = RegionTransfers(layers, region, layout, CpuCopies())

    def compute(self, blocks: np.ndarray, contents: np.ndarray) -> None:
        """Fill blocks with what the model computes for the pages of these contents (seeds, `[n]`)."""
        for layer in range(NUM_LAYERS):
            for block, seed in zip(blocks, contents, strict=True):
                self.pages[layer, block] = self._expected(layer, seed)

    def holds(self, blocks: np.ndarray, contents: np.ndarray) -> bool:
        """Whether blocks have the bytes of these contents, and the gaps between blocks are untouched."""
        right = all(
            np.array_equal(self.pages[layer, block], self._expected(layer, seed))
            for layer in range(NUM_LAYERS)
            for block, seed in zip(blocks, contents, strict=True)
        )
        return right and bool((self.storage[:, :, -BLOCK_GAP_BYTES:] == 255).all())

    def _expected(self, layer: int, seed: int) -> np.ndarray:
        return self.form.local(self.form.logical(1000 * layer + seed), self.topology)


@dataclass(frozen=True)
class Job:
    """What a process does as a member of a region: `pages` of `form`, whose contents are `contents`."""

    name: str
    folder: Path
    form: PageForm
    blocks_per_chunk: int
    pages: PageBatch
    contents: np.ndarray

    def join(self, membership: Membership, topology: Topology) -> tuple[SharedRegion, Rank]:
        """The region, mapped by all members, and a rank that uses it."""
        region = SharedRegion.attach(self.name, membership, self.folder)
        region.wait_for_members()
        layout = RowLayout.canonical([self.form.page_bytes] * NUM_LAYERS, self.blocks_per_chunk)
        return region, Rank(self.form, topology, region, layout)


def store(job: Job, membership: Membership, topology: Topology, step: Step | None = None) -> None:
    """A process that computes the pages of one rank and stores them. With `step` it is killed there."""
    region, worker = job.join(membership, topology)
    worker.compute(job.pages.local_blocks, job.contents)
    if step is not None:
        step.arm()
    worker.transfers.store(job.pages).wait()
    del worker
    region.close()


def load(job: Job, membership: Membership, topology: Topology, stored: Event, step: Step | None = None) -> None:
    """A process that loads the pages of one rank once they are `stored`, into other blocks, and compares them."""
    region, worker = job.join(membership, topology)
    if not stored.wait(WAIT_SECONDS):
        os._exit(1)
    if step is not None:
        step.arm()
    blocks = (job.pages.local_blocks + 1) % NUM_BLOCKS
    worker.transfers.load(PageBatch(blocks, job.pages.rows, job.pages.chunk_blocks)).wait()
    if not worker.holds(blocks, job.contents):
        os._exit(WRONG_BYTES)
    region.close()
