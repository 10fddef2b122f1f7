"""An engine's caches below the GPU: rows that follow from the plan, mappings of real tensors, names that differ."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hisparse.cache.groups import GroupKind
from hisparse.config import CacheConfig, CachePlan, ModelGeometry, plan_cache
from hisparse.errors import CapacityError, InputError, LayoutError
from hisparse.geometry import RowFormat
from hisparse.offload.config import OffloadConfig
from hisparse.offload.engine_layout import OFFLOADED_GROUPS, GroupLayout, ModelIdentity, rows_for, tensor_view
from hisparse.offload.files import DirectTopology
from hisparse.offload.page_copies import CpuCopies
from hisparse.offload.region import SharedRegion, new_region_name
from hisparse.offload.sharding import Topology
from hisparse.offload.transfer import PageBatch, RegionTransfers
from hisparse.worker.views import PagedCacheView

MODEL = ModelIdentity("tiny", "rev-1", "c0ffee", "float32", b"root".ljust(16, b"\0"))
RESIDENT, INDEXER = OFFLOADED_GROUPS
CONFIG = OffloadConfig(cpu_bytes=1 << 20)


ROW = RowFormat("float32", 48)
ONE_RANK = Topology(1)


def plan(block_size: int = 4, row: RowFormat = ROW, **geometry: Any) -> CachePlan:
    model = ModelGeometry(row, leader_of=(0, 0, 2), index_topk=4, index_row_bytes=32)
    model = replace(model, **geometry)
    config = CacheConfig(
        block_size=block_size,
        slab_bytes=64 << 10,
        host_pool_bytes=64 << 10,
        hot_rows=8,
        staging_rows=8,
        max_running=2,
        max_tokens=64,
        indexer_tokens=128,
    )
    return plan_cache(config, model)


def layout(
    kind: GroupKind = RESIDENT,
    of: CachePlan | None = None,
    model: ModelIdentity = MODEL,
    config: OffloadConfig = CONFIG,
    topology: Topology = ONE_RANK,
) -> GroupLayout:
    return GroupLayout.of(kind, of or plan(), model, config, topology)


# Names.


def test_the_two_groups_have_rows_of_their_layers_and_never_one_name() -> None:
    rows, keys = layout(RESIDENT), layout(INDEXER)
    assert rows.identity.page_bytes == (4 * 48,) * 3
    assert keys.identity.page_bytes == (4 * 32,) * 2
    assert {rows.identity.family, keys.identity.family} == {"latent"}
    # Even where rows of both are equally long, in as many layers.
    alike = plan(row=RowFormat("float32", 32), leader_of=(0, 1))
    one, other = layout(RESIDENT, alike).identity, layout(INDEXER, alike).identity
    assert one.page_bytes == other.page_bytes
    assert one.digest != other.digest


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model": replace(MODEL, name="other")},
    "revision": {"model": replace(MODEL, revision="rev-2")},
    "configuration": {"model": replace(MODEL, config_digest="decaf")},
    "dtype of the weights": {"model": replace(MODEL, dtype="bfloat16")},
    "hash seed": {"model": replace(MODEL, root=b"salt".ljust(16, b"\0"))},
    "format of rows": {"of": plan(row=RowFormat("fp8", 48), index_dtype="bfloat16")},
    "block size": {"of": plan(block_size=8)},
    "chunk size": {"config": replace(CONFIG, blocks_per_chunk=2)},
    "layout": {"config": replace(CONFIG, canonical_layout=False)},
}


@pytest.mark.parametrize("kind", OFFLOADED_GROUPS)
@pytest.mark.parametrize("other", OTHERS)
def test_what_decides_the_bytes_decides_the_name(kind: GroupKind, other: str) -> None:
    assert layout(kind).identity.digest == layout(kind).identity.digest
    assert layout(kind, **OTHERS[other]).identity.digest != layout(kind).identity.digest


def test_the_root_which_may_hold_a_secret_is_not_written_down() -> None:
    assert MODEL.root.hex() not in layout().identity.to_json()


def test_parallelism_is_part_of_the_name_only_where_ranks_have_slots() -> None:
    canonical = [layout(topology=Topology(tp)).identity.digest for tp in (1, 2, 8)]
    assert len(set(canonical)) == 1
    direct = [layout(config=replace(CONFIG, canonical_layout=False), topology=Topology(tp)) for tp in (1, 2, 8)]
    assert len({one.identity.digest for one in direct}) == 3
    assert [one.identity.topology for one in direct] == [DirectTopology(tp) for tp in (1, 2, 8)]
    assert [one.rows.num_slots for one in direct] == [1, 2, 8]


# Sizes.


def test_a_budget_is_shared_by_the_groups_in_proportion_to_their_rows() -> None:
    layouts = [layout(kind) for kind in OFFLOADED_GROUPS]
    chunk = sum(one.rows.row_bytes for one in layouts)
    assert rows_for(5 * chunk + 1, layouts) == 5
    with pytest.raises(CapacityError, match=f"holds no chunk of 1 pages: one takes {chunk} bytes"):
        rows_for(chunk - 1, layouts)


def test_other_groups_are_not_kept() -> None:
    with pytest.raises(InputError, match="hot group are not kept"):
        layout(GroupKind.HOT)


# Bytes.


def views(kind: GroupKind, of: CachePlan) -> list[PagedCacheView]:
    """Caches as a worker has them, each byte random."""
    blocks, num = (of.device, of.num_device_blocks) if kind is RESIDENT else (of.indexer, of.num_indexer_blocks)
    storage = torch.randint(256, (num * blocks.block_stride,), dtype=torch.uint8)
    return [PagedCacheView.over(storage, blocks.layer(index, num)) for index in range(blocks.num_layers)]


def test_a_view_is_what_the_tensor_says() -> None:
    of = plan()
    view = tensor_view(views(RESIDENT, of)[1])
    assert (view.shape, view.declared) == ((of.num_device_blocks, 4, 48), "BTD")
    assert view.strides_bytes == (of.device.block_stride, 48, 1)


@pytest.mark.parametrize("kind", OFFLOADED_GROUPS)
@pytest.mark.parametrize("canonical", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_pages_come_back_in_other_blocks_byte_for_byte(kind: GroupKind, canonical: bool, size: int) -> None:
    of = plan()
    config = replace(CONFIG, canonical_layout=canonical, blocks_per_chunk=size)
    found = layout(kind, of, config=config)
    layers = views(kind, of)
    pages = found.pages(layers)
    region = SharedRegion.create(new_region_name("test"), 2, found.rows.row_bytes)
    try:
        transfers = RegionTransfers(pages.layers, region, found.rows, CpuCopies(), pages.slot)
        saved = [layer.rows(torch.uint8).clone() for layer in layers]
        stored, loaded = np.arange(1, 1 + size)[None], np.arange(5, 5 + size)[None]
        transfers.store(PageBatch.of_chunks(stored, np.array([1])))
        in_region = found.rows.view(region.rows, 0)[1, 0].copy()
        transfers.load(PageBatch.of_chunks(loaded, np.array([1])))
        for layer, before in zip(layers, saved, strict=True):
            expected = before.clone()
            expected[loaded[0]] = before[stored[0]]
            assert torch.equal(layer.rows(torch.uint8), expected)
        assert in_region.tobytes() == saved[0][1].numpy().tobytes()
    finally:
        region.close()


def test_caches_of_other_rows_are_refused() -> None:
    with pytest.raises(LayoutError, match="axis D"):
        layout(RESIDENT).pages(views(INDEXER, plan()))
