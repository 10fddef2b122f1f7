"""The packed row `fp8_ds_mla` in plain torch: 512 latents as fp8 (e4m3), four float32 scales, 64 bf16 rope elements.

656 bytes, as FlashMLA's sparse kernels read them. Latent `i` is its fp8 value times scale `i // 128`.

This is what `triton_ops.fp8_write` must write, byte for byte, for rows of finite elements.
"""

import torch

from hisparse.errors import InputError

FORMAT = "fp8_ds_mla"
"""The name of the row format."""

LATENTS = 512
GROUP = 128
ROPE = 64
WIDTH = LATENTS + ROPE
ROW_BYTES = LATENTS + 4 * (LATENTS // GROUP) + 2 * ROPE

FP8_MAX = 448.0

LEAST = 2.0**-90
"""A group whose largest latent is below this is zeros. Divisions by its scale would meet numbers that are subnormal
in float32, and a GPU may or may not flush those."""


def pack_rows(rows: torch.Tensor) -> torch.Tensor:
    """`[n, 576]` of any float dtype as packed rows, uint8 `[n, 656]`. Each group of 128 latents fills fp8's range.

    Fp8 values are rounded to nearest, ties to even, after an exact division by the rounded scale.
    Raises `InputError` for rows of another width.
    """
    if rows.dim() != 2 or rows.shape[1] != WIDTH:
        raise InputError(f"fp8_ds_mla packs rows of {WIDTH} elements, not {tuple(rows.shape)}")
    latents = rows[:, :LATENTS].float().unflatten(1, (-1, GROUP))
    # A group of zeros has any scale; one keeps it finite.
    largest = latents.abs().amax(dim=2)
    scales = torch.where(largest >= LEAST, largest / FP8_MAX, 1.0)
    packed = (latents / scales.unsqueeze(2)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).flatten(1)
    rope = rows[:, LATENTS:].to(torch.bfloat16).contiguous()
    return torch.cat([part.view(torch.uint8) for part in (packed, scales, rope)], dim=1)


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """Packed rows, uint8 `[n, 656]`, as float32 `[n, 576]`. Raises `InputError` for rows of another width."""
    if packed.dim() != 2 or packed.shape[1] != ROW_BYTES or packed.dtype is not torch.uint8:
        raise InputError(f"fp8_ds_mla rows are uint8 [n, {ROW_BYTES}], not {packed.dtype} {tuple(packed.shape)}")
    end_of_scales = LATENTS + 4 * (LATENTS // GROUP)
    latents = packed[:, :LATENTS].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, GROUP))
    scales = packed[:, LATENTS:end_of_scales].contiguous().view(torch.float32)
    rope = packed[:, end_of_scales:].contiguous().view(torch.bfloat16).float()
    return torch.cat([(latents * scales.unsqueeze(2)).flatten(1), rope], dim=1)
