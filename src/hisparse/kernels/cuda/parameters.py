"""How kernels are specialised and launched, decided from shapes and limits alone. No torch, no device.

The measurements behind the constants stand in benchmarks/README.md.
"""

from dataclasses import dataclass, replace

from hisparse.config import MAX_HOT_ROWS, MAX_TOPK
from hisparse.errors import InputError
from hisparse.geometry import HOST_LINE_BYTES, align_up, ceil_div
from hisparse.kernels.cuda.arguments import ClusterOffsets, SharedOffsets

WARP = 32
RESOLVE_THREADS = 1024
CLUSTER_THREADS = 256
"""Of a block of `resolve_cluster`, which scans 1024 bins four at a time."""

LOOK_UP_THREADS = 256
_LOOK_UP_FILL = 8
"""Blocks of `look_up` that a multiprocessor holds."""

MOVE_THREADS = 512
_ROWS_PER_BLOCK = 64
"""Rows that a block has under way: in several blocks, more than the link needs."""

REPLAY_BLOCKS = 16
REPLAY_THREADS = 256
REPLAY_BYTES = 144 << 10
"""Of `move_rows` beside the forward pass. So many bytes under way are a little more than the link's rate times its
latency. What is beyond queues, and the model's reads with it (benchmarks/README.md)."""

MAX_BLOCKS_PER_ROW = 32
"""One block reads host memory at a fifteenth of the link's rate, so a lone request gets this many."""

MAX_ROWS = 8192
"""Rows of one step. A request's rows are listed in shared memory, two bytes each."""

MAX_UNION_ROWS = 8
"""Rows of one request whose misses a cluster is sure to list. Past that, misses may be refused like an overflow."""

MAX_CLUSTER = 8
"""The largest cluster that every device with clusters takes. Clusters of 16 were slower."""

_CLUSTER_FILL = 2
"""Blocks of `resolve_cluster` a multiprocessor: the plan of one runs beside the copies of another."""

_MAX_SELECTIONS = 4
_SEGMENT_POSITIONS = 128
_STATIC_SHARED_BYTES = 10240
"""Shared memory that the kernels declare themselves, rounded up: histogram, barriers, scans."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What of a device decides a launch. `arch`: compute capability, such as (9, 0); `shared_bytes`: of a block."""

    arch: tuple[int, int]
    num_multiprocessors: int
    shared_bytes: int

    @property
    def has_bulk_copies(self) -> bool:
        """Whether the bulk copy engine is there."""
        return self.arch >= (9, 0)

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can share their memory in clusters. 12.x is left to the kernel that needs none."""
        return (9, 0) <= self.arch < (12, 0)


@dataclass(frozen=True, slots=True)
class Specialization:
    """What a kernel is compiled for, beside the architecture.

    `threads` of a block; `rows_per_warp`: rows that a warp moves at once, by the bulk copy engine if `use_bulk`.
    `keep_positions`, `keep_stamps`: shared memory has room for a copy of this part of the replacement state.
    `cluster`: blocks that share one request; `selections`: those that a thread has under way.
    """

    kernel: str
    threads: int = MOVE_THREADS
    row_bytes: int = 16
    rows_per_warp: int = 1
    use_bulk: bool = False
    keep_positions: bool = False
    keep_stamps: bool = False
    cluster: int = 1
    selections: int = 1

    @property
    def stage_bytes(self) -> int:
        """Shared memory that the rows under way occupy."""
        rows = self.threads // WARP * self.rows_per_warp
        return rows * align_up(self.row_bytes, HOST_LINE_BYTES) if self.use_bulk else 0

    def macros(self) -> tuple[tuple[str, str], ...]:
        """Macro definitions for the compiler."""
        return (
            ("THREADS", str(self.threads)),
            ("ROW_BYTES", str(self.row_bytes)),
            ("ROWS_PER_WARP", str(self.rows_per_warp)),
            ("USE_BULK", str(int(self.use_bulk))),
            ("KEEP_POSITIONS", str(int(self.keep_positions))),
            ("KEEP_STAMPS", str(int(self.keep_stamps))),
            ("CLUSTER", str(self.cluster)),
            ("SELECTIONS", str(self.selections)),
        )


@dataclass(frozen=True, slots=True)
class ResolveShape:
    """Sizes of one call of `resolve`. `max_tokens`: columns of the inverse map. `num_slots` bounds the requests."""

    num_rows: int
    topk: int
    hot_rows: int
    max_tokens: int
    row_bytes: int
    num_slots: int = MAX_ROWS

    @property
    def num_requests(self) -> int:
        """The most requests that the rows can belong to."""
        return max(1, min(self.num_rows, self.num_slots))

    def __post_init__(self) -> None:
        for name, limit in (("topk", MAX_TOPK), ("hot_rows", MAX_HOT_ROWS), ("num_rows", MAX_ROWS)):
            if getattr(self, name) > limit:
                raise InputError(f"{name} is {getattr(self, name)}; the CUDA resolver takes at most {limit}")


@dataclass(frozen=True, slots=True)
class ResolveLaunch:
    """One launch: of `resolve` with `offsets`, or of `resolve_cluster` with `cluster_offsets`; the other are zero.

    `grid`: blocks in x and y. `shared_bytes`: dynamic shared memory of a block.
    """

    specialization: Specialization
    offsets: SharedOffsets
    cluster_offsets: ClusterOffsets
    shared_bytes: int
    grid: tuple[int, int]


@dataclass(frozen=True, slots=True)
class MoveLaunch:
    """One launch of `move_rows`: the kernel and how many blocks of it."""

    specialization: Specialization
    blocks: int


def with_mover(
    kernel: Specialization, limits: DeviceLimits, shared_bytes: int, rows_per_block: int = _ROWS_PER_BLOCK
) -> Specialization:
    """`kernel`, told how to move rows with the dynamic shared memory that is left for the rows under way."""
    most = rows_per_warp = rows_per_block // (kernel.threads // WARP)
    while limits.has_bulk_copies and rows_per_warp:
        candidate = replace(kernel, rows_per_warp=rows_per_warp, use_bulk=True)
        if candidate.stage_bytes <= shared_bytes:
            return candidate
        rows_per_warp //= 2
    return replace(kernel, rows_per_warp=most, use_bulk=False)


def plan_resolve(shape: ResolveShape, limits: DeviceLimits) -> ResolveLaunch:
    """Kernel, shared memory, specialisation and grid of one call.

    Raises `InputError` when the inverse of that many tokens does not fit the device's shared memory.
    """
    return _plan_cluster(shape, limits) if limits.has_clusters else _plan_team(shape, limits)


def plan_look_up(shape: ResolveShape, limits: DeviceLimits) -> ResolveLaunch:
    """The launch where no request has a hot lease: a thread a column, as long as all blocks run side by side."""
    blocks = ceil_div(shape.topk, LOOK_UP_THREADS)
    at_once = max(1, _LOOK_UP_FILL * limits.num_multiprocessors // shape.num_rows)
    kernel = Specialization("look_up", LOOK_UP_THREADS)
    return ResolveLaunch(kernel, SharedOffsets(), ClusterOffsets(), 0, (min(blocks, at_once), shape.num_rows))


def _plan_team(shape: ResolveShape, limits: DeviceLimits) -> ResolveLaunch:
    available = limits.shared_bytes - _STATIC_SHARED_BYTES
    for kernel in _resolve_variants(shape.row_bytes):
        offsets, used = _lay_out(shape, kernel)
        if used <= available:
            break
    else:
        raise _too_large(shape, used, available)
    kernel = with_mover(kernel, limits, available - used)
    grid = (shape.num_rows, blocks_per_row(shape.num_rows, limits))
    return ResolveLaunch(kernel, offsets, ClusterOffsets(), used + kernel.stage_bytes, grid)


def _plan_cluster(shape: ResolveShape, limits: DeviceLimits) -> ResolveLaunch:
    cluster = cluster_size(shape.num_requests, limits)
    selections = ceil_div(shape.topk, cluster * CLUSTER_THREADS)
    kernel = Specialization(
        "resolve_cluster",
        CLUSTER_THREADS,
        shape.row_bytes,
        cluster=cluster,
        selections=2 if selections == 3 else min(selections, _MAX_SELECTIONS),
    )
    offsets, used = _lay_out_cluster(shape, cluster)
    available = limits.shared_bytes - _STATIC_SHARED_BYTES
    if used > available:
        raise _too_large(shape, used, available)
    kernel = with_mover(kernel, limits, available - used)
    return ResolveLaunch(kernel, SharedOffsets(), offsets, used + kernel.stage_bytes, (cluster, shape.num_rows))


def _too_large(shape: ResolveShape, used: int, available: int) -> InputError:
    return InputError(
        f"requests of {shape.max_tokens} tokens with {shape.hot_rows} hot rows need {used} bytes of shared memory "
        f"a block; this device has {available}: lower max_tokens or hot_rows"
    )


def _resolve_variants(row_bytes: int) -> tuple[Specialization, ...]:
    """`resolve` with all, part and none of the replacement state in shared memory: fastest first."""
    return tuple(
        Specialization("resolve", RESOLVE_THREADS, row_bytes, keep_positions=positions, keep_stamps=stamps)
        for positions, stamps in ((True, True), (True, False), (False, False))
    )


def _lay_out(shape: ResolveShape, kernel: Specialization) -> tuple[SharedOffsets, int]:
    """Where `resolve` keeps what, and how many bytes lie before the rows under way."""
    segments = ceil_div(shape.max_tokens, _SEGMENT_POSITIONS)
    sizes = {
        "miss_bits": segments * _SEGMENT_POSITIONS // 8,
        "miss_prefix": segments * 2,
        "touched": ceil_div(shape.hot_rows, 32) * 4,
        "positions": align_up(shape.hot_rows, 4) * 4 * kernel.keep_positions,
        "stamps": align_up(shape.hot_rows, 4) * 4 * kernel.keep_stamps,
        "victims": shape.hot_rows * 2,
        "rows": shape.num_rows * 2,
    }
    offsets, used = SharedOffsets(miss_segments=segments), 0
    for name, size in sizes.items():
        setattr(offsets, name, used)
        used += align_up(size, 16)
    offsets.stages = align_up(used, HOST_LINE_BYTES)
    return offsets, offsets.stages


def _lay_out_cluster(shape: ResolveShape, cluster: int) -> tuple[ClusterOffsets, int]:
    """Where a block of `resolve_cluster` keeps what, and how many bytes lie before the rows under way."""
    columns = min(shape.topk, ceil_div(shape.topk, cluster * CLUSTER_THREADS) * CLUSTER_THREADS)
    capacity = min(shape.hot_rows, columns * min(shape.num_rows, MAX_UNION_ROWS))
    missed_words = ceil_div(ceil_div(shape.max_tokens, 32), cluster)
    touched_words = align_up(ceil_div(shape.hot_rows, 32), 4)
    sizes = {
        "missed": missed_words * 4,
        "touched": touched_words * 4,
        "excluded": touched_words * 4,
        "misses": capacity * 4,
        "victims": capacity * 2,
        "rows": shape.num_rows * 2,
    }
    offsets = ClusterOffsets(missed_words=missed_words, touched_words=touched_words, capacity=capacity)
    used = 0
    for name, size in sizes.items():
        setattr(offsets, name, used)
        used += align_up(size, 16)
    offsets.stages = align_up(used, HOST_LINE_BYTES)
    return offsets, offsets.stages


def cluster_size(num_requests: int, limits: DeviceLimits) -> int:
    """Blocks that share one request: as many as fill the device `_CLUSTER_FILL` times, a power of two."""
    share = max(1, _CLUSTER_FILL * limits.num_multiprocessors // max(1, num_requests))
    return min(MAX_CLUSTER, 1 << (share.bit_length() - 1))


def blocks_per_row(num_rows: int, limits: DeviceLimits) -> int:
    """Blocks that share one row's work: as many as fill the device once, a power of two."""
    share = max(1, limits.num_multiprocessors // max(1, num_rows))
    return min(MAX_BLOCKS_PER_ROW, 1 << (share.bit_length() - 1))


def plan_move(row_bytes: int, num_copies: int, limits: DeviceLimits, shared_bytes: int) -> MoveLaunch:
    """A launch of `move_rows` that has the device for itself, for at most `num_copies` rows.

    `shared_bytes`: dynamic shared memory that is left for the rows under way.
    """
    kernel = with_mover(Specialization("move_rows", MOVE_THREADS, row_bytes), limits, shared_bytes)
    return MoveLaunch(kernel, max(1, min(limits.num_multiprocessors, ceil_div(num_copies, MOVE_THREADS // WARP))))


def plan_replay(row_bytes: int, num_copies: int, limits: DeviceLimits, shared_bytes: int) -> MoveLaunch:
    """The same for a plan's copies, which run beside the forward pass: what keeps the link busy, and no more.

    Blocks beyond those would only take multiprocessors from the model. Reads beyond those would only queue, and the
    model's own reads behind them. How many rows a plan has is known on the device alone.
    """
    warps = REPLAY_THREADS // WARP
    rows_per_warp = ceil_div(REPLAY_BYTES, REPLAY_BLOCKS * warps * row_bytes)
    kernel = Specialization("move_rows", REPLAY_THREADS, row_bytes)
    kernel = with_mover(kernel, limits, shared_bytes, min(_ROWS_PER_BLOCK, warps * rows_per_warp))
    return MoveLaunch(kernel, max(1, min(REPLAY_BLOCKS, ceil_div(num_copies, REPLAY_THREADS // WARP))))
