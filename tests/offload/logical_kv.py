"""A form of KV in caches without gaps, for tests of copies: the bytes of a page in the region and on each rank.

What they are is `global_kv`'s word. Only `mapping` asks the product.
"""

from dataclasses import dataclass, replace

import numpy as np

from hisparse.offload.layout import Family, KVGeometry, LayerMapping
from hisparse.offload.sharding import Topology, contiguous_view, derive_mapping
from tests.offload.global_kv import ORDER, GlobalPage

FORMS = [family.value for family in Family]

BLOCK_GAP_BYTES = 16
"""Blocks of a worker's cache lie this much further apart than they are long."""


@dataclass(frozen=True)
class PageForm:
    """One layer's canonical pages: the form, all KV heads (latents have none), bytes of a head, tokens of all ranks."""

    form: str
    num_heads: int
    head_bytes: int
    num_tokens: int

    @property
    def page_bytes(self) -> int:
        return self._geometry(1).token_bytes * self.num_tokens

    def logical(self, seed: int) -> np.ndarray:
        """What a model would have computed for one page: uint8 [kv, token, head, byte]."""
        return GlobalPage.random(self._geometry(1), 1, seed).data

    def canonical(self, logical: np.ndarray) -> np.ndarray:
        """The page's bytes in the region."""
        return GlobalPage(logical).canonical(Family(self.form))

    def local(self, logical: np.ndarray, topology: Topology) -> np.ndarray:
        """The page's bytes on a rank."""
        part = GlobalPage(logical).part(topology)
        return np.ascontiguousarray(part.transpose(ORDER[Family(self.form)])).reshape(-1)

    def mapping(self, layer: int, topology: Topology) -> LayerMapping:
        """What the product derives from a tensor whose blocks lie `BLOCK_GAP_BYTES` apart."""
        geometry = self._geometry(topology.context_ranks)
        view = contiguous_view(geometry, topology, num_blocks=4)
        strides = (view.strides_bytes[0] + BLOCK_GAP_BYTES, *view.strides_bytes[1:])
        return derive_mapping(replace(view, strides_bytes=strides), geometry, topology, layer=layer)

    def _geometry(self, context_ranks: int) -> KVGeometry:
        num_heads = 1 if self.form == "latent" else self.num_heads
        return KVGeometry(Family(self.form), num_heads, self.head_bytes, self.num_tokens // context_ranks)
