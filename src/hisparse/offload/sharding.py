"""All reasoning about parallelism: which bytes of a rank's page are which of the canonical page.

Ranks are numbered with tensor parallelism innermost. Rank r has `tp_rank = r mod tp` and `pcp_rank = r div tp`; its
place among the `cp = dcp*pcp` ranks that share a request's tokens is `pcp_rank*dcp + tp_rank mod dcp`. With fewer KV
heads than tensor-parallel ranks, heads are replicated over neighbouring ranks.

A mapping is derived from a tensor's real strides: the local offset of every head of every token is computed from them,
the canonical offset from the family, and neighbours that stay neighbours are joined. What does not fit is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hisparse.errors import LayoutError
from hisparse.offload.certificate import Certificate, certify, certify_layers
from hisparse.offload.layout import Family, KVGeometry, LayerMapping, Run, TensorView
from hisparse.offload.view_check import check_view

__all__ = [
    "Certificate",
    "Family",
    "KVGeometry",
    "LayerMapping",
    "Run",
    "TensorView",
    "Topology",
    "certify",
    "certify_worker",
    "contiguous_view",
    "derive_group",
    "derive_mapping",
]


@dataclass(frozen=True, slots=True)
class Topology:
    """How ranks share a model's KV, and which of them this is.

    `tp` ranks share the heads; of each `dcp` that hold the same heads, each keeps a share of the tokens, and so do
    `pcp` groups of tp ranks. Tokens go to these ranks in turns of `interleave`. Raises `LayoutError` for numbers that
    cannot belong together.
    """

    tp: int
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if min(self.tp, self.dcp, self.pcp, self.interleave) < 1:
            raise LayoutError(f"{self} has a size below 1")
        if self.tp % self.dcp:
            raise LayoutError(f"dcp {self.dcp} does not divide tp {self.tp}")
        if not 0 <= self.rank < self.world:
            raise LayoutError(f"rank {self.rank} is not one of {self.world} (tp {self.tp} x pcp {self.pcp})")

    @property
    def world(self) -> int:
        """All ranks."""
        return self.tp * self.pcp

    @property
    def context_ranks(self) -> int:
        """Ranks that share the tokens: dcp * pcp."""
        return self.dcp * self.pcp

    @property
    def tp_rank(self) -> int:
        """Place among the ranks that share the heads."""
        return self.rank % self.tp

    @property
    def context_rank(self) -> int:
        """Place among the ranks that share the tokens."""
        return self.rank // self.tp * self.dcp + self.tp_rank % self.dcp

    def ranks(self) -> list["Topology"]:
        """The same topology as every rank of it sees it."""
        return [replace(self, rank=rank) for rank in range(self.world)]


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The heads of one rank: `num_heads` of them from global head `first` on, held by `copies` ranks."""

    first: int
    num_heads: int
    copies: int

    @classmethod
    def of(cls, geometry: KVGeometry, topology: Topology) -> "HeadShard":
        """Raises `LayoutError` when heads and tp do not divide, or dcp would part tokens of different heads."""
        heads, tp = geometry.num_kv_heads, topology.tp
        if heads % tp and tp % heads:
            raise LayoutError(f"{heads} KV heads cannot be shared by tp {tp}: one must divide the other")
        copies = max(1, tp // heads)
        if copies % topology.dcp:
            raise LayoutError(
                f"dcp {topology.dcp} shares the tokens of ranks that hold the same heads, but with {heads} KV heads "
                f"at tp {tp} only {copies} do"
            )
        num_heads = max(1, heads // tp)
        return cls(topology.tp_rank // copies * num_heads, num_heads, copies)


def contiguous_view(geometry: KVGeometry, topology: Topology, num_blocks: int, element_bytes: int = 1) -> TensorView:
    """The view of a tensor whose blocks lie one after the other without gaps, in the order of the family.

    Raises `LayoutError` when heads and topology do not fit, or elements do not divide a head.
    """
    if element_bytes < 1 or geometry.head_bytes % element_bytes:
        raise LayoutError(f"elements of {element_bytes} bytes do not divide heads of {geometry.head_bytes} bytes")
    sizes = {
        "B": num_blocks,
        "K": geometry.num_kinds,
        "T": geometry.block_tokens,
        "H": HeadShard.of(geometry, topology).num_heads,
        "D": geometry.head_bytes // element_bytes,
    }
    declared = "B" + geometry.family.axes
    shape = tuple(sizes[axis] for axis in declared)
    strides = [element_bytes]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorView(shape, tuple(strides), element_bytes, declared)


def derive_mapping(view: TensorView, geometry: KVGeometry, topology: Topology, *, layer: int = 0) -> LayerMapping:
    """The mapping of one layer on rank `topology.rank`. Raises `LayoutError` for anything that is not certain."""
    try:
        shard = HeadShard.of(geometry, topology)
        _check_interleave(geometry, topology)
        check_view(view, geometry, shard.num_heads)
    except LayoutError as error:
        raise LayoutError(f"layer {layer}, rank {topology.rank}: {error}") from error
    local = _local_offsets(view, geometry, shard.num_heads)
    canonical = _canonical_offsets(geometry, topology, shard)
    replication = shard.copies // topology.dcp
    return LayerMapping(
        layer=layer,
        local_page_bytes=local.size * geometry.head_bytes,
        canonical_page_bytes=geometry.canonical_page_bytes(topology.context_ranks),
        runs=_runs(local.reshape(-1), canonical.reshape(-1), geometry.head_bytes),
        replication=replication,
        replica=topology.tp_rank % shard.copies // topology.dcp,
    )


def derive_group(
    view: TensorView, geometry: KVGeometry, topology: Topology, *, layer: int = 0
) -> tuple[LayerMapping, ...]:
    """The mapping of every rank, by rank, if all have tensors like this one. Raises like `derive_mapping`."""
    return tuple(derive_mapping(view, geometry, rank, layer=layer) for rank in topology.ranks())


def certify_worker(views: Sequence[TensorView], geometries: Sequence[KVGeometry], topology: Topology) -> Certificate:
    """What a worker does at start-up: its mapping of every layer, proved for the whole group.

    `views[l]`, `geometries[l]`: layer l's. Raises `LayoutError` with layer, rank and reason for anything uncertain. The
    ranks must then exchange `Certificate.digest` and call `Certificate.agree`.
    """
    if len(views) != len(geometries):
        raise LayoutError(f"{len(views)} tensors do not go with {len(geometries)} layers")
    derived: dict[tuple[TensorView, KVGeometry], tuple[LayerMapping, ...]] = {}
    groups = []
    for layer, key in enumerate(zip(views, geometries, strict=True)):
        if key not in derived:
            derived[key] = derive_group(*key, topology, layer=layer)
        groups.append([replace(mapping, layer=layer) for mapping in derived[key]])
    return Certificate(tuple(group[topology.rank] for group in groups), certify_layers(groups))


def _check_interleave(geometry: KVGeometry, topology: Topology) -> None:
    if topology.context_ranks > 1 and geometry.block_tokens % topology.interleave:
        raise LayoutError(
            f"turns of {topology.interleave} tokens do not divide blocks of {geometry.block_tokens}: a canonical page "
            "would miss tokens"
        )


def _local_offsets(view: TensorView, geometry: KVGeometry, num_heads: int) -> np.ndarray:
    """Where each head of each token starts in a block: int64 `[kinds, tokens, heads]`."""
    stride = dict(zip(view.declared, view.strides_bytes, strict=True))
    kind = stride.get("K", geometry.head_bytes)  # packed without an axis of its own: the value follows the key
    return _grid(
        np.arange(geometry.num_kinds) * kind,
        np.arange(geometry.block_tokens) * stride["T"],
        np.arange(num_heads) * stride.get("H", 0),
    )


def _canonical_offsets(geometry: KVGeometry, topology: Topology, shard: HeadShard) -> np.ndarray:
    """Where the same bytes start in the canonical page: int64 `[kinds, tokens, heads]`."""
    ranks, turn = topology.context_ranks, topology.interleave
    sizes = {
        "K": geometry.num_kinds,
        "T": geometry.block_tokens * ranks,
        "H": geometry.num_kv_heads,
        "D": geometry.head_bytes,
    }
    stride, inner = {"H": 0, "K": 0}, 1
    for axis in reversed(geometry.family.axes):
        stride[axis] = inner
        inner *= sizes[axis]
    token = np.arange(geometry.block_tokens)
    if ranks > 1:
        token = (token // turn * ranks + topology.context_rank) * turn + token % turn
    head = shard.first + np.arange(shard.num_heads)
    return _grid(np.arange(geometry.num_kinds) * stride["K"], token * stride["T"], head * stride["H"])


def _grid(kinds: np.ndarray, tokens: np.ndarray, heads: np.ndarray) -> np.ndarray:
    return np.asarray(kinds[:, None, None] + tokens[:, None] + heads, dtype=np.int64)


def _runs(local: np.ndarray, canonical: np.ndarray, size: int) -> tuple[Run, ...]:
    """Pieces of `size` bytes as few runs as a pass over them finds, in canonical order."""
    order = np.argsort(canonical)
    local, canonical = local[order], canonical[order]
    touches = (np.diff(local) == size) & (np.diff(canonical) == size)
    starts = np.flatnonzero(np.append(True, ~touches))
    sizes = np.diff(np.append(starts, len(local))) * size
    return tuple(_regular(local[starts], canonical[starts], sizes))


def _regular(local: np.ndarray, canonical: np.ndarray, sizes: np.ndarray) -> Sequence[Run]:
    steps = np.stack([np.diff(local), np.diff(canonical), np.diff(sizes)])
    # Step i and step i+1 differ: a run that goes over step i ends at piece i+1.
    changes = np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(axis=0)) + 1
    runs, start = [], 0
    while start < len(sizes):
        if start + 1 == len(sizes) or steps[2, start]:
            count, local_stride, canonical_stride = 1, 0, 0
        else:
            after = int(np.searchsorted(changes, start, side="right"))
            last = int(changes[after]) if after < len(changes) else len(sizes) - 1
            count, local_stride, canonical_stride = last - start + 1, int(steps[0, start]), int(steps[1, start])
        first = (int(local[start]), int(canonical[start]), int(sizes[start]))
        runs.append(Run(*first, count, local_stride, canonical_stride))
        start += count
    return runs
