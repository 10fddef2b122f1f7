"""Stored KV from one layout into another: between families, and from what each rank stored to canonical pages.

Works on rows as the region and the files hold them, many at a time and without a GPU. Bytes are moved, never computed:
a head of a token is the same bytes in every layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hisparse.errors import InputError
from hisparse.offload.files.namespace import Identity
from hisparse.offload.layout import Family, KVGeometry, LayerMapping
from hisparse.offload.row_layout import RowLayout
from hisparse.offload.sharding import Topology, certify, contiguous_view, derive_group


def convert_pages(pages: np.ndarray, out: np.ndarray, geometry: KVGeometry, family: Family) -> None:
    """Canonical pages of `geometry` into `out`, in the order of `family`. uint8 `[…, page_bytes]` each.

    `geometry.block_tokens` are the tokens of a canonical page. Last axes must be contiguous. Raises `InputError` for
    arrays of other sizes, or between a latent and heads.
    """
    if (family is Family.LATENT) != (geometry.family is Family.LATENT):
        raise InputError(f"{geometry.family.value} pages have no {family.value} form: a latent has no heads")
    if pages.shape != out.shape or pages.shape[-1] != geometry.canonical_page_bytes():
        raise InputError(
            f"pages {pages.shape} into {out.shape}: the last axes must be {geometry.canonical_page_bytes()} bytes"
        )
    if pages.strides[-1] != 1 or out.strides[-1] != 1:
        raise InputError("the bytes of a page must be contiguous")
    lead = pages.shape[:-1]
    size = {"K": geometry.num_kinds, "T": geometry.block_tokens, "H": geometry.num_kv_heads, "D": geometry.head_bytes}
    before, after = geometry.family.axes, family.axes
    source = pages.reshape(*lead, *(size[axis] for axis in before))
    destination = out.reshape(*lead, *(size[axis] for axis in after))
    order = [len(lead) + before.index(axis) for axis in after]
    destination[...] = source.transpose(*range(len(lead)), *order)


def merge_pages(slots: Sequence[np.ndarray], out: np.ndarray, mappings: Sequence[LayerMapping]) -> None:
    """Every rank's own pages into canonical ones of the same family.

    `slots[r]`: uint8 `[…, local_page_bytes]` of rank r, without gaps; `out`: uint8 `[…, canonical_page_bytes]`;
    `mappings[r]`: of contiguous pages. Of replicas, the first is taken. Raises `InputError` for other sizes, and
    `LayoutError` when the mappings do not tile the page.
    """
    certify(mappings)
    if len(slots) != len(mappings) or out.shape[-1] != mappings[0].canonical_page_bytes:
        raise InputError(f"{len(slots)} ranks' pages do not make pages of {out.shape[-1]} bytes of {len(mappings)}")
    for pages, mapping in zip(slots, mappings, strict=True):
        if pages.shape != (*out.shape[:-1], mapping.local_page_bytes):
            raise InputError(f"pages {pages.shape} of a rank do not make {out.shape}, {mapping.local_page_bytes} each")
        if mapping.replica:
            continue
        for run in mapping.runs:
            source = _pieces(pages, run.local_offset, run.local_stride, (run.count, run.size))
            _pieces(out, run.canonical_offset, run.canonical_stride, (run.count, run.size))[...] = source


def _pieces(pages: np.ndarray, offset: int, stride: int, shape: tuple[int, int]) -> np.ndarray:
    strides = (*pages.strides[:-1], stride, 1)
    return np.lib.stride_tricks.as_strided(pages[..., offset:], (*pages.shape[:-1], *shape), strides)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How rows of one namespace become rows of another. `num_sources`: rows that one result is made of.

    That is 1, or the number of ranks where each rank's bytes lie in a namespace of its own.
    """

    source: Identity
    target: Identity
    num_sources: int

    def convert(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """`rows[s]`: uint8 `[n, source.row_bytes]`, the same chunks from every source. Returns `[n, target.row_bytes]`.

        Raises `InputError` for arrays of other sizes.
        """
        shape = (len(rows[0]) if rows else 0, self.source.row_bytes)
        if len(rows) != self.num_sources or any(array.shape != shape for array in rows):
            raise InputError(
                f"rows {[array.shape for array in rows]} are not {self.num_sources} times [n, {self.source.row_bytes}]"
            )
        family = Family(self.target.family)
        out = np.zeros((shape[0], self.target.row_bytes), dtype=np.uint8)
        to = RowLayout.canonical(self.target.page_bytes, self.target.blocks_per_chunk)
        for layer, geometry in enumerate(_geometries(self.source)):
            pages = self._canonical(rows, layer, geometry)
            tokens = geometry.block_tokens * self._topology().context_ranks
            convert_pages(pages, to.view(out, layer), replace(geometry, block_tokens=tokens), family)
        return out

    def _topology(self) -> Topology:
        return _topology(self.source)

    def _canonical(self, rows: Sequence[np.ndarray], layer: int, geometry: KVGeometry) -> np.ndarray:
        """One layer's pages: uint8 `[n, blocks_per_chunk, canonical page]`, still in the source's family."""
        topology, source = self._topology(), self.source
        if source.topology is None:
            return RowLayout.canonical(source.page_bytes, source.blocks_per_chunk).view(rows[0], layer)
        num_slots = topology.world // self.num_sources
        layout = RowLayout.direct(source.page_bytes, source.blocks_per_chunk, num_slots)
        slots = [layout.view(array, layer, slot) for array in rows for slot in range(num_slots)]
        page_bytes = geometry.canonical_page_bytes(topology.context_ranks)
        pages = np.empty((len(rows[0]), source.blocks_per_chunk, page_bytes), dtype=np.uint8)
        merge_pages(slots, pages, derive_group(contiguous_view(geometry, topology, 1), geometry, topology, layer=layer))
        return pages


def plan_conversion(source: Identity, family: Family) -> Conversion:
    """How to make canonical rows of `family` out of a namespace's rows.

    Where `source.topology.rank` names one rank, the rows of all ranks' namespaces are needed, by rank. Raises
    `InputError` (`LayoutError`) when the namespace's numbers are not those of its family, or it has no such form.
    """
    topology = _topology(source)
    geometries = _geometries(source)
    if (family is Family.LATENT) != (source.family == Family.LATENT.value):
        raise InputError(f"{source.family} pages have no {family.value} form: a latent has no heads")
    page_bytes = tuple(geometry.canonical_page_bytes(topology.context_ranks) for geometry in geometries)
    target = replace(
        source,
        family=family.value,
        page_tokens=source.page_tokens * topology.context_ranks,
        page_bytes=page_bytes,
        row_bytes=RowLayout.canonical(page_bytes, source.blocks_per_chunk).row_bytes,
        topology=None,
    )
    per_rank = source.topology is not None and source.topology.rank is not None
    num_sources = topology.world if per_rank else 1
    num_slots = topology.world // num_sources
    expected = RowLayout.direct(source.page_bytes, source.blocks_per_chunk, num_slots).row_bytes
    if source.row_bytes != expected:
        raise InputError(f"rows of {source.row_bytes} bytes are not those of {num_slots} slots: {expected} bytes")
    return Conversion(source, target, num_sources)


def _topology(identity: Identity) -> Topology:
    """Of the writers; one rank for canonical rows."""
    direct = identity.topology
    return Topology(1) if direct is None else Topology(direct.tp, direct.dcp, direct.pcp, direct.interleave)


def _geometries(identity: Identity) -> list[KVGeometry]:
    """Each layer's, of all heads and one rank's tokens. Latent rows may differ from layer to layer."""
    try:
        family = Family(identity.family)
    except ValueError as error:
        raise InputError(f"{identity.family!r} is no family: {', '.join(f.value for f in Family)}") from error
    topology = _topology(identity)
    geometries = []
    for layer, page_bytes in enumerate(identity.page_bytes):
        heads, head_bytes = identity.num_kv_heads, identity.head_bytes
        if family is Family.LATENT:
            heads, head_bytes = 1, page_bytes // identity.page_tokens
        geometry = KVGeometry(family, heads, head_bytes, identity.page_tokens)
        mapping = derive_group(contiguous_view(geometry, topology, 1), geometry, topology, layer=layer)[0]
        if mapping.local_page_bytes != page_bytes:
            raise InputError(
                f"layer {layer}: {family.value} pages have {mapping.local_page_bytes} bytes, not {page_bytes}"
            )
        geometries.append(geometry)
    return geometries
