"""New rows packed as `fp8_ds_mla` and stored where they belong, in one launch: `kernels.fp8_rows` on a GPU.

Rounding is done on the bits, so that every GPU writes the same bytes, those without fp8 conversions too.
"""

import torch
import triton
import triton.language as tl

from hisparse.errors import InputError
from hisparse.kernels import fp8_rows
from hisparse.kernels.contract import PagedRows


def write_packed_rows(cache: PagedRows, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Pack `values`, `[n, 576]` of any float dtype, into `rows`, int64 or int32 `[n]`: physical rows of `cache`.

    Rows of the null block or below are padding, for which nothing is written; no row may stand twice. The bytes are
    those of `fp8_rows.pack_rows` for finite values. Only launches. Raises `InputError` for tensors that do not fit
    each other or rows that are not packed.
    """
    _check(cache, rows, values)
    if rows.numel() == 0:
        return
    layout = cache.layout
    _pack_row[(rows.numel(),)](
        values.contiguous(),
        rows.contiguous(),
        cache.storage,
        layout.offset,
        layout.block_stride,
        layout.row_stride,
        block_shift=layout.block_size.bit_length() - 1,
        lora=fp8_rows.LATENTS,
        group=fp8_rows.GROUP,
        rope=fp8_rows.ROPE,
        fp8_max=fp8_rows.FP8_MAX,
        least=fp8_rows.LEAST,
        num_warps=4,
    )


def _check(cache: PagedRows, rows: torch.Tensor, values: torch.Tensor) -> None:
    layout = cache.layout
    if values.shape != (*rows.shape, fp8_rows.WIDTH) or rows.dim() != 1 or not values.is_floating_point():
        raise InputError(
            f"{values.dtype} values {tuple(values.shape)} are not {fp8_rows.WIDTH} numbers for each of "
            f"{tuple(rows.shape)} rows"
        )
    if layout.row_bytes != fp8_rows.ROW_BYTES or layout.block_size & (layout.block_size - 1):
        raise InputError(f"rows of {layout} are not packed rows of {fp8_rows.ROW_BYTES} bytes")
    # Scales are stored as words of four bytes.
    if any(size % 4 for size in (layout.offset, layout.block_stride, layout.row_stride, cache.storage.data_ptr())):
        raise InputError(f"rows at {layout} do not start on multiples of 4 bytes")
    if rows.dtype not in (torch.int32, torch.int64) or not rows.device == values.device == cache.storage.device:
        raise InputError(f"rows must be integers on the device of values and cache, not {rows.dtype} on {rows.device}")


@triton.jit
def _pack_row(
    values,
    rows,
    storage,
    offset,
    block_stride,
    row_stride,
    block_shift: tl.constexpr,
    lora: tl.constexpr,
    group: tl.constexpr,
    rope: tl.constexpr,
    fp8_max: tl.constexpr,
    least: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64)
    block = row >> block_shift
    if block > 0:
        first = storage + offset + block * block_stride + (row & ((1 << block_shift) - 1)) * row_stride
        source = values + token * (lora + rope)
        groups = tl.arange(0, lora // group)
        latent = groups[:, None] * group + tl.arange(0, group)[None, :]
        latents = tl.load(source + latent).to(tl.float32)
        largest = tl.max(tl.abs(latents), 1)
        # `/` is approximate on a GPU.
        scales = tl.where(largest >= least, tl.div_rn(largest, fp8_max), 1.0)
        tl.store(first + latent, _e4m3(tl.div_rn(latents, scales[:, None])))
        tl.store((first + lora).to(tl.pointer_type(tl.float32)) + groups, scales)
        rotated = tl.arange(0, rope)
        ropes = tl.load(source + lora + rotated).to(tl.float32).to(tl.bfloat16)
        tl.store((first + lora + 4 * (lora // group)).to(tl.pointer_type(tl.bfloat16)) + rotated, ropes)


@triton.jit
def _e4m3(values):
    """float32 as fp8 codes, uint8: to nearest, ties to even, no further than ±448; no number stays none."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)  # 448
    # Below 2^-6, codes count steps of 2^-9. So do the lowest bits of 2^14 plus the number, which the sum rounds.
    steps = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    # From there on, drop 20 of 23 bits of mantissa, and count exponents from 7 instead of 127.
    rounded = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0x3C800000, steps, rounded)
    code = tl.where(is_nan, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
