"""A group of mappings is certified only if every byte of every page is stored once and loaded whole."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import LayoutError
from hisparse.offload.certificate import Certificate, certify, certify_layers
from hisparse.offload.layout import Family, KVGeometry, LayerMapping, Run
from hisparse.offload.sharding import Topology, certify_worker, contiguous_view, derive_group

GEOMETRY = KVGeometry(Family.PACKED_NHD, 4, 8, 4)


def group(topology: Topology, geometry: KVGeometry = GEOMETRY) -> list[LayerMapping]:
    return list(derive_group(contiguous_view(geometry, topology, 4), geometry, topology))


def shift(mapping: LayerMapping, **changes: int) -> LayerMapping:
    """The first run with its fields moved by `changes`."""
    first = mapping.runs[0]
    moved = replace(first, **{name: getattr(first, name) + by for name, by in changes.items()})
    return replace(mapping, runs=(moved, *mapping.runs[1:]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: shift(m, canonical_offset=8), "byte 16 twice"),
        (lambda m: shift(m, canonical_offset=-8), "leave the canonical page"),
        (lambda m: shift(m, canonical_stride=64), "leave the canonical page"),
        (lambda m: shift(m, canonical_stride=-64), "byte 0 twice"),
        (lambda m: shift(m, local_stride=-1), "the worker's page has byte"),
        (lambda m: shift(m, size=-1), "cover 60 of 64 bytes"),
        (lambda m: shift(m, count=-1), "cover 48 of 64 bytes"),
        (lambda m: shift(m, count=-4), "a run has no bytes"),
        (lambda m: replace(m, runs=()), "cover 0 of 64 bytes"),
        (lambda m: replace(m, runs=(*m.runs, m.runs[0])), "has byte 0 twice"),
        (lambda m: replace(m, replica=1), "replica 1 of 1"),
        (lambda m: replace(m, replication=2), "rank 0|replication"),
        (lambda m: replace(m, layer=3), "layer"),
        (lambda m: replace(m, canonical_page_bytes=512), "canonical_page_bytes"),
    ],
)
def test_one_rank_that_is_wrong_is_found(change: Callable[[LayerMapping], LayerMapping], reason: str) -> None:
    mappings = group(Topology(4))
    assert certify(mappings)
    with pytest.raises(LayoutError, match=reason):
        certify([change(mappings[0]), *mappings[1:]])


def test_ranks_that_leave_a_gap_or_meet_are_found() -> None:
    mappings = group(Topology(4))
    with pytest.raises(LayoutError, match="elected writers store 192 of 256 bytes"):
        certify(mappings[:3])
    with pytest.raises(LayoutError, match="what the elected writers store has byte"):
        certify([mappings[0], mappings[0], *mappings[2:]])


def test_replicas_that_both_write_or_none_are_found() -> None:
    mappings = group(Topology(4), KVGeometry(Family.LATENT, 1, 16, 4))
    assert [mapping.replica for mapping in mappings] == [0, 1, 2, 3]
    with pytest.raises(LayoutError, match="twice"):
        certify([mappings[0], mappings[0], *mappings[2:]])
    with pytest.raises(LayoutError, match="no rank is elected to write pages of turn 3"):
        certify(mappings[:3])


def test_nothing_is_not_certified() -> None:
    with pytest.raises(LayoutError, match="no ranks"):
        certify([])
    with pytest.raises(LayoutError, match="no layers"):
        certify_layers([])


def test_ranks_agree_however_their_tensors_lie_and_not_otherwise() -> None:
    topology = Topology(4)
    packed = contiguous_view(GEOMETRY, topology, 4)
    spaced = replace(packed, strides_bytes=(2 * packed.strides_bytes[0], *packed.strides_bytes[1:]))
    assert packed.declared[:2] == "BT"
    gaps = replace(packed, strides_bytes=(400, 100, *packed.strides_bytes[2:]))
    certificates = [certify_worker([view], [GEOMETRY], topology) for view in (packed, spaced, gaps)]
    for certificate in certificates:
        certificate.agree([other.digest for other in certificates])
    assert certificates[0].mappings[0].digest() != certificates[2].mappings[0].digest()


@pytest.mark.parametrize(
    ("topology", "geometry"),
    [
        (Topology(4), replace(GEOMETRY, family=Family.PACKED_HND)),
        (Topology(4), replace(GEOMETRY, block_tokens=8)),
        (Topology(4), replace(GEOMETRY, head_bytes=4)),
        (Topology(2), GEOMETRY),
        (Topology(4, pcp=2), GEOMETRY),
    ],
)
def test_a_rank_that_was_configured_otherwise_is_named(topology: Topology, geometry: KVGeometry) -> None:
    mine, other = (
        certify_worker([contiguous_view(g, t, 4)], [g], t) for t, g in ((Topology(4), GEOMETRY), (topology, geometry))
    )
    with pytest.raises(LayoutError, match=r"ranks \[1, 2\] of 4 map"):
        mine.agree([mine.digest, other.digest, other.digest, mine.digest])


def test_certificates_depend_on_the_turns_of_tokens() -> None:
    geometry = KVGeometry(Family.LATENT, 1, 16, 4)

    def digest(topology: Topology) -> bytes:
        return certify_worker([contiguous_view(geometry, topology, 4)], [geometry], topology).digest

    turns_of_1, turns_of_2, alone = (digest(t) for t in (Topology(2, 2), Topology(2, 2, 1, 2), Topology(2)))
    assert len({turns_of_1, turns_of_2, alone}) == 3
    assert turns_of_1 == digest(Topology(1, pcp=2))  # the same two ranks share the tokens in the same way


def test_layers_are_certified_together_and_in_order() -> None:
    layers = [group(Topology(2)), group(Topology(2), KVGeometry(Family.SPLIT_HND, 2, 8, 4))]
    assert certify_layers(layers) != certify_layers(layers[::-1])
    broken = [layers[0], [shift(layers[1][0], canonical_offset=-1), layers[1][1]]]
    with pytest.raises(LayoutError, match="leave the canonical page"):
        certify_layers(broken)


@given(st.data())
def test_any_piece_that_moves_is_found(data: st.DataObject) -> None:
    """A group whose pieces are all runs of their own: move, grow, shrink, drop or double any of them."""
    family = data.draw(st.sampled_from([f for f in Family if f is not Family.LATENT]))
    geometry = KVGeometry(family, data.draw(st.sampled_from([1, 2, 4])), 8, 4)
    mappings = [_in_pieces(mapping) for mapping in group(Topology(4), geometry)]
    assert certify(mappings)
    rank = data.draw(st.integers(0, 3))
    runs = list(mappings[rank].runs)
    index = data.draw(st.integers(0, len(runs) - 1))
    kind = data.draw(st.sampled_from(["move", "move local", "resize", "drop", "double"]))
    by = data.draw(st.integers(-40, 40).filter(bool))
    if kind == "move":
        runs[index] = replace(runs[index], canonical_offset=runs[index].canonical_offset + by)
    elif kind == "move local":
        # Towards a neighbour: a step into empty memory is a gap, which tensors may have.
        target = data.draw(st.sampled_from(runs))
        if target is runs[index]:
            return
        runs[index] = replace(runs[index], local_offset=target.local_offset + data.draw(st.integers(0, 3)))
    elif kind == "resize":
        runs[index] = replace(runs[index], size=max(0, runs[index].size + by))
    elif kind == "drop":
        del runs[index]
    else:
        runs.append(runs[index])
    with pytest.raises(LayoutError):
        certify([replace(m, runs=tuple(runs)) if r == rank else m for r, m in enumerate(mappings)])


def _in_pieces(mapping: LayerMapping) -> LayerMapping:
    pieces = mapping.pieces()
    columns = (pieces.local_offsets.tolist(), pieces.canonical_offsets.tolist(), pieces.sizes.tolist())
    return replace(mapping, runs=tuple(Run(*piece, 1, 0, 0) for piece in zip(*columns, strict=True)))


def test_a_certificate_compares_every_rank() -> None:
    certificate = Certificate((), b"same")
    certificate.agree([b"same"] * 3)
    with pytest.raises(LayoutError, match=r"ranks \[2\] of 3"):
        certificate.agree([b"same", b"same", b"else"])
