"""The engine's options and how they become sizes of caches."""

from dataclasses import dataclass
from numbers import Integral
from typing import get_args

from hisparse.config import (
    GIB,
    CacheConfig,
    CachePlan,
    KVDtype,
    ModelGeometry,
    WriteBack,
    plan_cache,
    require_write_back,
)
from hisparse.engine.parallel import TensorParallel
from hisparse.errors import InputError, InvariantError
from hisparse.geometry import ceil_div, device_blocks
from hisparse.kernels.attention_libraries import AttentionChoice
from hisparse.offload.config import OffloadConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine's options. Sizes in bytes, tokens or rows (one token's KV in one layer).

    Requests. `max_tokens`: tokens of the longest one, prompt and output together. `max_running`: how many run at once.
    `chunk_tokens`: prompt tokens of one step, at most. All at least 1.

    Pools. `block_size`: tokens of a page, a power of two. `slab_bytes`: the device budget of resident, hot and staging
    blocks; None makes a slab that holds everything, so that nothing is ever spilled. `host_pool_bytes`: usable capacity
    of the host pool. `hot_rows`: of one request's hot lease, None for twice top-k. `staging_rows`: of the buffer
    through which prefills read the host, None for four times top-k. `indexer_tokens`: tokens whose index keys are kept,
    None for `max_running` requests of the longest kind. `write_back`: when full pages leave for the host, a
    `WriteBack`. `CacheConfig` gives the ranges.

    Storage. `kv_dtype`: "auto" stores rows in the model's dtype, "fp8_ds_mla" packs them in 656 bytes. `offload` keeps
    KV below the pools, in memory and in files. `prefix_salt`: a secret that keys of prefixes depend on, for tenants who
    do not trust each other.

    Computing. `attention`: what computes decode rows on a GPU, "auto", "triton" or "flashmla"; a CPU has its own.
    `parallel` has several ranks compute the model, in processes of their own. `cuda_graphs`: whether decode steps on a
    GPU are captured once and replayed; a CPU has none. `fixed_shapes`: whether every pass on a GPU is padded to the
    same number of rows, `max_running` of a decode and `chunk_tokens` of a prefill, so that no result depends, not even
    in its last bit, on how many requests share a step; costs time.

    For tests. `keep_logits`: whether results have the logits of every generated token, float32 `[vocab]` each.
    `copy_delay`: makes the CPU backend's copies late by 0 up to so many steps, as copies on a GPU are, and `seed`, any
    integer, chooses by how many; requests sample with seeds of their own. `debug`: whether all invariants are checked
    after every step.

    Raises `InputError` for what is outside its range; `plan` finds what only the model can tell.
    """

    max_tokens: int
    slab_bytes: int | None = None
    host_pool_bytes: int = GIB
    block_size: int = 64
    hot_rows: int | None = None
    staging_rows: int | None = None
    max_running: int = 8
    chunk_tokens: int = 512
    indexer_tokens: int | None = None
    write_back: WriteBack = WriteBack.PRESSURE
    kv_dtype: KVDtype = "auto"
    attention: AttentionChoice = "auto"
    offload: OffloadConfig | None = None
    prefix_salt: str = ""
    parallel: TensorParallel | None = None
    copy_delay: int = 0
    seed: int = 0
    keep_logits: bool = False
    cuda_graphs: bool = True
    fixed_shapes: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_running", "chunk_tokens"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise InputError(f"{name} must be an integer, at least 1, not {value!r}")
        require_write_back(self.write_back)
        if self.copy_delay < 0:
            raise InputError(f"copy_delay must be 0 or more steps, not {self.copy_delay}")
        if self.kv_dtype not in get_args(KVDtype):
            raise InputError(f"unknown KV dtype {self.kv_dtype!r}: use one of {', '.join(get_args(KVDtype))}")
        if self.attention not in get_args(AttentionChoice):
            raise InputError(f"unknown attention {self.attention!r}: use one of {', '.join(get_args(AttentionChoice))}")

    def plan(self, model: ModelGeometry) -> CachePlan:
        """The pools for a model whose rows are stored as `kv_dtype`: what `LoadedModel.geometry_for` gives.

        Raises as `plan_cache` does, and `InvariantError` for a geometry of other rows.
        """
        if self.kv_dtype not in ("auto", model.row.name):
            raise InvariantError(f"a geometry of {model.row.name} rows is none of {self.kv_dtype} rows")
        hot_rows = self.hot_rows if self.hot_rows is not None else 2 * model.index_topk
        staging_rows = self.staging_rows if self.staging_rows is not None else 4 * model.index_topk
        pages = ceil_div(self.max_tokens, max(1, self.block_size))
        indexer_tokens = self.indexer_tokens or self.max_running * pages * self.block_size
        slab_bytes = self.slab_bytes
        if slab_bytes is None and self.block_size > 0:
            leases = ceil_div(hot_rows, self.block_size) + pages
            num_blocks = 1 + ceil_div(staging_rows, self.block_size) + self.max_running * (leases + 2)
            slab_bytes = num_blocks * device_blocks(model.row, model.num_layers, self.block_size).payload_bytes
        return plan_cache(
            CacheConfig(
                block_size=self.block_size,
                slab_bytes=slab_bytes or 0,
                host_pool_bytes=self.host_pool_bytes,
                hot_rows=hot_rows,
                staging_rows=staging_rows,
                max_running=self.max_running,
                max_tokens=self.max_tokens,
                indexer_tokens=indexer_tokens,
                write_back=self.write_back,
            ),
            model,
        )
