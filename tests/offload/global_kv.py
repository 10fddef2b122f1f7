"""KV as a model means it, and where every topology keeps it. An oracle: it shares nothing with the product's sharding.

The whole page is one array [kv, token, head, byte]. A rank's part is sliced out of it, tokens as they are dealt to
ranks in turns; where the part lies in memory is left to numpy's own strides.
"""

from dataclasses import dataclass

import numpy as np

from hisparse.offload.layout import Family, KVGeometry, TensorView
from hisparse.offload.sharding import Topology

FILL = 0xAA
"""What memory holds where there is no KV."""

ORDER = {
    Family.PACKED_NHD: (1, 2, 0, 3),
    Family.PACKED_HND: (2, 1, 0, 3),
    Family.SPLIT_NHD: (0, 1, 2, 3),
    Family.SPLIT_HND: (0, 2, 1, 3),
    Family.LATENT: (1, 0, 2, 3),
}


@dataclass(frozen=True)
class GlobalPage:
    """One canonical page, of all ranks: uint8 [kv, token, head, byte]."""

    data: np.ndarray

    @classmethod
    def random(cls, geometry: KVGeometry, context_ranks: int, seed: int) -> "GlobalPage":
        kinds = 1 if geometry.family is Family.LATENT else 2
        shape = (kinds, geometry.block_tokens * context_ranks, geometry.num_kv_heads, geometry.head_bytes)
        return cls(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))

    def canonical(self, family: Family) -> np.ndarray:
        """The canonical page's bytes."""
        return np.ascontiguousarray(self.data.transpose(ORDER[family])).reshape(-1)

    def part(self, topology: Topology) -> np.ndarray:
        """What one rank holds: [kv, its tokens, its heads, byte]."""
        pcp_rank, tp_rank = divmod(topology.rank, topology.tp)
        context_rank = pcp_rank * topology.dcp + tp_rank % topology.dcp
        hands: list[list[int]] = [[] for _ in range(topology.dcp * topology.pcp)]
        for token in range(self.data.shape[1]):
            turn = token // topology.interleave if len(hands) > 1 else 0
            hands[turn % len(hands)].append(token)
        num_heads = self.data.shape[2]
        holders = np.repeat(np.arange(num_heads), max(1, topology.tp // num_heads))  # a head for each share of a rank
        heads = np.split(holders, topology.tp)[tp_rank]
        return self.data[:, hands[context_rank]][:, :, heads]


def memory(view: TensorView) -> np.ndarray:
    """Memory for a tensor, with nothing in it and some bytes behind it."""
    extent = sum(stride * (size - 1) for stride, size in zip(view.strides_bytes, view.shape, strict=True))
    return np.full(extent + view.element_bytes + 16, FILL, dtype=np.uint8)


def put(buffer: np.ndarray, view: TensorView, block: int, part: np.ndarray) -> None:
    """Write a rank's part [kv, token, head, byte] into block `block` of a tensor in `buffer`, as numpy would."""
    is_packed_in_rows = "K" not in view.declared
    if is_packed_in_rows:  # key and value of a head in one row
        part = np.concatenate(list(part), axis=-1)[None]
    axes = {"K": 0, "T": 1, "H": 2, "D": 3}
    shape = (*view.shape[:-1], view.shape[-1] * view.element_bytes)
    strides = (*view.strides_bytes[:-1], 1)
    tensor = np.lib.stride_tricks.as_strided(buffer, shape, strides)
    where = tuple(block if axis == "B" else slice(None) for axis in view.declared)
    absent = tuple(axes[axis] for axis in axes if axis not in view.declared)
    present = [axis for axis in axes if axis in view.declared]
    order = [present.index(axis) for axis in view.declared if axis != "B"]
    tensor[where] = part.squeeze(absent).transpose(order)
