"""Rows of one layout become rows of another, byte for byte as the oracle has them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hisparse.errors import InputError
from hisparse.offload.convert import Conversion, convert_pages, merge_pages, plan_conversion
from hisparse.offload.files.namespace import DirectTopology, Identity
from hisparse.offload.layout import Family, KVGeometry
from hisparse.offload.row_layout import RowLayout
from hisparse.offload.sharding import Topology, contiguous_view, derive_group
from tests.offload.global_kv import GlobalPage, memory, put

HEADS = [family for family in Family if family is not Family.LATENT]
NUM_ROWS, BLOCKS_PER_CHUNK, NUM_LAYERS = 2, 3, 2


def identity(
    family: Family, num_heads: int, page_bytes: int, direct: DirectTopology | None = None, num_slots: int = 1
) -> Identity:
    layout = RowLayout.direct([page_bytes] * NUM_LAYERS, BLOCKS_PER_CHUNK, num_slots)
    return Identity(
        model="m",
        revision="r",
        config_digest="c",
        hash_seed="s",
        family=family.value,
        dtype="bfloat16",
        num_kv_heads=num_heads,
        head_bytes=6,
        page_tokens=4,
        page_bytes=layout.page_bytes,
        row_bytes=layout.row_bytes,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        topology=direct,
    )


class World:
    """All pages of some rows: [row, block of the chunk, layer]."""

    def __init__(self, geometry: KVGeometry, topology: Topology) -> None:
        self.geometry, self.topology = geometry, topology
        places = itertools.product(range(NUM_ROWS), range(BLOCKS_PER_CHUNK), range(NUM_LAYERS))
        self.pages = {
            place: GlobalPage.random(geometry, topology.context_ranks, seed) for seed, place in enumerate(places)
        }

    def canonical_rows(self, family: Family) -> np.ndarray:
        page_bytes = next(iter(self.pages.values())).data.size
        layout = RowLayout.canonical([page_bytes] * NUM_LAYERS, BLOCKS_PER_CHUNK)
        rows = np.zeros((NUM_ROWS, layout.row_bytes), dtype=np.uint8)
        for (row, block, layer), page in self.pages.items():
            layout.view(rows, layer)[row, block] = page.canonical(family)
        return rows

    def direct_rows(self, ranks: list[Topology]) -> np.ndarray:
        """Rows with a slot for each of these ranks."""
        view = contiguous_view(self.geometry, self.topology, 1)
        page_bytes = view.strides_bytes[0]
        layout = RowLayout.direct([page_bytes] * NUM_LAYERS, BLOCKS_PER_CHUNK, len(ranks))
        rows = np.zeros((NUM_ROWS, layout.row_bytes), dtype=np.uint8)
        for (row, block, layer), page in self.pages.items():
            for slot, rank in enumerate(ranks):
                tensor = memory(view)
                put(tensor, view, 0, page.part(rank))
                layout.view(rows, layer, slot)[row, block] = tensor[:page_bytes]
        return rows


@pytest.mark.parametrize(("source", "target"), list(itertools.product(HEADS, HEADS)))
def test_every_family_becomes_every_other(source: Family, target: Family) -> None:
    world = World(KVGeometry(source, 3, 6, 4), Topology(1))
    conversion = plan_conversion(identity(source, 3, 144), target)
    rows = world.canonical_rows(source)
    converted = conversion.convert([rows])
    assert np.array_equal(converted, world.canonical_rows(target))
    assert np.array_equal(converted, rows) == (source is target)
    assert (conversion.target.family, conversion.target.name == conversion.source.name) == (
        target.value,
        source is target,
    )


TOPOLOGIES = [
    (Topology(2), 4),
    (Topology(4), 2),
    (Topology(8), 1),
    (Topology(4, dcp=2), 2),
    (Topology(2, dcp=2, pcp=2, interleave=2), 1),
]


@pytest.mark.parametrize("per_rank", [False, True])
@pytest.mark.parametrize(("topology", "num_heads"), TOPOLOGIES)
@pytest.mark.parametrize("family", list(Family), ids=lambda family: family.value)
def test_what_ranks_stored_by_themselves_becomes_canonical(
    family: Family, topology: Topology, num_heads: int, per_rank: bool
) -> None:
    """Slots of all ranks in one row, or a namespace for each rank; on the way, another family."""
    if family is Family.LATENT:
        num_heads = 1
    world = World(KVGeometry(family, num_heads, 6, 4), topology)
    target = {Family.PACKED_NHD: Family.SPLIT_HND}.get(family, family)
    page_bytes = contiguous_view(world.geometry, topology, 1).strides_bytes[0]
    direct = DirectTopology(
        topology.tp, 1, topology.dcp, topology.pcp, topology.interleave, rank=0 if per_rank else None
    )
    source = identity(family, num_heads, page_bytes, direct, 1 if per_rank else topology.world)
    conversion = plan_conversion(source, target)
    groups = [[rank] for rank in topology.ranks()] if per_rank else [topology.ranks()]
    assert conversion.num_sources == len(groups)
    converted = conversion.convert([world.direct_rows(group) for group in groups])
    assert np.array_equal(converted, world.canonical_rows(target))
    assert conversion.target.topology is None
    assert conversion.target.page_tokens == 4 * topology.context_ranks


def test_the_order_of_the_ranks_matters() -> None:
    """Control: rows of two ranks the wrong way round are not the same canonical rows."""
    world = World(KVGeometry(Family.SPLIT_NHD, 2, 6, 4), Topology(2))
    source = identity(Family.SPLIT_NHD, 2, 48, DirectTopology(2, rank=0))
    rows = [world.direct_rows([rank]) for rank in Topology(2).ranks()]
    conversion = plan_conversion(source, Family.SPLIT_NHD)
    assert np.array_equal(conversion.convert(rows), world.canonical_rows(Family.SPLIT_NHD))
    assert not np.array_equal(conversion.convert(rows[::-1]), world.canonical_rows(Family.SPLIT_NHD))


def test_latent_layers_may_have_rows_of_their_own_width() -> None:
    page_bytes = (4 * 22, 4 * 10)
    layout = RowLayout.direct(page_bytes, 1, 2)
    source = replace(
        identity(Family.LATENT, 1, 88, DirectTopology(2), 2),
        page_bytes=page_bytes,
        blocks_per_chunk=1,
        row_bytes=layout.row_bytes,
    )
    rows = np.zeros((1, layout.row_bytes), dtype=np.uint8)
    rows[:, : layout.slot_bytes] = np.arange(128, dtype=np.uint8)
    rows[:, layout.slot_bytes : layout.used_bytes] = 9  # of replicas, the first is taken
    converted = plan_conversion(source, Family.LATENT).convert([rows])
    assert converted[0, :128].tolist() == list(range(128))
    assert not converted[0, 128:].any()


@pytest.mark.parametrize(
    ("changed", "target", "reason"),
    [
        ({"family": "packed-xyz"}, Family.SPLIT_NHD, "is no family"),
        ({}, Family.LATENT, "has no heads"),
        ({"page_bytes": (144, 150)}, Family.SPLIT_NHD, "layer 1: .* not 150"),
        ({"num_kv_heads": 4}, Family.SPLIT_NHD, "layer 0: .* not 144"),
        ({"row_bytes": 8192}, Family.SPLIT_NHD, "rows of 8192 bytes"),
        ({"topology": DirectTopology(2)}, Family.SPLIT_NHD, "cannot be shared by tp 2"),
    ],
)
def test_what_cannot_be_converted_is_refused(changed: dict[str, object], target: Family, reason: str) -> None:
    source = identity(Family.PACKED_NHD, 3, 144)
    with pytest.raises(InputError, match=reason):
        plan_conversion(replace(source, **changed), target)  # type: ignore[arg-type]


def test_rows_of_other_sizes_are_refused() -> None:
    conversion: Conversion = plan_conversion(identity(Family.PACKED_NHD, 3, 144), Family.SPLIT_NHD)
    rows = np.zeros((2, conversion.source.row_bytes), dtype=np.uint8)
    for wrong in ([], [rows, rows], [rows[:, :-1]]):
        with pytest.raises(InputError, match="are not 1 times"):
            conversion.convert(wrong)


def test_pages_of_other_sizes_are_refused() -> None:
    geometry = KVGeometry(Family.PACKED_NHD, 3, 6, 4)
    pages = np.zeros((2, 144), dtype=np.uint8)
    with pytest.raises(InputError, match="must be 144 bytes"):
        convert_pages(pages[:, :100], pages[:, :100], geometry, Family.SPLIT_NHD)
    with pytest.raises(InputError, match="contiguous"):
        convert_pages(pages, np.zeros((144, 2), dtype=np.uint8).T, geometry, Family.SPLIT_NHD)
    with pytest.raises(InputError, match="no latent form"):
        convert_pages(pages, pages, geometry, Family.LATENT)
    mappings = derive_group(contiguous_view(geometry, Topology(3), 1), geometry, Topology(3))
    with pytest.raises(InputError, match="2 ranks' pages"):
        merge_pages([pages[:, :48]] * 2, pages, mappings)
    with pytest.raises(InputError, match="48 each"):
        merge_pages([pages[:, :47]] * 3, pages, mappings)
