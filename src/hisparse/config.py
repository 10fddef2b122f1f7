"""Options, parsed and validated once. Everything behind this module works with frozen, checked values."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from hisparse.errors import CapacityError, InputError
from hisparse.geometry import BlockGeometry, RowFormat, ceil_div, device_blocks, host_blocks

GIB = 1 << 30
_LARGEST_BYTES = (1 << 63) - 1
"""What a signed 64-bit number holds."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str, what: str = "size") -> int:
    """Bytes of a size such as "512KiB", "1.5 GiB", "2GB" or "4096".

    Raises `InputError` naming `what` when the text is no size, rounds to nothing or is of 2^63 bytes and more.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise InputError(f"{what} {text!r} is not a size: write it like 512KiB, 64MiB or 1.5GiB")
    size = float(match.group(1)) * unit
    if size >= _LARGEST_BYTES:
        raise InputError(f"{what} {text!r} is more than any machine has: write it like 512KiB, 64MiB or 1.5GiB")
    num_bytes = int(size)
    if num_bytes <= 0:
        raise InputError(f"{what} {text!r} is empty: it must be at least one byte")
    return num_bytes


KVDtype = Literal["auto", "fp8_ds_mla"]
"""How KV rows are stored: as elements of the model's own dtype, or packed in 656 bytes."""


class WriteBack(Enum):
    """When a full page leaves for the host: when its block is needed, as soon as it is full, or not at all.

    With NEVER a request starts only once the slab holds all of it, and there is no host pool to speak of.
    """

    PRESSURE = "pressure"
    EAGER = "eager"
    NEVER = "never"


def require_write_back(value: object) -> None:
    """Raise `InputError` for what is no `WriteBack`, such as the name of one."""
    if not isinstance(value, WriteBack):
        raise InputError(f"write_back {value!r} must be one of {', '.join(map(str, WriteBack))}")


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What the cache needs to know of a model. No torch, no transformers.

    `row`: one token's KV of one layer. `leader_of[i]` is the layer whose indexer selects the rows of layer `i`; leaders
    name themselves. `index_topk`: rows that an indexer selects for a query, at least 1; a cache takes up to `MAX_TOPK`.
    `index_row_bytes`: one token's index key of one leader, a multiple of 16 bytes, of `index_dtype` elements
    ("float32", "bfloat16" or "float16"); None is the rows' own type.

    Raises `InputError` for an `index_topk` below 1 and for a layer whose leader is no earlier layer with an indexer.
    """

    row: RowFormat
    leader_of: tuple[int, ...]
    index_topk: int
    index_row_bytes: int
    index_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.index_topk <= 0:
            raise InputError(f"index_topk is {self.index_topk}: a sparse-attention model selects at least one row")
        for layer, leader in enumerate(self.leader_of):
            if not 0 <= leader <= layer or self.leader_of[leader] != leader:
                raise InputError(f"layer {layer} follows layer {leader}, which is not an earlier layer with an indexer")

    @property
    def num_layers(self) -> int:
        """Layers that keep KV, leaders and followers."""
        return len(self.leader_of)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The layers that run an indexer, in order."""
        return tuple(layer for layer, leader in enumerate(self.leader_of) if layer == leader)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The sizes of one replica's caches. `plan_cache` checks them against a model, and rounds to whole blocks.

    `block_size`: tokens of a page, a power of two. `slab_bytes`: the device budget of resident, hot and staging blocks,
    in bytes, rounded down. `host_pool_bytes`: the usable capacity of the host pool, in bytes of payload, rounded down.
    `hot_rows`: rows (one token's KV in one layer) of one request's hot lease, rounded up; at least top-k times
    `rows_per_step`, at most `MAX_HOT_ROWS`. `staging_rows`: rows of the device buffer through which a prefill reads
    host pages, rounded up; at least top-k. `max_running`: requests that have a slot at once. `max_tokens`: tokens of
    the longest one, prompt and output together. `indexer_tokens`: tokens whose index keys the indexer's own pool holds.
    `rows_per_step`: the most query rows of one request that one step resolves together, 1 to `MAX_ROWS_PER_STEP` (more
    than 1 with speculative verification). `write_back`: when full pages leave for the host.

    Raises `InputError` for a `write_back` that is no `WriteBack`. What else is outside its range is found by
    `plan_cache`.
    """

    block_size: int
    slab_bytes: int
    host_pool_bytes: int
    hot_rows: int
    staging_rows: int
    max_running: int
    max_tokens: int
    indexer_tokens: int
    rows_per_step: int = 1
    write_back: WriteBack = WriteBack.PRESSURE

    def __post_init__(self) -> None:
        require_write_back(self.write_back)


MAX_HOT_ROWS = 32768
MAX_TOPK = 4096
MAX_ROWS_PER_STEP = 8
TAIL_PAGES = 2
"""Pages that a running request always has on the device: the one it fills and the one it moves on to."""
LEAST_HOST_BLOCKS = 2
"""Of a host pool: the null block, and one that holds a page."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """A `CacheConfig` applied to a `ModelGeometry`: the pools in blocks, null blocks included.

    Every number here is derived; build it with `plan_cache`, which checks how the numbers relate. `device`, `host` and
    `indexer` say how large a block of each pool is. `hot_blocks`: device blocks of one request's hot lease.
    `staging_blocks`: those of the one staging lease. `max_pages`: pages of the longest request.
    """

    config: CacheConfig
    model: ModelGeometry
    device: BlockGeometry
    host: BlockGeometry
    indexer: BlockGeometry
    num_device_blocks: int
    num_host_blocks: int
    num_indexer_blocks: int
    hot_blocks: int
    staging_blocks: int
    max_pages: int

    @property
    def host_backed_blocks(self) -> int:
        """Device blocks that a running request needs at most, once all else is on the host."""
        return self.hot_blocks + TAIL_PAGES

    @property
    def host_pool_physical_bytes(self) -> int:
        """Memory of one host pool, alignment and the null block included."""
        return self.num_host_blocks * self.host.block_stride

    @property
    def usable_device_blocks(self) -> int:
        """Blocks of the slab that requests share: all but the null block and the staging lease."""
        return self.num_device_blocks - 1 - self.staging_blocks


def plan_cache(config: CacheConfig, model: ModelGeometry) -> CachePlan:
    """Derive and check the sizes of all pools.

    Raises `InputError` for an option outside the range that `CacheConfig` gives, `CapacityError` (with the minimum) for
    a budget that cannot run even one request.
    """
    _check_ranges(config, model)
    device = device_blocks(model.row, model.num_layers, config.block_size)
    host = host_blocks(model.row, model.num_layers, config.block_size)
    index_row = RowFormat("index key", model.index_row_bytes)
    indexer = device_blocks(index_row, len(model.leaders), config.block_size)
    hot = ceil_div(config.hot_rows, config.block_size)
    staging = ceil_div(config.staging_rows, config.block_size)
    num_device = device.blocks_in(config.slab_bytes)
    minimum = 1 + staging + hot + TAIL_PAGES
    if num_device < minimum:
        raise CapacityError(
            f"a device budget of {config.slab_bytes} bytes holds {num_device} blocks; the least that runs one request "
            f"is {minimum} blocks, {minimum * device.payload_bytes} bytes (1 null, {staging} staging, {hot} hot, "
            f"{TAIL_PAGES} tail)"
        )
    # Where nothing may leave the device, the pool is the least that can be had.
    never = config.write_back is WriteBack.NEVER
    num_host = LEAST_HOST_BLOCKS if never else host.blocks_in(config.host_pool_bytes)
    if num_host < LEAST_HOST_BLOCKS:
        raise CapacityError(
            f"a host pool of {config.host_pool_bytes} bytes holds {num_host} blocks; the least is {LEAST_HOST_BLOCKS} "
            f"blocks, {LEAST_HOST_BLOCKS * host.payload_bytes} bytes"
        )
    return CachePlan(
        config=config,
        model=model,
        device=device,
        host=host,
        indexer=indexer,
        num_device_blocks=num_device,
        num_host_blocks=num_host,
        num_indexer_blocks=1 + indexer.pages(config.indexer_tokens),
        hot_blocks=hot,
        staging_blocks=staging,
        max_pages=device.pages(config.max_tokens),
    )


def _check_ranges(config: CacheConfig, model: ModelGeometry) -> None:
    if config.block_size <= 0 or config.block_size & (config.block_size - 1):
        raise InputError(f"block size {config.block_size} must be a power of two, such as 16 or 64")
    if model.index_topk > MAX_TOPK:
        raise InputError(f"index_topk {model.index_topk} is over the resolver's bound of {MAX_TOPK}")
    if not 1 <= config.rows_per_step <= MAX_ROWS_PER_STEP:
        raise InputError(f"rows per step must be 1 to {MAX_ROWS_PER_STEP}, not {config.rows_per_step}")
    union = model.index_topk * config.rows_per_step
    if not union <= config.hot_rows <= MAX_HOT_ROWS:
        raise InputError(
            f"hot rows {config.hot_rows} must be at least {union} (top-k {model.index_topk} times "
            f"{config.rows_per_step} rows of a step) and at most {MAX_HOT_ROWS}"
        )
    if config.staging_rows < model.index_topk:
        raise InputError(f"staging rows {config.staging_rows} must be at least top-k, {model.index_topk}")
    for name in ("max_running", "max_tokens", "indexer_tokens"):
        if getattr(config, name) <= 0:
            raise InputError(f"{name} must be at least 1, not {getattr(config, name)}")
