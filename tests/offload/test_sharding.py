"""What any topology stores any other loads, byte for byte as an independent oracle has it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.errors import LayoutError
from hisparse.offload.layout import Family, KVGeometry, LayerMapping, Run, TensorView
from hisparse.offload.sharding import Topology, certify_worker, contiguous_view, derive_mapping
from tests.offload.by_hand import load, store
from tests.offload.global_kv import FILL, GlobalPage, memory, put

HEADS = [family for family in Family if family is not Family.LATENT]
POWERS = (1, 2, 4, 8)
NUM_BLOCKS = 5
STORED, LOADED = (3, 1, 4), (2, 0, 3)
"""Blocks that pages come from and go to: other numbers than those of the pages, and of each other."""


def pages_of(geometry: KVGeometry, context_ranks: int = 1) -> list[GlobalPage]:
    return [GlobalPage.random(geometry, context_ranks, seed) for seed in range(len(STORED))]


def canonical_memory(pages: list[GlobalPage]) -> np.ndarray:
    return np.full((len(pages), pages[0].data.size), FILL, dtype=np.uint8)


def store_all(geometry: KVGeometry, topology: Topology, pages: list[GlobalPage], views: list[TensorView]) -> np.ndarray:
    """Canonical pages as the ranks of a topology store them, `views[r]` being rank r's tensor."""
    out = canonical_memory(pages)
    for rank, view in zip(topology.ranks(), views, strict=True):
        buffer = memory(view)
        for block, page in zip(STORED, pages, strict=True):
            put(buffer, view, block, page.part(rank))
        store(derive_mapping(view, geometry, rank), view, buffer, out, STORED)
    return out


def load_all_and_compare(
    geometry: KVGeometry, topology: Topology, pages: list[GlobalPage], views: list[TensorView], stored: np.ndarray
) -> bool:
    """Whether every rank gets its tensor's bytes, and no other byte of the tensor's memory changes."""
    for rank, view in zip(topology.ranks(), views, strict=True):
        loaded, expected = memory(view), memory(view)
        load(derive_mapping(view, geometry, rank), view, loaded, stored, LOADED)
        for block, page in zip(LOADED, pages, strict=True):
            put(expected, view, block, page.part(rank))
        if not np.array_equal(loaded, expected):
            return False
    return True


def plain(geometry: KVGeometry, topology: Topology) -> list[TensorView]:
    return [contiguous_view(geometry, rank, NUM_BLOCKS) for rank in topology.ranks()]


@pytest.mark.parametrize("family", HEADS, ids=lambda family: family.value)
@pytest.mark.parametrize("num_heads", POWERS)
def test_what_one_tp_stores_every_other_loads(family: Family, num_heads: int) -> None:
    geometry = KVGeometry(family, num_heads, head_bytes=6, block_tokens=4)
    pages = pages_of(geometry)
    expected = np.stack([page.canonical(family) for page in pages])
    for writers in POWERS:
        stored = store_all(geometry, Topology(writers), pages, plain(geometry, Topology(writers)))
        assert np.array_equal(stored, expected)
        for readers in POWERS:
            assert load_all_and_compare(geometry, Topology(readers), pages, plain(geometry, Topology(readers)), stored)


@pytest.mark.parametrize("writers", POWERS)
def test_latent_rows_are_stored_once_and_loaded_by_every_tp(writers: int) -> None:
    geometry = KVGeometry(Family.LATENT, 1, head_bytes=22, block_tokens=4)
    pages = pages_of(geometry)
    stored = store_all(geometry, Topology(writers), pages, plain(geometry, Topology(writers)))
    assert np.array_equal(stored, np.stack([page.canonical(Family.LATENT) for page in pages]))
    for readers in POWERS:
        assert load_all_and_compare(geometry, Topology(readers), pages, plain(geometry, Topology(readers)), stored)


def test_a_wrong_head_or_token_would_be_seen() -> None:
    """The matrix fails when one rank takes another's heads, or tokens in another order."""
    geometry = KVGeometry(Family.PACKED_NHD, 4, head_bytes=6, block_tokens=4)
    pages, topology = pages_of(geometry), Topology(2)
    views = plain(geometry, topology)
    right = store_all(geometry, topology, pages, views)
    swapped = [replace(topology, rank=1), replace(topology, rank=0)]
    wrong = canonical_memory(pages)
    for rank, other, view in zip(topology.ranks(), swapped, views, strict=True):
        buffer = memory(view)
        for block, page in zip(STORED, pages, strict=True):
            put(buffer, view, block, page.part(rank))
        store(derive_mapping(view, geometry, other), view, buffer, wrong, STORED)
    assert not np.array_equal(wrong, right)
    assert load_all_and_compare(geometry, topology, pages, views, right)
    assert not load_all_and_compare(geometry, topology, pages, views, wrong)
    assert not load_all_and_compare(geometry, topology, pages, views, np.roll(right, 48, axis=1))


CONTEXTS = [
    Topology(tp, dcp, pcp, interleave)
    for tp, dcp, pcp, interleave in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2, 4))
    if tp % dcp == 0 and dcp * pcp > 1
]


@pytest.mark.parametrize("family", list(Family), ids=lambda family: family.value)
def test_tokens_that_ranks_share_come_back_to_them(family: Family) -> None:
    """dcp, pcp and interleave within one topology, with as many heads as dcp allows and fewer."""
    served = 0
    for topology, num_heads in itertools.product(CONTEXTS, (1, 2)):
        if num_heads * topology.dcp > topology.tp or (num_heads > 1 and family is Family.LATENT):
            continue
        geometry = KVGeometry(family, num_heads, head_bytes=3, block_tokens=4)
        pages, views = pages_of(geometry, topology.context_ranks), plain(geometry, topology)
        stored = store_all(geometry, topology, pages, views)
        assert np.array_equal(stored, np.stack([page.canonical(family) for page in pages])), topology
        assert load_all_and_compare(geometry, topology, pages, views, stored), topology
        served += 1
    assert served >= len(CONTEXTS) // 2


def test_the_page_is_in_the_order_of_its_tokens_whoever_held_them() -> None:
    """Turns of 2 over dcp, read in turns of 1 over pcp: as many ranks share the tokens, so the page is the same."""
    geometry = KVGeometry(Family.LATENT, 1, head_bytes=3, block_tokens=4)
    writers, readers = Topology(2, dcp=2, interleave=2), Topology(1, pcp=2)
    pages = pages_of(geometry, 2)
    stored = store_all(geometry, writers, pages, plain(geometry, writers))
    assert load_all_and_compare(geometry, readers, pages, plain(geometry, readers), stored)


def test_tokens_of_another_rank_would_be_seen() -> None:
    """Control: the ranks' tensors hold turns of 2, and mappings of turns of 1 are wrong for them."""
    geometry = KVGeometry(Family.LATENT, 1, head_bytes=3, block_tokens=4)
    topology = Topology(2, dcp=2, interleave=2)
    pages, views = pages_of(geometry, 2), plain(geometry, topology)
    wrong = canonical_memory(pages)
    for rank, view in zip(topology.ranks(), views, strict=True):
        buffer = memory(view)
        for block, page in zip(STORED, pages, strict=True):
            put(buffer, view, block, page.part(rank))
        store(derive_mapping(view, geometry, replace(rank, interleave=1)), view, buffer, wrong, STORED)
    assert not np.array_equal(wrong, store_all(geometry, topology, pages, views))


def test_a_page_that_lies_as_the_canonical_one_is_a_single_piece() -> None:
    for family in Family:
        geometry = KVGeometry(family, 1 if family is Family.LATENT else 4, head_bytes=256, block_tokens=16)
        mapping = derive_mapping(contiguous_view(geometry, Topology(1), 2, 2), geometry, Topology(1))
        size = mapping.canonical_page_bytes
        assert mapping.runs == (Run(0, 0, size, 1, 0, 0),)


def test_sharded_tokens_are_one_strided_run() -> None:
    """Eight heads at tp 4: two heads of every token, eight heads apart."""
    geometry = KVGeometry(Family.PACKED_NHD, 8, head_bytes=256, block_tokens=16)
    topology = Topology(4, rank=1)
    mapping = derive_mapping(contiguous_view(geometry, topology, 2, 2), geometry, topology)
    assert mapping.runs == (Run(0, 1024, 1024, 16, 1024, 4096),)
    assert (mapping.local_page_bytes, mapping.canonical_page_bytes) == (16384, 65536)


def test_turns_of_tokens_are_a_run_each() -> None:
    """Two of four tokens in turn, one of two heads: pieces two heads apart, and four tokens from turn to turn."""
    geometry, topology = (
        KVGeometry(Family.PACKED_NHD, 2, head_bytes=8, block_tokens=6),
        Topology(4, dcp=2, interleave=2),
    )
    mapping = derive_mapping(contiguous_view(geometry, topology, 2), geometry, topology)
    assert mapping.runs == tuple(Run(32 * turn, 128 * turn, 16, 2, 16, 32) for turn in range(3))


def test_the_canonical_page_does_not_depend_on_tp() -> None:
    geometry = KVGeometry(Family.SPLIT_HND, 4, head_bytes=32, block_tokens=8)
    sizes = {
        derive_mapping(contiguous_view(geometry, Topology(tp), 2), geometry, Topology(tp)).canonical_page_bytes
        for tp in POWERS
    }
    assert sizes == {geometry.canonical_page_bytes()} == {2 * 4 * 32 * 8}


@pytest.mark.parametrize(("num_heads", "tp", "dcp"), [(1, 8, 1), (2, 8, 1), (1, 8, 4), (8, 8, 1)])
def test_replicas_take_turns(num_heads: int, tp: int, dcp: int) -> None:
    """Of every group of replicas, each writes its share of consecutive pages and one of them writes each page."""
    geometry = KVGeometry(Family.SPLIT_NHD, num_heads, head_bytes=2, block_tokens=4)
    topology = Topology(tp, dcp)
    mappings = [derive_mapping(contiguous_view(geometry, rank, 2), geometry, rank) for rank in topology.ranks()]
    replication = tp // num_heads // dcp
    assert {mapping.replication for mapping in mappings} == {replication}
    written = np.array([[mapping.writes(page) for page in range(16)] for mapping in mappings])
    assert (written.sum(axis=0) == tp // replication).all()
    assert (written.sum(axis=1) == 16 // replication).all()


def test_layers_of_different_shapes_get_mappings_of_their_own() -> None:
    topology = Topology(4, rank=2)
    geometries = [KVGeometry(Family.LATENT, 1, 656, 64), KVGeometry(Family.LATENT, 1, 132, 64)] * 2
    views = [contiguous_view(geometry, topology, 8) for geometry in geometries]
    certificate = certify_worker(views, geometries, topology)
    assert [mapping.layer for mapping in certificate.mappings] == [0, 1, 2, 3]
    assert [mapping.canonical_page_bytes for mapping in certificate.mappings] == [64 * 656, 64 * 132] * 2
    assert {mapping.replica for mapping in certificate.mappings} == {2}
    with pytest.raises(LayoutError, match="4 tensors do not go with 3 layers"):
        certify_worker(views, geometries[:3], topology)


def test_offsets_beyond_32_bits_are_exact() -> None:
    """Values a whole slab behind their keys: a layout that keeps K and V apart."""
    geometry = KVGeometry(Family.SPLIT_NHD, 2, head_bytes=256, block_tokens=16)
    block = 16 * 2 * 256
    num_blocks = 2**33 // block
    shape = (2, num_blocks, 16, 2, 128)
    view = TensorView(shape, (num_blocks * block, block, 512, 256, 2), 2, "KBTHD")
    mapping = derive_mapping(view, geometry, Topology(1))
    assert mapping.runs == (Run(0, 0, block, 2, 2**33, block),)
    assert mapping.pieces().local_offsets.tolist() == [0, 2**33]


@st.composite
def topologies(draw: st.DrawFn) -> tuple[KVGeometry, Topology]:
    """Geometries and topologies that can belong together."""
    family = draw(st.sampled_from(Family))
    num_heads = 1 if family is Family.LATENT else draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    tp = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 12) if num_heads % n == 0 or n % num_heads == 0]))
    copies = max(1, tp // num_heads)
    dcp = draw(st.sampled_from([n for n in range(1, copies + 1) if copies % n == 0 and tp % n == 0]))
    tokens = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    interleave = draw(st.sampled_from([n for n in range(1, tokens + 1) if tokens % n == 0]))
    geometry = KVGeometry(family, num_heads, draw(st.sampled_from([2, 4, 10])), tokens)
    return geometry, Topology(tp, dcp, draw(st.sampled_from([1, 2, 3])), interleave)


@st.composite
def views(draw: st.DrawFn, geometry: KVGeometry, topology: Topology) -> TensorView:
    """A tensor of any legal shape: axes declared in any order, gaps anywhere, blocks outside or keys and values."""
    base = contiguous_view(geometry, topology, NUM_BLOCKS)
    size = dict(zip(base.declared, base.shape, strict=True))
    outside = [axis for axis in geometry.family.axes if axis != "D"]
    outside.insert(draw(st.integers(0, 1)) if outside[0] == "K" else 0, "B")
    element_bytes = draw(st.sampled_from([1, 2]))
    if geometry.family in (Family.PACKED_NHD, Family.PACKED_HND) and draw(st.booleans()):
        outside.remove("K")
        size["D"] *= 2
    strides, extent = {"D": element_bytes}, size["D"]
    for axis in reversed(outside):
        strides[axis] = extent + draw(st.sampled_from([0, 0, 2, 6]))
        extent = strides[axis] * (size[axis] - 1) + extent
        if size[axis] == 1 and draw(st.booleans()):
            strides[axis] = draw(st.integers(0, 100))  # says nothing: numpy and torch put anything there
    declared = "".join(draw(st.permutations(outside))) + "D"
    size["D"] //= element_bytes
    return TensorView(
        tuple(size[axis] for axis in declared), tuple(strides[axis] for axis in declared), element_bytes, declared
    )


@given(st.data())
@settings(max_examples=120)
def test_any_legal_tensors_of_any_topology_match_the_oracle(data: st.DataObject) -> None:
    """Ranks need not even have tensors alike, as long as each is of the family."""
    geometry, topology = data.draw(topologies())
    drawn = [data.draw(views(geometry, topology)) for _ in range(min(topology.world, 3))]
    tensors = list(itertools.islice(itertools.cycle(drawn), topology.world))
    pages = pages_of(geometry, topology.context_ranks)
    stored = store_all(geometry, topology, pages, tensors)
    assert np.array_equal(stored, np.stack([page.canonical(geometry.family) for page in pages]))
    assert load_all_and_compare(geometry, topology, pages, tensors, stored)
    first, *others = [certify_worker([view], [geometry], topology) for view in drawn]
    first.agree([other.digest for other in others])


@given(st.data())
@settings(max_examples=300)
def test_whatever_tensor_is_given_is_refused_or_right(data: st.DataObject) -> None:
    """Any shape, strides and declaration, near to a legal one: never bytes in the wrong place."""
    geometry, topology = data.draw(topologies())
    legal = data.draw(views(geometry, topology))
    declared = legal.declared
    if data.draw(st.integers(0, 3)) == 0:
        declared = "".join(data.draw(st.permutations(declared)))
    strides = list(legal.strides_bytes)
    for axis in data.draw(st.sets(st.integers(0, len(strides) - 1), max_size=2)):
        strides[axis] = data.draw(st.sampled_from([*legal.strides_bytes, 1, 2, 7, 50, 400]))
    view = TensorView(legal.shape, tuple(strides), legal.element_bytes, declared)
    try:
        mapping = derive_mapping(view, geometry, topology)
    except LayoutError:
        return
    pages = pages_of(geometry, topology.context_ranks)
    canonical = np.stack([page.canonical(geometry.family) for page in pages])
    loaded, expected = memory(view), memory(view)
    load(mapping, view, loaded, canonical, LOADED)
    for block, page in zip(LOADED, pages, strict=True):
        put(expected, view, block, page.part(topology))
    assert np.array_equal(loaded, expected)


@given(topologies())
@settings(max_examples=60)
def test_runs_say_no_more_than_their_pieces(drawn: tuple[KVGeometry, Topology]) -> None:
    """Runs are few, their pieces are maximal, and the digest changes with any of them."""
    geometry, topology = drawn
    mapping = derive_mapping(contiguous_view(geometry, topology, 2), geometry, topology)
    pieces = mapping.pieces()
    touching = (np.diff(pieces.local_offsets) == pieces.sizes[:-1]) & (
        np.diff(pieces.canonical_offsets) == pieces.sizes[:-1]
    )
    assert not touching.any()
    assert len(mapping.runs) <= len(pieces.sizes)
    assert _expanded(mapping) == list(
        zip(pieces.local_offsets.tolist(), pieces.canonical_offsets.tolist(), pieces.sizes.tolist(), strict=True)
    )
    longer = replace(mapping.runs[0], size=mapping.runs[0].size + 1)
    assert replace(mapping, runs=(longer, *mapping.runs[1:])).digest() != mapping.digest()


def _expanded(mapping: LayerMapping) -> list[tuple[int, int, int]]:
    return [
        (run.local_offset + i * run.local_stride, run.canonical_offset + i * run.canonical_stride, run.size)
        for run in mapping.runs
        for i in range(run.count)
    ]
