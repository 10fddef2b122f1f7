"""The indexer of a leader layer over paged keys: project, store, score each request against its own, select.

The projections are the model's own submodules. What differs from the stock forward is where keys live, that requests
of different length share a pass, and the selection: exact, ties to the lowest position, in ascending order.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import torch

from hisparse.engine.batch import PrefillSegment
from hisparse.engine.row_threads import map_blocks
from hisparse.geometry import ceil_div

BLOCK_ROWS = 128
"""Query rows of a block, at most."""

BLOCK_BYTES = 16 << 20
"""Bound on the float32 scores of one block of query rows."""

TILE_BYTES = 2 << 20
"""Bound on the float32 products of a tile, a block's heads with some of the keys: it should stay in a core's cache."""

TILE_KEYS = 512
"""Keys that a tile may always have, however many heads and rows."""

KEY_GROUP = 16
"""Tiles are whole groups of keys. With whole vectors of columns, all columns are summed in the same order."""

LEAST_PRODUCTS = 400
"""Heads times keys of the smallest tile. torch sums fewer in a loop of its own, which rounds otherwise than a BLAS."""

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


Store = TypeVar("Store", bound=KeyStore)


class StockIndexer(Generic[Store]):
    """What indexers share: the stock module's weights, and keys in the worker's store."""

    def __init__(self, module: Any, leader_index: int, store: Store) -> None:
        """`module` is the stock `Indexer`; `leader_index` its place among the leaders, in layer order."""
        self._module = module
        self._leader_index = leader_index
        self._store = store
        self._rope = rope_of(module)

    def _ask(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        write_rows: torch.Tensor,
    ) -> IndexQueries:
        """What the tokens ask for; what they offer is in the store, at `write_rows`."""
        asked = project(self._module, self._rope, hidden_states, q_resid, position_embeddings)
        self._store.write(self._leader_index, write_rows, asked.keys)
        return asked


class LeaderIndexer(StockIndexer[KeyStore]):
    """One leader's indexer in plain torch: request by request."""

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
        asked = self._ask(hidden_states, q_resid, position_embeddings, write_rows)
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

    def select_block(block: slice) -> torch.Tensor:
        rows = slice(segment.first_row + block.start, segment.first_row + block.stop)
        visible = keys[: first_position + block.stop]
        scores = index_scores(asked.queries[rows], asked.weights[rows], visible, scale)
        return select_topk(_hide_future(scores), topk)

    blocks = [
        slice(start, end)
        for start, end in _even_parts(segment.num_rows, _block_rows(asked.queries.shape[1], segment.context_end))
    ]
    # Streams of a GPU belong to threads: there, all launches stay in the caller's.
    parts = map(select_block, blocks) if keys.is_cuda else map_blocks(select_block, blocks)
    return torch.cat(list(parts))


def _block_rows(num_heads: int, context: int) -> int:
    """Query rows of a block: a tile of the fewest keys is within its bound, and so are the block's scores."""
    return max(1, min(BLOCK_ROWS, TILE_BYTES // (4 * num_heads * TILE_KEYS), BLOCK_BYTES // (4 * context)))


def _hide_future(scores: torch.Tensor) -> torch.Tensor:
    """Scores `[n, context]` of the last n positions, in place: -inf wherever a row would look beyond itself."""
    num_rows = scores.shape[0]
    last = scores[:, scores.shape[1] - num_rows :]
    last.masked_fill_(torch.ones_like(last, dtype=torch.bool).triu_(1), -torch.inf)
    return scores


def index_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """`sum_h weights[t,h] * relu(scale * queries[t,h] · keys[s])`, float32 `[t, s]`, the stock indexer's score.

    `queries` float32 `[t, heads, dim]`, `weights` float32 `[t, heads]`, `keys` float32 `[s, dim]`. A score's bits
    depend neither on how many keys there are nor on where tiles end: rows of memory that are not aligned, and very few
    of them, would be summed in another order, hence the padding.
    """
    num_rows, num_heads, dim = queries.shape
    num_keys = keys.shape[0]
    num_groups = max(ceil_div(num_keys, KEY_GROUP), ceil_div(LEAST_PRODUCTS, num_heads * KEY_GROUP))
    groups_per_tile = max(TILE_KEYS, TILE_BYTES // (4 * num_heads * num_rows)) // KEY_GROUP
    tiles = [(KEY_GROUP * start, KEY_GROUP * end) for start, end in _even_parts(num_groups, groups_per_tile)]
    by_head, weights = queries.reshape(-1, dim), weights.unsqueeze(1)
    scratch = queries.new_empty(num_rows * num_heads * max(end - start for start, end in tiles))
    scores = queries.new_empty(num_rows, num_groups * KEY_GROUP)
    for start, end in tiles:
        of_tile = keys[start:end]
        if end > num_keys:
            of_tile = torch.nn.functional.pad(of_tile, (0, 0, 0, end - num_keys))
        products = scratch[: num_rows * num_heads * (end - start)].view(-1, end - start)
        torch.mm(by_head, of_tile.transpose(0, 1), out=products).mul_(scale).relu_()
        scores[:, start:end] = torch.bmm(weights, products.view(num_rows, num_heads, -1))[:, 0]
    return scores[:, :num_keys]


def _even_parts(total: int, at_most: int) -> list[tuple[int, int]]:
    """Consecutive parts of about the same size: matrix products of a few rows or columns are summed differently."""
    num_parts = ceil_div(total, at_most)
    ends = [total * part // num_parts for part in range(num_parts + 1)]
    return list(pairwise(ends))


def select_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The positions of the `k` largest scores of each row, exactly; ties go to the lowest position.

    `scores`: float32 `[n, context]`; -inf marks what is not visible and is never selected. Returns int32 `[n, k]`,
    ascending, padded with -1 at the end. On a GPU nothing is read back.
    """
    positions = topk_by_key(scores, k) if scores.is_cuda else topk_by_score(scores, k)
    ascending = positions.sort(dim=-1).values
    ascending = ascending.masked_fill(ascending == _INVISIBLE, -1)
    return torch.nn.functional.pad(ascending, (0, k - ascending.shape[1]), value=-1)


def topk_by_key(scores: torch.Tensor, k: int) -> torch.Tensor:
    """What `select_topk` selects, int32 `[n, min(k, context)]` in any order, the largest int32 for none.

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
    return positions.masked_fill((best >> 32) == _ordered_minus_infinity(), _INVISIBLE)


def topk_by_score(scores: torch.Tensor, k: int) -> torch.Tensor:
    """As `topk_by_key`, several times faster on a CPU: the scores' own top-k, settled anew only in tied rows.

    A row's selection is the only one unless its score k+1 equals its score k.
    """
    best = scores.topk(min(k + 1, scores.shape[1]), dim=-1)
    values, positions = best.values[:, :k], best.indices[:, :k].int()
    positions.masked_fill_(values == -torch.inf, _INVISIBLE)
    if best.values.shape[1] > k:
        lowest = values[:, -1]
        tied = ((best.values[:, k] == lowest) & (lowest != -torch.inf)).nonzero()[:, 0]
        if tied.numel():
            positions[tied] = _settle_ties(scores[tied], lowest[tied].unsqueeze(1), k)
    return positions


def _settle_ties(scores: torch.Tensor, lowest: torch.Tensor, k: int) -> torch.Tensor:
    """int32 `[n, k]`: all positions above the k-th largest score, `lowest` `[n, 1]`, and the first that equal it."""
    above, equal = scores > lowest, scores == lowest
    room = k - above.sum(dim=1, keepdim=True, dtype=torch.int32)
    selected = above | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room))
    return selected.nonzero()[:, 1].view(-1, k).int()


def _ordered_minus_infinity() -> int:
    """What -inf (bits 0xFF800000) becomes in `topk_by_key`'s order, as a signed 32-bit number."""
    return (0xFF800000 ^ 0x7FFFFFFF) - (1 << 32)
