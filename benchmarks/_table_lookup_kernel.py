"""The look-up of `_table_lookup` as one Triton kernel. Imported only where there is a GPU."""

import torch
import triton
import triton.language as tl

_TILE = 512


def look_up(positions: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, block_shift: int) -> torch.Tensor:
    """int32 `[n, topk]` physical rows of `positions` `[n, topk]` of `slots` `[n]`, -1 where there is no block."""
    num_rows, topk = positions.shape
    rows = torch.empty((num_rows, topk), dtype=torch.int32, device=positions.device)
    grid = (num_rows, triton.cdiv(topk, _TILE))
    _look_up[grid](
        positions.contiguous(),
        slots.contiguous(),
        table,
        rows,
        table.shape[1],
        topk,
        block_shift=block_shift,
        tile=_TILE,
    )
    return rows


@triton.jit
def _look_up(positions, slots, table, rows, max_pages, topk, block_shift: tl.constexpr, tile: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < topk
    slot = tl.load(slots + token)
    position = tl.load(positions + token * topk + column, mask=inside, other=-1)
    page = position >> block_shift
    seen = inside & (position >= 0) & (slot >= 0) & (page < max_pages)
    block = tl.load(table + slot * max_pages + page, mask=seen, other=0)
    row = (block << block_shift) + (position & ((1 << block_shift) - 1))
    tl.store(rows + token * topk + column, tl.where(block > 0, row, -1), mask=inside)
