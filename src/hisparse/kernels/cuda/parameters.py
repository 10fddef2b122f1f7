"""How kernels are specialised and launched, decided from shapes and limits alone. No torch, no device.

The measurements behind the constants stand in benchmarks/README.md.
"""

from dataclasses import dataclass, replace

from hisparse.config import MAX_HOT_ROWS, MAX_TOPK
from hisparse.errors import InputError
from hisparse.geometry import HOST_LINE_BYTES, align_up, ceil_div
from hisparse.kernels.cuda.arguments import SharedOffsets

WARP = 32
RESOLVE_THREADS = 1024
MOVE_THREADS = 512
_ROWS_PER_BLOCK = 64
"""Rows that a block has under way: in several blocks, more than the link needs."""

MAX_BLOCKS_PER_ROW = 32
"""One block reads host memory at a fifteenth of the link's rate, so a lone request gets this many."""

MAX_ROWS = 8192
"""Rows of one step. A request's rows are listed in shared memory, two bytes each."""

_SEGMENT_POSITIONS = 128
_STATIC_SHARED_BYTES = 8192
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


@dataclass(frozen=True, slots=True)
class Specialization:
    """What a kernel is compiled for, beside the architecture.

    `threads` of a block; `rows_per_warp`: rows that a warp moves at once, by the bulk copy engine if `use_bulk`.
    `keep_positions`, `keep_stamps`: shared memory has room for a copy of this part of the replacement state.
    """

    kernel: str
    threads: int = MOVE_THREADS
    row_bytes: int = 16
    rows_per_warp: int = 1
    use_bulk: bool = False
    keep_positions: bool = False
    keep_stamps: bool = False

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
        )


@dataclass(frozen=True, slots=True)
class ResolveShape:
    """Sizes of one call of `resolve`. `max_tokens`: columns of the inverse map."""

    num_rows: int
    topk: int
    hot_rows: int
    max_tokens: int
    row_bytes: int

    def __post_init__(self) -> None:
        for name, limit in (("topk", MAX_TOPK), ("hot_rows", MAX_HOT_ROWS), ("num_rows", MAX_ROWS)):
            if getattr(self, name) > limit:
                raise InputError(f"{name} is {getattr(self, name)}; the CUDA resolver takes at most {limit}")


@dataclass(frozen=True, slots=True)
class ResolveLaunch:
    """One launch of `resolve`: a grid of `num_rows` by `blocks_per_row`, with `shared_bytes` of dynamic memory."""

    specialization: Specialization
    offsets: SharedOffsets
    shared_bytes: int
    blocks_per_row: int


def with_mover(kernel: Specialization, limits: DeviceLimits, shared_bytes: int) -> Specialization:
    """`kernel`, told how to move rows with the dynamic shared memory that is left for the rows under way."""
    most = rows_per_warp = _ROWS_PER_BLOCK // (kernel.threads // WARP)
    while limits.has_bulk_copies and rows_per_warp:
        candidate = replace(kernel, rows_per_warp=rows_per_warp, use_bulk=True)
        if candidate.stage_bytes <= shared_bytes:
            return candidate
        rows_per_warp //= 2
    return replace(kernel, rows_per_warp=most, use_bulk=False)


def plan_resolve(shape: ResolveShape, limits: DeviceLimits) -> ResolveLaunch:
    """Shared memory, specialisation and grid of one call.

    Raises `InputError` when the inverse of that many tokens does not fit the device's shared memory.
    """
    available = limits.shared_bytes - _STATIC_SHARED_BYTES
    for kernel in _resolve_variants(shape.row_bytes):
        offsets, used = _lay_out(shape, kernel)
        if used <= available:
            break
    else:
        raise InputError(
            f"requests of {shape.max_tokens} tokens with {shape.hot_rows} hot rows need {used} bytes of shared memory "
            f"a block; this device has {available}: lower max_tokens or hot_rows"
        )
    kernel = with_mover(kernel, limits, available - used)
    return ResolveLaunch(kernel, offsets, used + kernel.stage_bytes, blocks_per_row(shape.num_rows, limits))


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


def blocks_per_row(num_rows: int, limits: DeviceLimits) -> int:
    """Blocks that share one row's work: as many as fill the device once, a power of two."""
    share = max(1, limits.num_multiprocessors // max(1, num_rows))
    return min(MAX_BLOCKS_PER_ROW, 1 << (share.bit_length() - 1))


def move_blocks(num_copies: int, limits: DeviceLimits) -> int:
    """Blocks of one launch of `move_rows` for at most `num_copies` rows."""
    return max(1, min(limits.num_multiprocessors, ceil_div(num_copies, MOVE_THREADS // WARP)))
