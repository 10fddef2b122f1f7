"""Decode attention by a kept library, where one serves the GPU, the rows and the model; Triton serves the rest.

FlashMLA, in the distribution that keeps its kernels for Hopper GPUs and for V3.2's rows, reads rows where they lie:
`fp8_ds_mla` rows by block and row, bfloat16 rows as one long array of which a layer's rows are a part.

The bits of a row's result depend neither on the other rows of the launch nor on where rows lie. With `fp8_ds_mla` they
may depend on how many rows there are, because the library splits the work by that; it also rounds scales to bfloat16.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hisparse.errors import InputError
from hisparse.geometry import PagedLayout
from hisparse.kernels.contract import PagedRows
from hisparse.kernels.row_elements import RowElements

INT32_END = 1 << 31

FLASHMLA_DISTRIBUTION = "sgl-flash-mla"

INSTALL_FLASHMLA = f"pip install --no-deps {FLASHMLA_DISTRIBUTION}"
"""Without its dependencies: it asks for a torch newer than the 2.10 that its stable interface needs."""


AttentionChoice = Literal["auto", "triton", "flashmla"]
"""What computes decode attention on a GPU. "auto" takes a library where it serves and is faster."""


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """What attention has to serve: rows of `elements` at `layout`, `num_heads` queries a token, `topk` rows each, on a
    GPU of a compute `capability`, as torch gives it. `max_rows`: decode rows of a step, at most."""

    elements: RowElements
    layout: PagedLayout
    num_heads: int
    topk: int
    capability: tuple[int, int]
    max_rows: int


FORMATS = {"bfloat16": torch.bfloat16, "fp8_ds_mla": torch.uint8}
"""The row formats that FlashMLA reads."""

AUTO_FLASHMLA = {torch.uint8: 1, torch.bfloat16: 16}
"""Rows for which "auto" takes FlashMLA, and from how many decode rows an engine may have at once: where
benchmarks/attention.py found it the faster one. What the engine may have, not what a step has, so that the bits of a
row do not change with the rows beside it."""


def choose_attention(wanted: AttentionChoice, need: AttentionNeed) -> AttentionChoice:
    """ "triton" or "flashmla". Raises `InputError` when a library that is asked for by name cannot serve."""
    few = need.max_rows < AUTO_FLASHMLA.get(need.elements.dtype, need.max_rows + 1)
    if wanted == "triton" or (wanted == "auto" and few):
        return "triton"
    obstacle = flashmla_misfit(need) or flashmla_missing()
    if obstacle is None:
        return "flashmla"
    if wanted == "flashmla":
        raise InputError(f"FlashMLA cannot serve this model here: {obstacle}. Use attention auto or triton")
    return "triton"


def flashmla_misfit(need: AttentionNeed) -> str | None:
    """Why FlashMLA's kernels do not fit, or None if they do."""
    elements, layout = need.elements, need.layout
    if need.capability[0] != 9:
        return f"the GPU has compute capability {need.capability[0]}.{need.capability[1]}, and 9.0 is what was tried"
    if (elements.lora, elements.rope) != (512, 64):
        return f"rows are {elements.lora}+{elements.rope} wide, not 512+64"
    if need.num_heads not in (64, 128):
        return f"{need.num_heads} heads are neither 64 nor 128"
    if elements.dtype is torch.uint8:
        step = 64
    elif elements.dtype is torch.bfloat16:
        step = 128
    else:
        return f"rows are {elements.dtype}, neither bfloat16 nor fp8_ds_mla"
    if need.topk % step:
        return f"a top-k of {need.topk} is no multiple of {step}"
    if layout.row_stride != layout.row_bytes or layout.block_stride % layout.row_bytes:
        return f"rows of {layout.row_bytes} bytes lie {layout.row_stride} apart in blocks of {layout.block_stride}"
    if layout.num_blocks * (layout.block_stride // layout.row_bytes) >= INT32_END or layout.block_stride >= INT32_END:
        return f"{layout.num_blocks} blocks of {layout.block_stride} bytes have rows beyond 32-bit numbers"
    return None


@functools.cache
def flashmla_missing() -> str | None:
    """Why the library cannot be used in this process, or None if it can. Imports it where it is installed."""
    if importlib.util.find_spec("flash_mla") is None:
        return f"the package flash_mla was not found: install it with: {INSTALL_FLASHMLA}"
    try:
        library = importlib.import_module("flash_mla")
    # Whatever a foreign extension raises when it does not fit this torch or driver.
    except Exception as error:
        return f"flash_mla does not load: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    if not getattr(library, "has_legacy", lambda: False)():
        return f"this flash_mla has no kernels for compute capability 9.0: install {FLASHMLA_DISTRIBUTION}"
    return None


def describe(capability: tuple[int, int]) -> tuple[str, str | None]:
    """What computes decode attention on a GPU of this compute capability, and what to install for a faster one."""
    formats = [name for name, dtype in FORMATS.items() if dtype in AUTO_FLASHMLA]
    if capability[0] != 9 or not formats:
        return "Triton", None
    served = f"for {' and '.join(formats)} rows of 512+64 elements, 64 or 128 heads"
    missing = flashmla_missing()
    if missing is None:
        return f"FlashMLA {importlib.metadata.version(FLASHMLA_DISTRIBUTION)} {served}; Triton for others", None
    return f"Triton; FlashMLA would be faster {served}, but {missing}", INSTALL_FLASHMLA


class FlashMla:
    """FlashMLA over the rows of one cache. Make it only where `choose_attention` says so."""

    def __init__(self, cache: PagedRows, elements: RowElements, scaling: float) -> None:
        self._library: Any = importlib.import_module("flash_mla")
        self._cache = cache
        self._elements = elements
        self._scaling = scaling
        self._schedules: dict[tuple[int, int, int], Any] = {}

    def __call__(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`query`: bfloat16 `[t, H, 576]`; `rows`: int32 `[t, K]`, -1 for none. Returns the weighted latents, bfloat16
        `[t, H, 512]`; zeros for a query without a row. Only launches.
        """
        if query.shape[0] == 0:
            return query.new_empty((0, query.shape[1], self._elements.lora))
        attend = self._attend_packed if self._elements.is_packed else self._attend_plain
        return attend(query.contiguous(), rows.contiguous())

    def _attend_packed(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        layout = self._cache.layout
        blocks = self._cache.storage.as_strided(
            (layout.num_blocks, layout.block_size, 1, layout.row_bytes),
            (layout.block_stride, layout.row_stride, layout.row_bytes, 1),
            layout.offset,
        )
        out, _ = self._library.flash_mla_with_kvcache(
            query.unsqueeze(1),
            blocks,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=self._elements.lora,
            tile_scheduler_metadata=self._schedule(query.shape[0], query.shape[1], rows.shape[1]),
            softmax_scale=self._scaling,
            is_fp8_kvcache=True,
            indices=rows.unsqueeze(1),
            use_legacy=True,
        )
        result: torch.Tensor = out.squeeze(1)
        return result

    def _attend_plain(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        layout = self._cache.layout
        # A block is a whole number of rows, of all layers: this layer's rows lie at numbers of their own among them.
        per_block = layout.block_stride // layout.row_bytes
        width = layout.row_bytes // 2
        words = self._cache.storage[: self._cache.storage.numel() // 2 * 2].view(torch.bfloat16)
        num_rows = (layout.num_blocks - 1) * per_block + layout.block_size
        array = words.as_strided((num_rows, 1, width), (width, width, 1), layout.offset // 2)
        # Where there is no row, the number stays below 0.
        numbers = torch.add(rows, rows >> (layout.block_size.bit_length() - 1), alpha=per_block - layout.block_size)
        out, *_ = self._library.flash_mla_sparse_fwd(
            query, array, numbers.unsqueeze(1), self._scaling, use_legacy=True, return_log2_lse=False
        )
        result: torch.Tensor = out
        return result

    def _schedule(self, num_queries: int, num_heads: int, topk: int) -> Any:
        """How the library splits the work, which it makes itself when it first sees a shape. Kept, except while a graph
        is captured: its memory then belongs to that graph."""
        key = (num_queries, num_heads, topk)
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule, _ = self._library.get_mla_metadata()
            if not torch.cuda.is_current_stream_capturing():
                self._schedules[key] = schedule
        return schedule
