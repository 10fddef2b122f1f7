"""A model whose KV goes all of the way: what its tensors look like on any rank, and what is in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hisparse.offload.files import attention_config_digest
from hisparse.offload.layout import Family, KVGeometry, TensorView
from hisparse.offload.sharding import Topology
from tests.offload.global_kv import GlobalPage

NUM_LAYERS = 2
BLOCK_GAP_BYTES = 32

CONFIG: Mapping[str, Any] = {"hidden_size": 64, "rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}


@dataclass(frozen=True)
class Model:
    """Whose KV it is: two layers, the second of which is an indexer's with rows of its own where the first has latents.

    `tokens` of a canonical page; `config_digest` of the checkpoint's configuration.
    """

    family: Family
    num_kv_heads: int = 1
    tokens: int = 8
    head_bytes: int = 24
    revision: str = "7f3a"
    dtype: str = "bfloat16"
    config_digest: str = attention_config_digest(CONFIG)

    def geometry(self, layer: int, topology: Topology) -> KVGeometry:
        is_indexer = self.family is Family.LATENT and layer == 1
        tokens = self.tokens // topology.context_ranks
        return KVGeometry(self.family, self.num_kv_heads, 8 if is_indexer else self.head_bytes, tokens)

    def view(self, layer: int, topology: Topology, num_blocks: int) -> TensorView:
        """A layer's tensor, blocks apart. The second one is declared or lies in another order than the first."""
        geometry = self.geometry(layer, topology)
        order = "B" + self.family.axes
        if layer and order.startswith("BK"):
            order = "KB" + order[2:]
        declared = order.translate(str.maketrans("TH", "HT")) if layer and order[1] in "TH" and "H" in order else order
        heads = max(1, self.num_kv_heads // topology.tp)
        size = {"B": num_blocks, "K": 2, "T": geometry.block_tokens, "H": heads, "D": geometry.head_bytes // 2}
        stride, inner = {}, 2
        for axis in reversed(order):
            stride[axis] = inner + (BLOCK_GAP_BYTES if axis == "B" else 0)
            inner = stride[axis] * size[axis]
        return TensorView(tuple(size[a] for a in declared), tuple(stride[a] for a in declared), 2, declared)

    def page(self, chunk: int, block: int, layer: int) -> GlobalPage:
        """What the model computes there, whatever the topology."""
        return _page(self.geometry(layer, Topology(1)), (chunk * 16 + block) * NUM_LAYERS + layer)

    def part(self, chunk: int, block: int, layer: int, topology: Topology) -> np.ndarray:
        """What one rank has of it."""
        return _part(self.geometry(layer, Topology(1)), (chunk * 16 + block) * NUM_LAYERS + layer, topology)


@lru_cache(maxsize=1024)
def _page(geometry: KVGeometry, seed: int) -> GlobalPage:
    return GlobalPage.random(geometry, 1, seed)


@lru_cache(maxsize=8192)
def _part(geometry: KVGeometry, seed: int, topology: Topology) -> np.ndarray:
    return _page(geometry, seed).part(topology)
