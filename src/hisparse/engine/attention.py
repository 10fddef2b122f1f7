"""Absorbed MLA over the rows that the indexer selected, wherever they lie.

Queries are taken into latent space once, so that attention reads latent rows as they are stored and K and V are
never expanded. Inside, everything is float32: a row's result does not depend on how many rows share a pass, nor on
where its KV came from, bit for bit. (Batched matrix products treat each row of a pass as a matrix of its own.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hisparse.engine.batch import StepBatch

PASS_BYTES = 32 << 20
"""Bound on the gathered rows of one pass, in float32 bytes."""


class LayerCache(Protocol):
    """What attention needs of a layer's cache. `worker.handle.HiSparseCacheHandle` is the implementation."""

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None: ...

    def load_followed(self) -> None: ...

    def stage(self, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor: ...

    def gather(self, rows: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """The up-projection of one layer, split by what it makes.

    `w_uk`: `[heads, nope, lora]`, `w_uv`: `[heads, v, lora]`; `scaling` multiplies the attention scores.
    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor
    scaling: float

    @property
    def lora(self) -> int:
        """Elements of a latent, without the rotated key."""
        return int(self.w_uk.shape[2])

    @property
    def nope(self) -> int:
        """Elements of a head's query that carry no position."""
        return int(self.w_uk.shape[1])


def split_weights(module: Any) -> MlaWeights:
    """Split `kv_b_proj` of a stock attention module. A sharded weight gives this rank's heads."""
    weight = module.kv_b_proj.weight.detach()
    if hasattr(weight, "to_local"):
        weight = weight.to_local()
    by_head = weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
    return MlaWeights(
        w_uk=by_head[:, : module.qk_nope_head_dim],
        w_uv=by_head[:, module.qk_nope_head_dim :],
        scaling=float(module.scaling),
    )


def absorb_query(
    q_nope: torch.Tensor, q_rope: torch.Tensor, weights: MlaWeights, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Queries `[T, H, nope]` and `[T, H, rope]` in the space of stored rows: `[T, H, lora + rope]` of `dtype`."""
    latent = torch.bmm(q_nope.to(dtype).transpose(0, 1), weights.w_uk.to(dtype)).transpose(0, 1)
    return torch.cat([latent, q_rope.to(dtype)], dim=-1)


def attend(query: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, weights: MlaWeights) -> torch.Tensor:
    """Softmax attention of each query over its own rows.

    `query`: float32 `[t, H, R]`; `rows`: `[t, K, R]`; `valid`: bool `[t, K]`. Returns the weighted latents, float32
    `[t, H, lora]`; zeros for a query without a valid row.
    """
    rows = rows.float()
    scores = torch.bmm(query, rows.transpose(1, 2)).mul_(weights.scaling)
    masked = ~valid.unsqueeze(1)
    probabilities = scores.masked_fill_(masked, -torch.inf).softmax(dim=-1).masked_fill_(masked, 0.0)
    return torch.bmm(probabilities, rows[..., : weights.lora])


def expand_values(latents: torch.Tensor, weights: MlaWeights, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weighted latents `[T, H, lora]` as attention outputs, `[T, H, v]` of `dtype`."""
    return torch.bmm(latents.to(dtype).transpose(0, 1), weights.w_uv.to(dtype).transpose(1, 2)).transpose(0, 1)


def absorbed_mla(
    q_nope: torch.Tensor, q_rope: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, weights: MlaWeights
) -> torch.Tensor:
    """Attention of T queries over rows that were gathered already, float32 `[T, H, v]`.

    `q_nope` `[T, H, nope]`, `q_rope` `[T, H, rope]`, `rows` `[T, K, lora + rope]`, `valid` bool `[T, K]`.
    """
    return expand_values(attend(absorb_query(q_nope, q_rope, weights), rows, valid, weights), weights)


class RowAttention(Protocol):
    """How query rows attend to physical rows of one layer, once those can be read on the device."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the queries that it takes, and in which its results are expanded."""
        ...

    def pass_size(self, query: torch.Tensor, selected: torch.Tensor) -> int:
        """Query rows of a prefill that are staged at once, at most."""
        ...

    def decode(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """As a call, for decode rows: bits may depend on how many rows there are, but neither on the others nor on
        where rows lie."""
        ...

    def __call__(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`query` `[t, H, lora + rope]` over `rows`, int32 `[t, K]`, -1 for none.

        Returns `[t, H, lora]`, float32 or of `dtype`. Bits do not depend on how many rows there are: a prefill's passes
        are as long as its rows on host let them be.
        """
        ...


class GatheredRows:
    """`RowAttention` in plain torch: copies of the rows first, in passes of bounded size."""

    dtype = torch.float32

    def __init__(self, cache: LayerCache, weights: MlaWeights) -> None:
        self._cache = cache
        self._weights = weights

    def pass_size(self, query: torch.Tensor, selected: torch.Tensor) -> int:
        """Query rows whose gathered KV is about `PASS_BYTES`."""
        return int(max(1, PASS_BYTES // (4 * selected.shape[1] * query.shape[2])))

    def __call__(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        size = self.pass_size(query, rows)
        passes = zip(query.split(size), rows.split(size), strict=True)
        return torch.cat([attend(q, self._cache.gather(r), r >= 0, self._weights) for q, r in passes])

    decode = __call__


class LayerAttention:
    """Attention of one layer: reads what decode rows resolved, stages what prefill rows selected."""

    def __init__(
        self, cache: LayerCache, weights: MlaWeights, *, follows: bool, attend_rows: RowAttention | None = None
    ) -> None:
        """`follows`: the layer reuses an earlier layer's selection. `attend_rows`: `GatheredRows` when None."""
        self._cache = cache
        self._weights = weights
        self._follows = follows
        self._attend_rows = attend_rows if attend_rows is not None else GatheredRows(cache, weights)

    def __call__(self, query: torch.Tensor, indices: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """One step's attention.

        `query`: `[1, H, T, nope + rope]`, rotated. `indices`: int32 `[1, T, topk]`, physical rows for the first
        `num_decode` rows, logical positions for the others, -1 for none. Returns `[1, T, H, v]` in the query's dtype.
        """
        if self._follows and batch.num_decode:
            self._cache.load_followed()
        by_row, selected = query[0].transpose(0, 1), indices[0]
        dtype, nope = self._attend_rows.dtype, self._weights.nope
        absorbed = absorb_query(by_row[..., :nope], by_row[..., nope:], self._weights, dtype)
        decode = batch.num_decode
        latents = torch.cat(
            [
                self._attend_rows.decode(absorbed[:decode], selected[:decode]),
                *self._attend_prefill(absorbed[decode:], selected[decode:], batch.slots[decode:]),
            ]
        )
        return expand_values(latents, self._weights, dtype).to(query.dtype).unsqueeze(0)

    def _attend_prefill(
        self, query: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Pass by pass: each takes as many rows as the staging blocks serve together.

        To plan a pass costs as much as it is given rows, so it is given twice what the last one served.
        """
        size = most = self._attend_rows.pass_size(query, positions)
        start = 0
        while start < query.shape[0]:
            window = slice(start, start + size)
            rows = self._cache.stage(positions[window], slots[window])
            yield self._attend_rows(query[start : start + rows.shape[0]], rows)
            start += rows.shape[0]
            size = min(most, 2 * rows.shape[0])
