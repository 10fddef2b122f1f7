"""Absorbed MLA over rows of a paged allocation, named one by one: flash-decoding with splits of fixed size.

One program takes one query row, a group of its heads and one split of its selection; a second kernel joins the
splits. What a split covers does not depend on the batch, so neither does any rounding.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hisparse.errors import InputError
from hisparse.geometry import PagedLayout
from hisparse.kernels import fp8_rows
from hisparse.kernels.contract import PagedRows

SPLIT_ROWS = 256
"""Selected rows of one program: 8 programs for a top-k of 2048 keep one lone request's latency low."""

_MIN_HEADS = 16
"""The least number of heads that a tensor core takes at once."""


@dataclass(frozen=True, slots=True)
class RowElements:
    """How the rows of `attend_rows` are made up: `lora` latents, then `rope` rotated key elements, of `dtype`.

    `dtype` uint8 stands for `fp8_ds_mla`.
    """

    dtype: torch.dtype
    lora: int
    rope: int


@dataclass(frozen=True, slots=True)
class Launch:
    """How one program works: on `heads` heads, `tile` rows at a time, with so many warps and pipeline stages."""

    heads: int
    tile: int
    warps: int
    stages: int


def launch_for(elements: RowElements, num_heads: int) -> Launch:
    """Chosen by the model alone, never by the batch, or a row's rounding would depend on its company.

    More heads a program read each row less often; fewer leave more programs to a small batch. Packed rows are also
    taken apart once a program, so there more heads pay earlier.
    """
    heads = max(_MIN_HEADS, triton.next_power_of_2(num_heads))
    if elements.dtype is torch.float32:
        return Launch(_MIN_HEADS, 16, 4, 1)
    if elements.dtype is torch.uint8 and heads >= 64:
        return Launch(64, 64, 8, 1)
    return Launch(min(32, heads), 32, 4, 2)


def attend_rows(
    query: torch.Tensor, rows: torch.Tensor, cache: PagedRows, elements: RowElements, scaling: float
) -> torch.Tensor:
    """Softmax attention of each query over its own rows of `cache`.

    `query`: `[t, H, lora + rope]`, float32 for float32 rows, else bfloat16 or float16. `rows`: int32 `[t, K]`,
    physical rows, below 0 for none. Returns the weighted latents, float32 `[t, H, lora]`; zeros for a query without
    a row. Only launches. Raises `InputError` for tensors that do not fit each other.
    """
    _check(query, rows, cache, elements)
    num_queries, num_heads, _ = query.shape
    num_splits = max(1, triton.cdiv(rows.shape[1], SPLIT_ROWS))
    partial = torch.empty((num_queries, num_heads, num_splits, elements.lora), dtype=torch.float32, device=query.device)
    log_sums = torch.empty((num_queries, num_heads, num_splits), dtype=torch.float32, device=query.device)
    out = torch.empty((num_queries, num_heads, elements.lora), dtype=torch.float32, device=query.device)
    if num_queries == 0:
        return out
    layout = cache.layout
    is_packed = elements.dtype is torch.uint8
    storage = cache.storage if is_packed else _words(cache, elements.dtype)
    size = elements.dtype.itemsize
    is_wide = elements.dtype is torch.float32
    launch = launch_for(elements, num_heads)
    grid = (num_queries, triton.cdiv(num_heads, launch.heads), num_splits)
    _attend_split[grid](
        query.contiguous(),
        rows.contiguous(),
        storage,
        partial,
        log_sums,
        rows.shape[1],
        num_heads,
        layout.offset // size,
        layout.block_stride // size,
        layout.row_stride // size,
        scaling * 1.4426950408889634,  # log2(e): the kernel takes powers of two
        block_shift=layout.block_size.bit_length() - 1,
        lora=elements.lora,
        rope=elements.rope,
        lora_pad=triton.next_power_of_2(elements.lora),
        rope_pad=max(16, triton.next_power_of_2(elements.rope)),
        heads=launch.heads,
        tile=launch.tile,
        split_rows=SPLIT_ROWS,
        is_packed=is_packed,
        precision="ieee" if is_wide else "tf32",
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    _join_splits[(num_queries, num_heads)](
        partial,
        log_sums,
        out,
        num_splits=num_splits,
        lora=elements.lora,
        lora_pad=triton.next_power_of_2(elements.lora),
    )
    return out


def _words(cache: PagedRows, dtype: torch.dtype) -> torch.Tensor:
    storage = cache.storage
    return storage[: storage.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _check(query: torch.Tensor, rows: torch.Tensor, cache: PagedRows, elements: RowElements) -> None:
    layout: PagedLayout = cache.layout
    width = elements.lora + elements.rope
    if query.dim() != 3 or query.shape[2] != width or rows.shape[:1] != query.shape[:1] or rows.dim() != 2:
        raise InputError(
            f"queries {tuple(query.shape)} and rows {tuple(rows.shape)} do not fit rows of {width} elements"
        )
    expected = fp8_rows.ROW_BYTES if elements.dtype is torch.uint8 else width * elements.dtype.itemsize
    if layout.row_bytes != expected:
        raise InputError(f"rows of {layout.row_bytes} bytes are not {width} elements of {elements.dtype}")
    if layout.block_size & (layout.block_size - 1):
        raise InputError(f"block size {layout.block_size} must be a power of two, such as 16 or 64")
    if elements.dtype is not torch.uint8 and query.dtype is not elements.dtype:
        raise InputError(f"queries are {query.dtype}, rows {elements.dtype}")
    if rows.dtype is not torch.int32 or not query.device == rows.device == cache.storage.device:
        raise InputError(f"rows must be int32 on the device of queries and cache, not {rows.dtype} on {rows.device}")


@triton.jit
def _attend_split(
    query,
    rows,
    storage,
    partial,
    log_sums,
    num_rows,
    num_heads,
    offset,
    block_stride,
    row_stride,
    scale,
    block_shift: tl.constexpr,
    lora: tl.constexpr,
    rope: tl.constexpr,
    lora_pad: tl.constexpr,
    rope_pad: tl.constexpr,
    heads: tl.constexpr,
    tile: tl.constexpr,
    split_rows: tl.constexpr,
    is_packed: tl.constexpr,
    precision: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    split = tl.program_id(2)
    has_head = (head < num_heads)[:, None]
    latent = tl.arange(0, lora_pad)
    rotated = tl.arange(0, rope_pad)
    is_latent = (latent < lora)[None, :]
    is_rotated = (rotated < rope)[None, :]
    query_row = query + (token * num_heads + head[:, None]) * (lora + rope)
    q_latent = tl.load(query_row + latent[None, :], mask=has_head & is_latent, other=0.0)
    q_rope = tl.load(query_row + lora + rotated[None, :], mask=has_head & is_rotated, other=0.0)

    largest = tl.full((heads,), float("-inf"), tl.float32)
    total = tl.zeros((heads,), tl.float32)
    weighted = tl.zeros((heads, lora_pad), tl.float32)
    for start in range(0, split_rows, tile):
        column = split * split_rows + start + tl.arange(0, tile)
        row = tl.load(rows + token * num_rows + column, mask=column < num_rows, other=-1).to(tl.int64)
        valid = row >= 0
        has_row = valid[:, None]
        # Rows of no one are read where row 0 lies, but masked: nothing is fetched.
        block = tl.where(valid, row, 0) >> block_shift
        in_block = tl.where(valid, row, 0) & ((1 << block_shift) - 1)
        first = offset + block * block_stride + in_block * row_stride
        if is_packed:
            group = tl.arange(0, lora_pad // 128)
            in_group = group[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
            codes = tl.load(storage + first[:, None, None] + in_group, mask=valid[:, None, None], other=0).to(tl.int32)
            # e4m3 and float16 differ in the exponent's bias by 8: the same bits, times 2^8. Any GPU can do that.
            bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
            values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            scales = (storage + first).to(tl.pointer_type(tl.float32))[:, None] + lora // 4 + group[None, :]
            values = values * (tl.load(scales, mask=has_row, other=0.0) * 256.0)[:, :, None]
            k_latent = tl.reshape(values.to(q_latent.dtype), (tile, lora_pad))
            ropes = (storage + first + lora + lora // 32).to(tl.pointer_type(tl.bfloat16))
            k_rope = tl.load(ropes[:, None] + rotated[None, :], mask=has_row & is_rotated, other=0.0).to(q_rope.dtype)
        else:
            k_latent = tl.load(storage + first[:, None] + latent[None, :], mask=has_row & is_latent, other=0.0)
            k_rope = tl.load(storage + first[:, None] + lora + rotated[None, :], mask=has_row & is_rotated, other=0.0)
        scores = tl.dot(q_latent, tl.trans(k_latent), input_precision=precision)
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=precision) * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # Without any row so far, everything is -inf, and the difference of two of them no number.
        safe = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(largest - safe)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(k_latent.dtype), k_latent, weighted, input_precision=precision)
        largest = new_largest

    num_splits = tl.num_programs(2)
    place = (token * num_heads + head) * num_splits + split
    empty = total == 0.0
    mean = weighted / tl.where(empty, 1.0, total)[:, None]
    tl.store(partial + place[:, None] * lora + latent[None, :], mean, mask=has_head & is_latent)
    log_sum = tl.where(empty, float("-inf"), largest + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(log_sums + place, log_sum, mask=head < num_heads)


@triton.jit
def _join_splits(partial, log_sums, out, num_splits: tl.constexpr, lora: tl.constexpr, lora_pad: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    latent = tl.arange(0, lora_pad)
    is_latent = latent < lora
    largest = tl.full((), float("-inf"), tl.float32)
    for split in range(num_splits):
        largest = tl.maximum(largest, tl.load(log_sums + place * num_splits + split))
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros((), tl.float32)
    joined = tl.zeros((lora_pad,), tl.float32)
    for split in range(num_splits):
        at = place * num_splits + split
        weight = tl.exp2(tl.load(log_sums + at) - safe)
        joined += weight * tl.load(partial + at * lora + latent, mask=is_latent, other=0.0)
        total += weight
    joined = joined / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * lora + latent, joined, mask=is_latent)
