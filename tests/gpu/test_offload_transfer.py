"""A GPU's pages through a pinned region: bytes equal the oracle's by both methods."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hisparse.offload import copy_kernel
from hisparse.offload.copy_choice import CopyMethod
from hisparse.offload.cuda_copies import CudaCopies
from hisparse.offload.layout import LayerMapping, Run
from hisparse.offload.pinning import PinnedRegion
from hisparse.offload.region import SharedRegion
from hisparse.offload.row_layout import RowLayout
from hisparse.offload.sharding import Topology
from hisparse.offload.transfer import LayerPages, PageBatch, RegionTransfers
from tests.gpu.marks import NEEDS_GPU
from tests.offload.logical_kv import BLOCK_GAP_BYTES, FORMS, PageForm

pytestmark = NEEDS_GPU

NUM_BLOCKS = 12
NUM_ROWS = 6
BLOCKS_PER_CHUNK = 2
NUM_LAYERS = 3
CHUNK_BYTES = 1 << 20


@pytest.fixture
def device() -> torch.device:
    return torch.zeros(1, device="cuda").device


class Node:
    """A pinned region and the pages of one rank on the GPU."""

    def __init__(self, device: torch.device, row_bytes: int, num_rows: int = NUM_ROWS) -> None:
        self.device = device
        self.region = SharedRegion.create("gpu", num_rows, row_bytes, directory=Path("/dev/shm"))
        self.pinned = PinnedRegion(self.region, device.index, chunk_bytes=max(CHUNK_BYTES, row_bytes))

    def transfers(self, caches: torch.Tensor, mappings: list[LayerMapping], layout: RowLayout) -> RegionTransfers:
        """`caches`: uint8 `[num_layers, num_blocks, stride]`."""
        layers = [
            LayerPages(cache.data_ptr(), cache.stride(0), len(cache), mapping)
            for cache, mapping in zip(caches, mappings, strict=True)
        ]
        return RegionTransfers(layers, self.region, layout, CudaCopies(self.device))

    def close(self) -> None:
        torch.cuda.synchronize()
        assert self.pinned.release() == ()
        assert self.region.close() == ()


def nines(page_bytes: int) -> torch.Tensor:
    """Caches of all layers, to be filled."""
    return torch.full((NUM_LAYERS, NUM_BLOCKS, page_bytes + BLOCK_GAP_BYTES), 9, dtype=torch.uint8)


@pytest.fixture
def methods(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fragment goes the way that the test's parameter names, whatever its size."""
    if request.param is not None:
        monkeypatch.setattr(copy_kernel, "choose_method", lambda *_: request.param)


@pytest.mark.parametrize("methods", [None, *CopyMethod], ids=str, indirect=True)
@pytest.mark.parametrize("head_bytes", [7, 36, 256])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("methods")
def test_what_two_ranks_store_four_load(device: torch.device, form: str, head_bytes: int) -> None:
    pages = PageForm(form, 4, head_bytes, 16)
    layout = RowLayout.canonical([pages.page_bytes] * NUM_LAYERS, BLOCKS_PER_CHUNK)
    node = Node(device, layout.row_bytes)
    try:
        batch = PageBatch.of_chunks(np.array([[7, 2], [11, 4], [5, -1]]), np.array([4, 0, 3]))
        logical = {(layer, page): pages.logical(100 * layer + page) for layer in range(NUM_LAYERS) for page in range(5)}
        for rank in Topology(2).ranks():
            mappings = [pages.mapping(layer, rank) for layer in range(NUM_LAYERS)]
            cache = torch.full(
                (NUM_LAYERS, NUM_BLOCKS, mappings[0].local_page_bytes + BLOCK_GAP_BYTES), 9, dtype=torch.uint8
            )
            for (layer, page), values in logical.items():
                local = torch.from_numpy(pages.local(values, rank))
                cache[layer, batch.local_blocks[page], : len(local)] = local
            on_device = cache.to(device)
            event = node.transfers(on_device, mappings, layout).store(batch)
            event.wait()
            assert event.query()
        for (layer, page), values in logical.items():
            stored = layout.view(node.region.rows, layer)[batch.rows[page], batch.chunk_blocks[page]]
            assert np.array_equal(stored, pages.canonical(values))
        del stored
        for rank in Topology(4).ranks():
            mappings = [pages.mapping(layer, rank) for layer in range(NUM_LAYERS)]
            size = mappings[0].local_page_bytes
            on_device = torch.full(
                (NUM_LAYERS, NUM_BLOCKS, size + BLOCK_GAP_BYTES), 9, dtype=torch.uint8, device=device
            )
            node.transfers(on_device, mappings, layout).load(batch).wait()
            cache = on_device.cpu()
            for (layer, page), values in logical.items():
                local = torch.from_numpy(pages.local(values, rank))
                assert torch.equal(cache[layer, batch.local_blocks[page], :size], local)
            others = np.setdiff1d(np.arange(NUM_BLOCKS), batch.local_blocks)
            assert (cache[:, others] == 9).all()
            assert (cache[:, :, size:] == 9).all()
    finally:
        node.close()


@pytest.mark.usefixtures("no_synchronisation")
def test_the_host_does_not_wait_and_copies_see_what_was_computed_before(device: torch.device) -> None:
    mapping = LayerMapping(0, 1 << 18, 1 << 18, (Run(0, 0, 1 << 18, 1, 0, 0),), 1, 0)
    small = LayerMapping(1, 1 << 18, 1 << 18, (Run(0, 0, 256, 1 << 10, 256, 256),), 1, 0)
    layout = RowLayout.canonical([1 << 18, 1 << 18])
    node = Node(device, layout.row_bytes)
    try:
        cache = torch.zeros((2, NUM_BLOCKS, 1 << 18), dtype=torch.uint8, device=device)
        transfers = node.transfers(cache, [mapping, small], layout)
        batch = PageBatch.of_chunks(np.arange(1, 5)[:, None], np.arange(4))
        busy = torch.ones(4096, 4096, device=device)
        for _ in range(50):
            busy = busy @ busy * 1e-4
        cache.fill_(3)
        event = transfers.store(batch)
        assert not event.query(), "the matrices take longer than the call"
        event.wait()
        assert (node.region.rows[:4, : 2 << 18] == 3).all()
    finally:
        node.close()


def test_rows_on_both_sides_of_every_registration_are_copied_whole(device: torch.device) -> None:
    """A copy of the driver's may not cross from one registration into the next; these are as long as rows."""
    layout = RowLayout.canonical([CHUNK_BYTES // 4 + 4096])
    node = Node(device, layout.row_bytes, num_rows=20)
    try:
        assert node.pinned.num_chunks == 7
        cache = torch.zeros((20, layout.used_bytes), dtype=torch.uint8, device=device)
        whole = Run(0, 0, layout.used_bytes, 1, 0, 0)
        mapping = LayerMapping(0, layout.used_bytes, layout.used_bytes, (whole,), 1, 0)
        transfers = node.transfers(cache[None], [mapping], layout)
        node.region.rows[:] = np.arange(1, 21, dtype=np.uint8)[:, None]
        transfers.load(PageBatch.of_chunks(np.arange(20)[:, None], np.arange(20))).wait()
        assert torch.equal(cache.cpu(), torch.arange(1, 21, dtype=torch.uint8)[:, None].expand_as(cache))
    finally:
        node.close()
