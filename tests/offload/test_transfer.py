"""What workers of one topology store, workers of another load, byte for byte, and no other byte changes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hisparse.errors import InputError, InvariantError
from hisparse.offload import transfer
from hisparse.offload.layout import LayerMapping, Run
from hisparse.offload.page_copies import CpuCopies
from hisparse.offload.region import SharedRegion
from hisparse.offload.row_layout import RowLayout
from hisparse.offload.sharding import Topology
from hisparse.offload.transfer import LayerPages, PageBatch, RegionTransfers
from tests.offload.logical_kv import FORMS, PageForm
from tests.offload.members import shared_folder
from tests.offload.ranks import NUM_BLOCKS, NUM_LAYERS, Rank

NUM_ROWS = 5
TOKENS = 4
HEAD_BYTES = 24


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    with shared_folder() as folder:
        found = SharedRegion.create("one", NUM_ROWS, 16384, directory=folder)
        yield found
        found.close()


def canonical_layout(form: PageForm, blocks_per_chunk: int) -> RowLayout:
    return replace(RowLayout.canonical([form.page_bytes] * NUM_LAYERS, blocks_per_chunk), row_bytes=16384)


def some_pages(seed: int, blocks_per_chunk: int) -> tuple[PageBatch, np.ndarray]:
    """Three chunks in shuffled rows and blocks, of which the last one is short of a block; and their contents."""
    random = np.random.default_rng(seed)
    rows = random.permutation(NUM_ROWS)[:3].astype(np.int64)
    blocks = random.permutation(NUM_BLOCKS)[: 3 * blocks_per_chunk].reshape(3, -1).astype(np.int64)
    if blocks_per_chunk > 1:
        blocks[-1, -1] = -1
    batch = PageBatch.of_chunks(blocks, rows)
    return batch, batch.rows * blocks_per_chunk + batch.chunk_blocks


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_what_any_tp_stores_any_other_loads(
    region: SharedRegion, form: str, num_heads: int, blocks_per_chunk: int
) -> None:
    pages = PageForm(form, num_heads, HEAD_BYTES, TOKENS)
    layout = canonical_layout(pages, blocks_per_chunk)
    for writers in (1, 2, 4, 8):
        stored, contents = some_pages(writers, blocks_per_chunk)
        region.rows[:] = 77
        for rank in range(writers):
            worker = Rank(pages, Topology(writers, rank=rank), region, layout)
            worker.compute(stored.local_blocks, contents)
            event = worker.transfers.store(stored)
            event.wait()
            assert event.query()
        expect_region(region, layout, pages, stored, contents)
        for readers in (1, 2, 4, 8):
            blocks = np.random.default_rng(readers).permutation(NUM_BLOCKS)[: len(contents)].astype(np.int64)
            for rank in range(readers):
                worker = Rank(pages, Topology(readers, rank=rank), region, layout)
                worker.transfers.load(replace(stored, local_blocks=blocks))
                assert worker.holds(blocks, contents)
                others = np.setdiff1d(np.arange(NUM_BLOCKS), blocks)
                assert (worker.pages[:, others] == 255).all()


SHARED_TOKENS = [Topology(2, pcp=2), Topology(4, dcp=2), Topology(4, dcp=2, pcp=2), Topology(8, dcp=4, interleave=4)]


@pytest.mark.parametrize("topology", SHARED_TOKENS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_ranks_that_share_tokens_store_and_load_their_turns(
    region: SharedRegion, form: str, topology: Topology
) -> None:
    pages = PageForm(form, 2, HEAD_BYTES, TOKENS * topology.context_ranks)
    layout = canonical_layout(pages, 2)
    stored, contents = some_pages(5, 2)
    region.rows[:] = 77
    for rank in topology.ranks():
        worker = Rank(pages, rank, region, layout)
        worker.compute(stored.local_blocks, contents)
        worker.transfers.store(stored)
    expect_region(region, layout, pages, stored, contents)
    for rank in topology.ranks():
        worker = Rank(pages, rank, region, layout)
        worker.transfers.load(stored)
        assert worker.holds(stored.local_blocks, contents)


def expect_region(
    region: SharedRegion, layout: RowLayout, pages: PageForm, stored: PageBatch, contents: np.ndarray
) -> None:
    """The canonical bytes where they belong, and 77 elsewhere."""
    expected = np.full(region.rows.shape, 77, dtype=np.uint8)
    for layer in range(NUM_LAYERS):
        view = layout.view(expected, layer)
        for row, block, seed in zip(stored.rows, stored.chunk_blocks, contents, strict=True):
            view[row, block] = pages.canonical(pages.logical(1000 * layer + seed))
    assert np.array_equal(region.rows, expected)


def test_bytes_that_all_ranks_hold_are_stored_once_and_the_work_rotates(region: SharedRegion) -> None:
    pages = PageForm("latent", 1, HEAD_BYTES, TOKENS)
    layout = canonical_layout(pages, 4)
    stored, contents = some_pages(3, 4)
    written = np.zeros(len(contents), dtype=int)
    for rank in range(4):
        region.rows[:] = 255
        worker = Rank(pages, Topology(4, rank=rank), region, layout)
        worker.compute(stored.local_blocks, contents)
        worker.transfers.store(stored)
        own = layout.view(region.rows, 0)[stored.rows, stored.chunk_blocks]
        is_written = (own != 255).any(axis=1)
        mapping = pages.mapping(0, Topology(4, rank=rank))
        assert is_written.tolist() == [mapping.writes(int(page)) for page in contents]
        assert is_written.sum() < len(contents)
        written += is_written
    assert (written == 1).all()


def test_direct_slots_of_workers_do_not_touch_each_other(region: SharedRegion) -> None:
    layout = replace(RowLayout.direct([96] * NUM_LAYERS, 2, num_workers=3), row_bytes=16384)
    whole = LayerMapping(0, 96, 96, (Run(0, 0, 96, 1, 0, 0),), 1, 0)
    batch = PageBatch.of_chunks(np.array([[3, 1]]), np.array([4]))
    caches = np.random.default_rng(0).integers(0, 256, (3, NUM_LAYERS, 4, 96), dtype=np.uint8)
    read = np.zeros_like(caches)

    def transfers(storage: np.ndarray, slot: int) -> RegionTransfers:
        layers = [LayerPages(layer.ctypes.data, 96, 4, whole) for layer in storage]
        return RegionTransfers(layers, region, layout, CpuCopies(), slot)

    for slot in range(3):
        transfers(caches[slot], slot).store(batch)
    for slot in range(3):
        transfers(read[slot], slot).load(batch)
    assert np.array_equal(read[:, :, [1, 3]], caches[:, :, [1, 3]])
    assert not read[:, :, [0, 2]].any()
    assert np.array_equal(layout.view(region.rows, 1, 2)[4, 0], caches[2, 1, 3])


@pytest.mark.parametrize("max_pages", [1, 2, 5, 7, 22])
def test_large_transfers_are_cut_wherever_the_arrays_end(
    region: SharedRegion, monkeypatch: pytest.MonkeyPatch, max_pages: int
) -> None:
    monkeypatch.setattr(transfer, "MAX_PAGES", max_pages)
    pages = PageForm("packed-nhd", 4, HEAD_BYTES, TOKENS)
    layout = canonical_layout(pages, 4)
    stored, contents = some_pages(1, 4)
    for rank in range(2):
        worker = Rank(pages, Topology(2, rank=rank), region, layout)
        worker.compute(stored.local_blocks, contents)
        worker.transfers.store(stored)
    reader = Rank(pages, Topology(4, rank=3), region, layout)
    reader.transfers.load(stored)
    assert reader.holds(stored.local_blocks, contents)


def test_layers_of_different_kinds_are_copied_together(region: SharedRegion) -> None:
    """Latents beside indexer rows: pages of two sizes in one row."""
    forms = [PageForm("latent", 1, size, TOKENS) for size in (576, 132, 576)]
    layout = replace(RowLayout.canonical([form.page_bytes for form in forms], 2), row_bytes=16384)
    caches = [np.random.default_rng(i).integers(0, 256, (4, f.page_bytes), dtype=np.uint8) for i, f in enumerate(forms)]
    read = [np.zeros_like(cache) for cache in caches]
    batch = PageBatch.of_chunks(np.array([[2, 1], [3, 0]]), np.array([1, 3]))

    def transfers(storage: Sequence[np.ndarray]) -> RegionTransfers:
        layers = [
            LayerPages(cache.ctypes.data, cache.strides[0], 4, form.mapping(index, Topology(1)))
            for index, (cache, form) in enumerate(zip(storage, forms, strict=True))
        ]
        return RegionTransfers(layers, region, layout, CpuCopies())

    transfers(caches).store(batch)
    transfers(read).load(batch)
    assert all(np.array_equal(one, other) for one, other in zip(caches, read, strict=True))


def test_an_empty_transfer_is_done(region: SharedRegion) -> None:
    pages = PageForm("split-hnd", 2, HEAD_BYTES, TOKENS)
    worker = Rank(pages, Topology(1), region, canonical_layout(pages, 1))
    nothing = PageBatch.of_chunks(np.full((2, 1), -1), np.array([0, 1]))
    assert worker.transfers.store(nothing).query()
    assert not region.rows.any()


def test_a_region_that_was_closed_is_not_written(region: SharedRegion) -> None:
    """Its addresses may belong to something else by then."""
    pages = PageForm("split-hnd", 2, HEAD_BYTES, TOKENS)
    worker = Rank(pages, Topology(1), region, canonical_layout(pages, 1))
    region.close()
    with pytest.raises(InvariantError, match="used after it was closed"):
        worker.transfers.store(PageBatch.of_chunks(np.array([[1]]), np.array([0])))


@pytest.mark.parametrize(
    ("blocks", "rows", "chunk_blocks", "message"),
    [
        ([NUM_BLOCKS], [0], [0], "names block 16 to 16: there are 16"),
        ([-1], [0], [0], "names block -1 to -1"),
        ([0, 1], [0, NUM_ROWS], [0, 0], "names region row 0 to 5: there are 5"),
        ([0], [-1], [0], "names region row -1"),
        ([0], [0], [2], "names block of a chunk 2 to 2: there are 2"),
        ([0, 1], [0], [0], r"has int64 \(2,\) as block"),
    ],
)
def test_pages_that_are_not_there_are_refused_before_a_byte_moves(
    region: SharedRegion, blocks: list[int], rows: list[int], chunk_blocks: list[int], message: str
) -> None:
    pages = PageForm("split-nhd", 2, HEAD_BYTES, TOKENS)
    worker = Rank(pages, Topology(1), region, canonical_layout(pages, 2))
    batch = PageBatch(*(np.array(values, dtype=np.int64) for values in (blocks, rows, chunk_blocks)))
    for copy in (worker.transfers.store, worker.transfers.load):
        with pytest.raises(InvariantError, match=message):
            copy(batch)
    assert not region.rows.any()


def test_layers_a_layout_and_a_region_that_do_not_belong_together_are_refused(region: SharedRegion) -> None:
    mapping = LayerMapping(0, 96, 96, (Run(0, 0, 96, 1, 0, 0),), 1, 0)
    layer = LayerPages(4096, 96, 4, mapping)
    fits = replace(RowLayout.canonical([96], 1), row_bytes=16384)
    with pytest.raises(InputError, match="2 layers do not fill rows of 1 layers"):
        RegionTransfers([layer, layer], region, fits, CpuCopies())
    with pytest.raises(InputError, match="rows of 4096 bytes are not those of the region, 16384 bytes"):
        RegionTransfers([layer], region, RowLayout.canonical([96], 1), CpuCopies())
    with pytest.raises(InputError, match="layer 0: pages of 96 bytes do not fill 95 in a row"):
        RegionTransfers([layer], region, replace(fits, page_bytes=(95,)), CpuCopies())
