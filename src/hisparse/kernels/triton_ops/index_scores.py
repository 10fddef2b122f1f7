"""The indexer's scores over paged keys: each query row against the keys of its own request, up to its own position.

The keys are read where they lie, through the block table, so that nothing is gathered and no shape depends on how
long a request is.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hisparse.errors import InputError
from hisparse.kernels.contract import PagedRows

_KEYS = 64
"""Keys of one program."""


@dataclass(frozen=True, slots=True)
class IndexRows:
    """Which request each query row belongs to, and how much of it the row may see.

    `slots`, `positions`: int64 `[t]`; a slot of -1 is padding and sees nothing; a row sees the positions up to its
    own. `table`: int32 `[num_slots, max_pages]`, blocks of the key store by page. `width`: positions that are scored;
    at least one more than the highest position.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    width: int


def paged_index_scores(
    queries: torch.Tensor, weights: torch.Tensor, keys: PagedRows, rows: IndexRows, scale: float
) -> torch.Tensor:
    """`sum_h weights[t,h] * relu(scale * queries[t,h] · key[s])` as float32 `[t, width]`, -inf where nothing is seen.

    `queries`: `[t, heads, dim]` in the dtype of the keys; `weights`: float32 `[t, heads]`; `keys`: one leader's rows.
    Only launches. Raises `InputError` for shapes that do not fit.
    """
    num_queries, num_heads, dim = queries.shape
    layout, size = keys.layout, queries.element_size()
    if layout.row_bytes != dim * size or layout.block_size & (layout.block_size - 1):
        raise InputError(f"queries of {dim} elements of {queries.dtype} do not fit keys at {layout}")
    scores = torch.empty((num_queries, rows.width), dtype=torch.float32, device=queries.device)
    if num_queries == 0 or rows.width == 0:
        return scores
    storage = keys.storage
    is_wide = queries.dtype is torch.float32
    # Query rows first: a grid's second extent ends at 65535, and a context has fewer tiles than that.
    grid = (num_queries, triton.cdiv(rows.width, _KEYS))
    _score_keys[grid](
        queries.contiguous(),
        weights.contiguous(),
        storage[: storage.numel() // size * size].view(queries.dtype),
        rows.slots,
        rows.positions,
        rows.table,
        scores,
        rows.table.shape[1],
        rows.width,
        layout.offset // size,
        layout.block_stride // size,
        layout.row_stride // size,
        scale,
        num_heads=num_heads,
        block_shift=layout.block_size.bit_length() - 1,
        dim=dim,
        dim_pad=max(16, triton.next_power_of_2(dim)),
        heads=min(64, max(16, triton.next_power_of_2(num_heads))),
        tile=_KEYS,
        precision="ieee" if is_wide else "tf32",
        num_warps=4,
    )
    return scores


@triton.jit
def _score_keys(
    queries,
    weights,
    storage,
    slots,
    positions,
    table,
    scores,
    max_pages,
    width,
    offset,
    block_stride,
    row_stride,
    scale,
    num_heads: tl.constexpr,
    block_shift: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
    heads: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * tile + tl.arange(0, tile)
    slot = tl.load(slots + token)
    own = tl.load(positions + token)
    seen = (position <= own) & (slot >= 0)
    inside = position < width
    total = tl.zeros((tile,), tl.float32)
    if (tl.program_id(1) * tile <= own) & (slot >= 0):
        page = position >> block_shift
        block = tl.load(table + slot * max_pages + page, mask=seen & (page < max_pages), other=0).to(tl.int64)
        # A page without a block is the scheduler's fault, and counted elsewhere; here it only must not be read.
        seen = seen & (block > 0)
        first = offset + block * block_stride + (position & ((1 << block_shift) - 1)) * row_stride
        element = tl.arange(0, dim_pad)
        is_element = (element < dim)[None, :]
        key = tl.load(storage + first[:, None] + element[None, :], mask=seen[:, None] & is_element, other=0.0)
        for start in range(0, num_heads, heads):
            head = start + tl.arange(0, heads)
            has_head = head < num_heads
            query_row = queries + (token * num_heads + head[:, None]) * dim
            query = tl.load(query_row + element[None, :], mask=has_head[:, None] & is_element, other=0.0)
            product = tl.dot(key, tl.trans(query), input_precision=precision) * scale
            weight = tl.load(weights + token * num_heads + head, mask=has_head, other=0.0)
            total += tl.sum(tl.maximum(product, 0.0) * weight[None, :], 1)
    tl.store(scores + token * width + position, tl.where(seen, total, float("-inf")), mask=inside)
