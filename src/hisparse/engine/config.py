"""The engine's options and how they become sizes of caches."""

from dataclasses import dataclass
from typing import get_args

from hisparse.config import GIB, CacheConfig, CachePlan, KVDtype, ModelGeometry, WriteBack, plan_cache
from hisparse.engine.parallel import TensorParallel
from hisparse.errors import InputError, InvariantError
from hisparse.geometry import ceil_div, device_blocks
from hisparse.kernels.attention_libraries import AttentionChoice
from hisparse.offload.config import OffloadConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`max_tokens` is the longest request, prompt and output together.

    `slab_bytes` None makes a slab that holds everything, so that nothing is ever spilled. `hot_rows` None is twice
    top-k, `staging_rows` None four times. `chunk_tokens` bounds the prompt tokens of a step. `indexer_tokens` None
    holds `max_running` requests of the longest kind. `kv_dtype` "auto" stores rows in the model's dtype. `attention`
    names what computes decode rows on a GPU. `offload` keeps KV below the pools, in memory and in files; `prefix_salt`
    is a secret that keys of prefixes depend on, for tenants who do not trust each other. `parallel` has several ranks
    compute the model, in processes of their own. `copy_delay` makes the CPU
    backend's copies late by up to so many steps, chosen by `seed`, as copies on a GPU are. `debug` checks all
    invariants after every step.
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
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
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
