"""KV as a model means it, and where a worker and the canonical page keep each byte of it.

An oracle beside `sharding`: layouts are transpositions of one array, of which a rank has some heads and tokens. Only
`mapping` asks the product.
"""

from dataclasses import dataclass, replace

import numpy as np

from hisparse.offload.layout import Family, KVGeometry, LayerMapping
from hisparse.offload.sharding import Topology, contiguous_view, derive_mapping

AXES = {
    # From [kv, token, head, byte] to the order in which a form stores them.
    "packed-nhd": (1, 2, 0, 3),
    "packed-hnd": (2, 1, 0, 3),
    "split-nhd": (0, 1, 2, 3),
    "split-hnd": (0, 2, 1, 3),
    "latent": (0, 1, 2, 3),
}
"""Forms of a page. A latent row has neither kv nor heads: both axes have one entry, on every rank."""

BLOCK_GAP_BYTES = 16
"""Blocks of a worker's cache lie this much further apart than they are long."""


@dataclass(frozen=True)
class PageForm:
    """One layer's canonical pages: the form, all KV heads, bytes of one head, tokens of all ranks."""

    form: str
    num_heads: int
    head_bytes: int
    num_tokens: int

    @property
    def is_latent(self) -> bool:
        return self.form == "latent"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[kv, token, head, byte]."""
        if self.is_latent:
            return 1, self.num_tokens, 1, self.head_bytes
        return 2, self.num_tokens, self.num_heads, self.head_bytes

    @property
    def page_bytes(self) -> int:
        return int(np.prod(self.shape))

    def logical(self, seed: int) -> np.ndarray:
        """What a model would have computed for one page: uint8 of `shape`."""
        return np.random.default_rng(seed).integers(0, 256, self.shape, dtype=np.uint8)

    def canonical(self, logical: np.ndarray) -> np.ndarray:
        """The page's bytes in the region."""
        return np.ascontiguousarray(logical.transpose(AXES[self.form])).reshape(-1)

    def local(self, logical: np.ndarray, topology: Topology) -> np.ndarray:
        """The page's bytes on a rank."""
        held = logical[:, self._tokens(topology)][:, :, self._heads(topology)]
        return np.ascontiguousarray(held.transpose(AXES[self.form])).reshape(-1)

    def mapping(self, layer: int, topology: Topology) -> LayerMapping:
        """What the product derives from a tensor whose blocks lie `BLOCK_GAP_BYTES` apart."""
        num_heads = 1 if self.is_latent else self.num_heads
        tokens = self.num_tokens // (topology.dcp * topology.pcp)
        geometry = KVGeometry(Family(self.form), num_heads, self.head_bytes, tokens)
        view = contiguous_view(geometry, topology, num_blocks=4)
        strides = (view.strides_bytes[0] + BLOCK_GAP_BYTES, *view.strides_bytes[1:])
        return derive_mapping(replace(view, strides_bytes=strides), geometry, topology, layer=layer)

    def _heads(self, topology: Topology) -> slice:
        if self.is_latent:
            return slice(0, 1)
        per_rank = max(1, self.num_heads // topology.tp)
        shard = topology.rank % topology.tp // max(1, topology.tp // self.num_heads)
        return slice(shard * per_rank, (shard + 1) * per_rank)

    def _tokens(self, topology: Topology) -> list[int]:
        """Tokens in turns of `interleave`, from rank to rank of those that share them."""
        ranks = topology.dcp * topology.pcp
        own = topology.rank // topology.tp * topology.dcp + topology.rank % topology.tp % topology.dcp
        return [token for token in range(self.num_tokens) if token // topology.interleave % ranks == own]
