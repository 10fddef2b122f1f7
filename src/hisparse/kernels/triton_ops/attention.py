"""Absorbed MLA over rows of a paged allocation, named one by one: the portable GPU kernel's host side.

A selection is taken in chunks of fixed size. What a chunk covers and the order in which chunks are joined depend on the
model alone, so the bits of a row's result depend neither on how many rows share the launch nor on where rows lie; how
many programs share the chunks follows the batch (`attention_kernels.py` says why that changes no bit).
"""

import functools

import torch

from hisparse.errors import InputError
from hisparse.geometry import PagedLayout, ceil_div
from hisparse.kernels import fp8_rows
from hisparse.kernels.contract import PagedRows
from hisparse.kernels.row_elements import RowElements
from hisparse.kernels.triton_ops.attention_kernels import attend_chunks, join_chunks
from hisparse.kernels.triton_ops.attention_launch import Launch, chunks_per_program, launch_for, next_power_of_two

_LOG2_E = 1.4426950408889634


def attend_rows(
    query: torch.Tensor,
    rows: torch.Tensor,
    cache: PagedRows,
    elements: RowElements,
    scaling: float,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Softmax attention of each query over its own rows of `cache`.

    `query`: `[t, H, lora + rope]`, float32 for float32 rows, else bfloat16 or float16. `rows`: int32 `[t, K]`,
    physical rows, below 0 for none. `launch`: `launch_for`'s when None. Returns the weighted latents `[t, H, lora]` in
    the query's dtype, summed in float32; zeros for a query without a row. Only launches. Raises `InputError` for
    tensors that do not fit each other.
    """
    _check(query, rows, cache, elements)
    num_queries, num_heads, _ = query.shape
    out = torch.empty((num_queries, num_heads, elements.lora), dtype=query.dtype, device=query.device)
    if num_queries == 0:
        return out
    topk = rows.shape[1]
    if topk == 0:
        return out.zero_()
    capability, num_processors = _gpu(query.device)
    if launch is None:
        launch = launch_for(elements, num_heads, topk, capability)
    num_groups, num_chunks = ceil_div(num_heads, launch.heads), ceil_div(topk, launch.chunk_rows)
    per_program = chunks_per_program(num_chunks, num_queries * num_groups, num_processors)
    joins = per_program == num_chunks
    # Halves of the latents, and the rotated elements, are at least what a tensor core takes at once.
    lora_pad, rope_pad = max(32, next_power_of_two(elements.lora)), max(16, next_power_of_two(elements.rope))
    shape = (num_queries, num_heads) if joins else (num_queries, num_heads, num_chunks)
    partial = torch.empty((*shape, elements.lora), dtype=torch.float32, device=query.device)
    tops = torch.empty(shape, dtype=torch.float32, device=query.device)
    totals = torch.empty(shape, dtype=torch.float32, device=query.device)
    layout, size = cache.layout, elements.dtype.itemsize
    attend_chunks[(num_groups, num_queries, ceil_div(num_chunks, per_program))](
        query.contiguous(),
        rows.contiguous(),
        cache.storage if elements.is_packed else _words(cache, elements.dtype),
        partial,
        tops,
        totals,
        out,
        topk,
        num_heads,
        num_chunks,
        per_program,
        layout.offset // size,
        layout.block_stride // size,
        layout.row_stride // size,
        scaling * _LOG2_E,  # the kernel takes powers of two
        block_shift=layout.block_size.bit_length() - 1,
        lora=elements.lora,
        rope=elements.rope,
        lora_pad=lora_pad,
        rope_pad=rope_pad,
        heads=launch.heads,
        tile=launch.tile,
        chunk_rows=launch.chunk_rows,
        is_packed=elements.is_packed,
        converts_fp8=capability >= (8, 9),
        is_even=num_heads % launch.heads == 0 and (lora_pad, rope_pad) == (elements.lora, elements.rope),
        joins=joins,
        precision="ieee" if elements.dtype is torch.float32 else "tf32",
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    if not joins:
        join_chunks[(num_queries, num_heads)](
            partial, tops, totals, out, num_chunks, lora=elements.lora, lora_pad=lora_pad
        )
    return out


@functools.cache
def _gpu(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors; those of the oldest GPU for Triton's interpreter on a CPU."""
    if device.type != "cuda":
        return (8, 0), 1
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count


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
    expected = fp8_rows.ROW_BYTES if elements.is_packed else width * elements.dtype.itemsize
    if layout.row_bytes != expected:
        raise InputError(f"rows of {layout.row_bytes} bytes are not {width} elements of {elements.dtype}")
    if layout.block_size & (layout.block_size - 1):
        raise InputError(f"block size {layout.block_size} must be a power of two, such as 16 or 64")
    if not elements.is_packed and query.dtype is not elements.dtype:
        raise InputError(f"queries are {query.dtype}, rows {elements.dtype}")
    if rows.dtype is not torch.int32 or not query.device == rows.device == cache.storage.device:
        raise InputError(f"rows must be int32 on the device of queries and cache, not {rows.dtype} on {rows.device}")
