"""The indexer of a leader layer over paged keys: project, store, score each request against its own, select.

The projections are the model's own submodules. What differs from the stock forward is where keys live, that requests
of different length share a pass, and the selection: exact, ties to the lowest position, in ascending order.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hisparse.engine.batch import PrefillSegment

SCORE_BLOCK_BYTES = 16 << 20
"""Bound on the float32 scores of one block of query rows, per head: what a block computes should stay in cache."""

_INVISIBLE = torch.iinfo(torch.int32).max

Rope = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class KeyStore(Protocol):
    """What the indexer needs of the worker's index key store. `leader_index` counts leaders, not layers."""

    def write(self, leader_index: int, rows: torch.Tensor, keys: torch.Tensor) -> None: ...

    def read(self, leader_index: int, rows: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class KeyRows:
    """The query rows of one request in a batch, and where the keys that they score lie.

    `segment`: the query rows; a decode row is a segment of one row. `key_rows`: int64 `[context_end]`, physical rows
    of the key store by position.
    """

    segment: PrefillSegment
    key_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """What a batch's tokens ask for and offer.

    `queries`: float32 `[T, heads, dim]`; `weights`: float32 `[T, heads]`; `keys`: `[T, dim]` in the model's dtype.
    """

    queries: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor


class LeaderIndexer:
    """One leader's indexer: the stock module's weights, our keys."""

    def __init__(self, module: Any, leader_index: int, store: KeyStore) -> None:
        """`module` is the stock `Indexer`; `leader_index` its place among the leaders, in layer order."""
        self._module = module
        self._leader_index = leader_index
        self._store = store
        self._rope = rope_of(module)

    def select(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        write_rows: torch.Tensor,
        requests: Sequence[KeyRows],
    ) -> torch.Tensor:
        """Store the batch's keys and select each row's positions.

        `hidden_states` `[1, T, hidden]`, `q_resid` `[1, T, q_lora]`, cos and sin `[1, T, rope]`; `write_rows`: int64
        `[T]`, where the new keys go. `requests` cover all T rows. Returns int32 `[T, index_topk]`, ascending logical
        positions, padded with -1.
        """
        module = self._module
        asked = project(module, self._rope, hidden_states, q_resid, position_embeddings)
        self._store.write(self._leader_index, write_rows, asked.keys)
        topk = int(module.index_topk)
        selected = torch.full((asked.keys.shape[0], topk), -1, dtype=torch.int32, device=hidden_states.device)
        for request in requests:
            keys = self._store.read(self._leader_index, request.key_rows)
            selected[request.segment.rows] = select_segment(asked, keys, request.segment, module.softmax_scale, topk)
        return selected


def rope_of(module: Any) -> Rope:
    """The rotation that the stock indexer applies: half-split for DeepSeek-V3.2, interleaved for GLM."""
    modeling = sys.modules[type(module).__module__]
    name = "apply_rotary_pos_emb" if module.config.model_type == "deepseek_v32" else "apply_rotary_pos_emb_interleave"
    rope: Rope = getattr(modeling, name)
    return rope


def project(
    module: Any,
    rope: Rope,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> IndexQueries:
    """Queries, keys and head weights of `[1, T]` tokens, as the stock module computes them."""
    cos, sin = position_embeddings
    rope_dim = module.qk_rope_head_dim
    queries = module.wq_b(q_resid).unflatten(-1, (module.n_heads, module.head_dim))
    keys = module.k_norm(module.wk(hidden_states)).unsqueeze(2)
    q_rope, k_rope = rope(queries[..., :rope_dim], keys[..., :rope_dim], cos, sin, unsqueeze_dim=2)
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float() * module.n_heads**-0.5
    return IndexQueries(
        queries=torch.cat([q_rope, queries[..., rope_dim:]], dim=-1)[0].float(),
        weights=weights[0],
        keys=torch.cat([k_rope, keys[..., rope_dim:]], dim=-1)[0, :, 0],
    )


def select_segment(
    asked: IndexQueries, keys: torch.Tensor, segment: PrefillSegment, scale: float, topk: int
) -> torch.Tensor:
    """Score one request's query rows against its keys `[context_end, dim]`, block by block, and select.

    A block never looks at keys that none of its rows may see. Returns int32 `[num_rows, topk]`.
    """
    keys = keys.float()
    first_position = segment.context_end - segment.num_rows
    num_heads = asked.queries.shape[1]
    block = max(1, SCORE_BLOCK_BYTES // (4 * num_heads * segment.context_end))
    parts = []
    for start in range(0, segment.num_rows, block):
        end = min(start + block, segment.num_rows)
        rows = slice(segment.first_row + start, segment.first_row + end)
        visible = first_position + end
        scores = index_scores(asked.queries[rows], asked.weights[rows], keys[:visible], scale)
        positions = torch.arange(visible, device=keys.device)
        future = positions > positions[first_position + start :].unsqueeze(1)
        parts.append(select_topk(scores.masked_fill_(future, -torch.inf), topk))
    return torch.cat(parts)


def index_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """`sum_h weights[t,h] * relu(scale * queries[t,h] · keys[s])`, float32 `[t, s]`, the stock indexer's score."""
    scores = torch.matmul(queries, keys.transpose(0, 1)).mul_(scale).relu_()
    return torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)


def select_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The positions of the `k` largest scores of each row, exactly; ties go to the lowest position.

    `scores`: float32 `[n, context]`; -inf marks what is not visible and is never selected. Returns int32 `[n, k]`,
    ascending, padded with -1 at the end.

    Score and position become one 64-bit key that no two positions share, so that any top-k of the keys is the one we
    want: no data-dependent shape, nothing to read back.
    """
    context = scores.shape[1]
    # Adding zero turns -0.0 (a negative head weight times a rectified score) into 0.0: they compare equal as scores.
    bits = (scores.float() + 0.0).view(torch.int32)
    # Two's complement order equals float order once the magnitude bits of negative numbers are flipped.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    reversed_position = torch.arange(context - 1, -1, -1, device=scores.device)
    keys = (ordered << 32) | reversed_position
    best = keys.topk(min(k, context), dim=-1, sorted=False).values
    positions = (context - 1 - (best & 0xFFFFFFFF)).int()
    hidden = (best >> 32) == _ordered_minus_infinity()
    ascending = positions.masked_fill(hidden, _INVISIBLE).sort(dim=-1).values
    ascending = ascending.masked_fill(ascending == _INVISIBLE, -1)
    return torch.nn.functional.pad(ascending, (0, k - ascending.shape[1]), value=-1)


def _ordered_minus_infinity() -> int:
    """What -inf (bits 0xFF800000) becomes in `select_topk`'s order, as a signed 32-bit number."""
    return (0xFF800000 ^ 0x7FFFFFFF) - (1 << 32)
