"""Tensors that cannot be certified are refused, with what is wrong; those that look ambiguous are settled."""

import subprocess
import sys
from dataclasses import replace

import pytest

from hisparse.errors import LayoutError
from hisparse.offload.layout import Family, KVGeometry, TensorView
from hisparse.offload.sharding import Topology, contiguous_view, derive_mapping

ONE = Topology(1)


def view(declared: str, shape: tuple[int, ...], order: str = "", element_bytes: int = 1) -> TensorView:
    """A tensor with these axes and sizes, in memory in `order`, outermost first, without gaps."""
    size = dict(zip(declared, shape, strict=True))
    strides, step = {}, element_bytes
    for axis in reversed(order or declared):
        strides[axis] = step
        step *= size[axis]
    return TensorView(shape, tuple(strides[axis] for axis in declared), element_bytes, declared)


@pytest.mark.parametrize(
    ("family", "declared", "shape", "order"),
    [
        (Family.SPLIT_NHD, "KBTHD", (2, 9, 4, 3, 8), ""),
        (Family.SPLIT_NHD, "BKTHD", (9, 2, 4, 3, 8), ""),
        (Family.SPLIT_HND, "KBTHD", (2, 9, 4, 3, 8), "KBHTD"),
        (Family.SPLIT_HND, "BKTHD", (9, 2, 4, 3, 8), "BKHTD"),
        (Family.PACKED_NHD, "BTHKD", (9, 4, 3, 2, 8), ""),
        (Family.PACKED_NHD, "BTHD", (9, 4, 3, 16), ""),
        (Family.PACKED_HND, "BTHD", (9, 4, 3, 16), "BHTD"),
        (Family.PACKED_HND, "KBHTD", (2, 9, 3, 4, 8), "BHTKD"),
    ],
)
def test_shapes_that_engines_use_are_certified(
    family: Family, declared: str, shape: tuple[int, ...], order: str
) -> None:
    mapping = derive_mapping(view(declared, shape, order), KVGeometry(family, 3, 8, 4), ONE)
    assert mapping.local_page_bytes == mapping.canonical_page_bytes == 2 * 3 * 8 * 4


@pytest.mark.parametrize("order", ["BKTHD", "BKHTD"])
def test_two_heads_in_blocks_of_two_tokens_are_told_apart_by_strides(order: str) -> None:
    """Every axis but D has two entries: the shape fits all layouts, and only one family is right."""
    tensor = view("BKTHD", (2, 2, 2, 2, 8), order)
    accepted = []
    for family in (Family.PACKED_NHD, Family.PACKED_HND, Family.SPLIT_NHD, Family.SPLIT_HND):
        try:
            derive_mapping(tensor, KVGeometry(family, 2, 8, 2), ONE)
        except LayoutError:
            continue
        accepted.append(family)
    assert accepted == [Family.SPLIT_NHD if order == "BKTHD" else Family.SPLIT_HND]


def test_the_declaration_tells_apart_what_neither_shape_nor_strides_do() -> None:
    """As many heads as tokens in a block, no gaps: the same numbers are NHD or HND as declared."""
    geometry = KVGeometry(Family.PACKED_NHD, 4, 8, 4)
    assert derive_mapping(view("BTHD", (9, 4, 4, 16)), geometry, ONE)
    with pytest.raises(LayoutError, match="lies in memory as HTD, a packed-nhd page as THD"):
        derive_mapping(view("BHTD", (9, 4, 4, 16)), geometry, ONE)
    with pytest.raises(LayoutError, match="are not declared"):
        derive_mapping(replace(view("BTHD", (9, 4, 4, 16)), declared=""), geometry, ONE)


def test_one_head_lies_alike_in_both_orders() -> None:
    for family in (Family.PACKED_NHD, Family.PACKED_HND):
        geometry = KVGeometry(family, 8, 8, 4)
        for order in ("BTHD", "BHTD"):
            mapping = derive_mapping(view("BTHD", (9, 4, 1, 16), order), geometry, Topology(8, rank=3))
            assert mapping.local_page_bytes == 64


GEOMETRY = KVGeometry(Family.SPLIT_NHD, 3, 8, 4)
LEGAL = view("BKTHD", (9, 2, 4, 3, 8))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"declared": "BKTH"}, "has 4 axes"),
        ({"declared": "BKTHT"}, "is no layout"),
        ({"declared": "BKTHX"}, "is no layout"),
        ({"declared": "BTKHD"}, "axis K of .* has 4 entries, not 2 kinds"),
        ({"declared": "BKHTD"}, "axis T of .* has 3 entries, not 4 tokens"),
        ({"declared": "TKBHD"}, "axis T of .* has 9 entries, not 4 tokens"),
        ({"shape": (9, 2, 4, 3, 16)}, "axis D of .* has 16 x 1 bytes, not 8"),
        ({"shape": (0, 2, 4, 3, 8)}, "holds nothing"),
        ({"shape": (9, 2, 4, 3)}, "strides .* do not"),
        ({"element_bytes": 2}, "axis D of .* has 8 x 2 bytes, not 8"),
        ({"strides_bytes": (96, 96, 24, 8, 1)}, "entries would overlap"),
        ({"strides_bytes": (192, 96, 23, 8, 1)}, "entries would overlap"),
        ({"strides_bytes": (192, 96, 24, 8, 0)}, "entries would overlap"),
        ({"strides_bytes": (-192, 96, 24, 8, 1)}, "entries would overlap"),
        ({"strides_bytes": (384, 192, 48, 16, 2)}, "heads must be contiguous"),
        ({"strides_bytes": (192, 96, 8, 32, 1)}, "lies in memory as KHTD, a split-nhd page as KTHD"),
        ({"strides_bytes": (192, 8, 48, 16, 1)}, "lies in memory as THKD"),
        ({"strides_bytes": (2**60, 96, 24, 8, 1)}, "64 bits"),
    ],
)
def test_what_is_wrong_is_said(changed: dict[str, object], reason: str) -> None:
    assert derive_mapping(LEGAL, GEOMETRY, ONE)  # each case is one change away from this
    with pytest.raises(LayoutError, match=f"layer 7, rank 0: .*{reason}"):
        derive_mapping(replace(LEGAL, **changed), GEOMETRY, ONE, layer=7)  # type: ignore[arg-type]


def test_a_split_page_needs_its_key_value_axis_and_a_latent_neither() -> None:
    with pytest.raises(LayoutError, match="lacks K"):
        derive_mapping(view("BTHD", (9, 4, 3, 16)), GEOMETRY, ONE)
    with pytest.raises(LayoutError, match="lacks H"):
        derive_mapping(view("BTD", (9, 4, 48)), KVGeometry(Family.PACKED_NHD, 3, 8, 4), ONE)
    latent = KVGeometry(Family.LATENT, 1, 22, 4)
    assert derive_mapping(view("BTD", (9, 4, 22)), latent, ONE) == derive_mapping(
        view("KBTHD", (1, 9, 4, 1, 22)), latent, ONE
    )


def test_keys_and_values_of_different_width_are_refused() -> None:
    with pytest.raises(LayoutError, match="axis D"):
        derive_mapping(view("BTHD", (9, 4, 3, 8 + 12)), KVGeometry(Family.PACKED_NHD, 3, 8, 4), ONE)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tp": 0}, "below 1"),
        ({"tp": 4, "dcp": 3}, "dcp 3 does not divide tp 4"),
        ({"tp": 4, "rank": 4}, "rank 4 is not one of 4"),
        ({"tp": 2, "pcp": 2, "rank": -1}, "rank -1 is not one of 4"),
    ],
)
def test_topologies_that_cannot_be_are_refused(arguments: dict[str, int], reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        Topology(**arguments)


@pytest.mark.parametrize(
    ("num_heads", "topology", "reason"),
    [
        (6, Topology(4), "6 KV heads cannot be shared by tp 4"),
        (4, Topology(6), "4 KV heads cannot be shared by tp 6"),
        (8, Topology(8, dcp=2), "only 1 do"),
        (2, Topology(8, dcp=8), "only 4 do"),
        (1, Topology(2, dcp=2, interleave=3), "turns of 3 tokens do not divide blocks of 4"),
    ],
)
def test_heads_and_tokens_that_do_not_divide_are_refused(num_heads: int, topology: Topology, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        derive_mapping(LEGAL, KVGeometry(Family.SPLIT_NHD, num_heads, 8, 4), topology)


def test_geometries_that_hold_nothing_are_refused() -> None:
    with pytest.raises(LayoutError, match="at least 1"):
        KVGeometry(Family.SPLIT_NHD, 3, 0, 4)
    with pytest.raises(LayoutError, match="must be 1"):
        KVGeometry(Family.LATENT, 2, 22, 4)
    with pytest.raises(LayoutError, match="do not divide"):
        contiguous_view(KVGeometry(Family.LATENT, 1, 7, 4), ONE, 2, element_bytes=2)


def test_checks_do_not_vanish_when_python_optimises() -> None:
    program = (
        "from hisparse.errors import LayoutError\n"
        "from hisparse.offload.sharding import *\n"
        "geometry = KVGeometry(Family.SPLIT_NHD, 3, 8, 4)\n"
        "legal = contiguous_view(geometry, Topology(1), 9)\n"
        "mapping = derive_mapping(legal, geometry, Topology(1))\n"
        "for refused in (lambda: certify([mapping, mapping]), lambda: derive_mapping(legal, geometry, Topology(3))):\n"
        "    try:\n"
        "        refused()\n"
        "    except LayoutError as error:\n"
        "        print(error)\n"
        "assert False, 'asserts are off'\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stdout + done.stderr
