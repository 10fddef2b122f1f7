"""What an engine's caches look like to the offload path: groups, rows of the region, mappings, and what to call them.

Two groups of layers are kept below the GPU, each with a region, a namespace and a manager of its own, so that the pages
of one can be loaded without those of the other:

    RESIDENT  the latents of all layers, as they lie in the slab
    INDEXER   the index keys of the layers that run an indexer, as they lie in the indexer's store

Both are rows that all ranks hold alike (`Family.LATENT`). Sizes and names follow from the plan alone, so that the
scheduler's side needs no tensor; the worker's side derives and certifies mappings from the tensors as they are.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hisparse.cache.groups import GroupKind
from hisparse.config import CachePlan
from hisparse.errors import CapacityError, InputError
from hisparse.geometry import BlockGeometry
from hisparse.offload.config import OffloadConfig
from hisparse.offload.files.namespace import DirectTopology, Identity
from hisparse.offload.layout import Family, KVGeometry, LayerMapping, TensorView
from hisparse.offload.row_layout import RowLayout
from hisparse.offload.sharding import Topology, certify_worker, derive_mapping
from hisparse.offload.transfer import LayerPages

if TYPE_CHECKING:  # the scheduler's side needs no torch
    from hisparse.worker.views import PagedCacheView

OFFLOADED_GROUPS = (GroupKind.RESIDENT, GroupKind.INDEXER)
"""The groups that a prefix needs, in the order in which they are asked for."""

_DIGEST_BYTES = 16
_ROLES = {GroupKind.RESIDENT: "", GroupKind.INDEXER: " (index keys)"}
"""What the model's name says beside itself, so that rows of two groups which are equally long never meet."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What decides the KV of a text, beside the format of rows and the block size.

    `name` is for people; `revision` identifies the weights; `config_digest` is what `attention_config_digest` gives;
    `dtype` is what the model computes in; `root` is the key before the first page, which contains the hash seed.
    """

    name: str
    revision: str
    config_digest: str
    dtype: str
    root: bytes


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group of layers below the GPU: the rows of its region, and the name of what is in them."""

    kind: GroupKind
    geometry: KVGeometry
    rows: RowLayout
    identity: Identity
    topology: Topology
    is_canonical: bool

    @classmethod
    def of(
        cls, kind: GroupKind, plan: CachePlan, model: ModelIdentity, config: OffloadConfig, topology: Topology
    ) -> "GroupLayout":
        """Raises `InputError` for a group that is not kept below the GPU, `LayoutError` for a bad topology."""
        blocks = group_blocks(kind, plan)
        geometry = KVGeometry(Family.LATENT, 1, blocks.row_bytes, plan.config.block_size)
        canonical = config.canonical_layout
        context_ranks = topology.context_ranks if canonical else 1
        pages = (geometry.canonical_page_bytes(context_ranks),) * blocks.num_layers
        if canonical:
            rows = RowLayout.canonical(pages, config.blocks_per_chunk)
        else:
            rows = RowLayout.direct(pages, config.blocks_per_chunk, topology.world)
        identity = Identity(
            model=model.name + _ROLES[kind],
            revision=model.revision,
            config_digest=model.config_digest,
            hash_seed=_public(model.root),
            family=Family.LATENT.value,
            dtype=_stored_dtype(kind, plan, model.dtype),
            num_kv_heads=1,
            head_bytes=blocks.row_bytes,
            page_tokens=plan.config.block_size * context_ranks,
            page_bytes=rows.page_bytes,
            row_bytes=rows.row_bytes,
            blocks_per_chunk=config.blocks_per_chunk,
            topology=None if canonical else _direct(topology),
        )
        return cls(kind, geometry, rows, identity, topology, canonical)

    def pages(self, layers: "Sequence[PagedCacheView]") -> "CertifiedPages":
        """The worker's pages of `layers` (those of the group, in order), mapped to the rows. `layers` must outlive it.

        Raises `LayoutError` for tensors that the mapping cannot be certain of.
        """
        views = [tensor_view(layer) for layer in layers]
        certificate = certify_worker(views, [self.geometry] * len(views), self.topology)
        mappings: Sequence[LayerMapping] = certificate.mappings
        if not self.is_canonical:
            # A slot holds the worker's pages as it alone has them.
            mappings = [
                derive_mapping(view, self.geometry, Topology(1), layer=layer) for layer, view in enumerate(views)
            ]
        pages = tuple(
            LayerPages(layer.storage.data_ptr() + layer.layout.offset, view.block_stride, view.num_blocks, mapping)
            for layer, view, mapping in zip(layers, views, mappings, strict=True)
        )
        return CertifiedPages(pages, certificate.digest, 0 if self.is_canonical else self.topology.rank)


@dataclass(frozen=True, slots=True)
class CertifiedPages:
    """A worker's pages of one group, its slot in a row, and the digest that all ranks must agree on."""

    layers: tuple[LayerPages, ...]
    digest: bytes
    slot: int


def group_blocks(kind: GroupKind, plan: CachePlan) -> BlockGeometry:
    """The device blocks of a group. Raises `InputError` for a group that is not kept below the GPU."""
    if kind is GroupKind.RESIDENT:
        return plan.device
    if kind is GroupKind.INDEXER:
        return plan.indexer
    raise InputError(f"blocks of the {kind.value} group are not kept below the GPU")


def rows_for(budget_bytes: int, layouts: Sequence[GroupLayout]) -> int:
    """Chunks for which a budget holds the rows of all groups. Raises `CapacityError` when it holds none."""
    chunk_bytes = sum(layout.rows.row_bytes for layout in layouts)
    if budget_bytes < chunk_bytes:
        raise CapacityError(
            f"a CPU tier of {budget_bytes} bytes holds no chunk of {layouts[0].rows.blocks_per_chunk} pages: one takes "
            f"{chunk_bytes} bytes, and dozens are useful"
        )
    return budget_bytes // chunk_bytes


def tensor_view(layer: "PagedCacheView") -> TensorView:
    """A layer's rows as their tensor really lies, from the layer's first byte on: blocks, tokens, bytes of a row."""
    import torch

    rows = layer.rows(torch.uint8)
    return TensorView(tuple(rows.shape), rows.stride(), rows.element_size(), "BTD")


def _stored_dtype(kind: GroupKind, plan: CachePlan, computed: str) -> str:
    """The format of rows; with what the model computes in, where packing hides that."""
    row = plan.model.row.name
    stored = row if kind is GroupKind.RESIDENT else plan.model.index_dtype or row
    return stored if stored == computed else f"{stored} of {computed}"


def _direct(topology: Topology) -> DirectTopology:
    """A file holds the slots of all ranks in order."""
    return DirectTopology(topology.tp, 1, topology.dcp, topology.pcp, topology.interleave)


def _public(root: bytes) -> str:
    """What a directory may say of the root, whose salt may be a secret: 32 hex digits that do not lead back."""
    return hashlib.blake2b(root, digest_size=_DIGEST_BYTES).hexdigest()
