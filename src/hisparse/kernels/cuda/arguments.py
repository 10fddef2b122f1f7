"""The structs that kernels take by value, as ctypes. `source/layout.cuh` declares the same ones.

Both sides are compared when a kernel is compiled: it is given the sizes below as macros.
"""

import ctypes

MAX_LAYERS = 16
"""Layers whose rows one launch of `move_rows` copies."""

MAX_RUNS = 32
"""Runs of a page that one launch of `copy_pages` copies."""

_POINTER = ctypes.c_uint64
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64
_I32 = ctypes.c_int32
_I64 = ctypes.c_int64


class PagedRowsArgs(ctypes.Structure):
    """One layer's rows: address of the layer in block 0, strides in bytes, log2 of the block size."""

    _fields_ = (("base", _POINTER), ("block_stride", _I64), ("row_stride", _I32), ("block_shift", _I32))


class SharedOffsets(ctypes.Structure):
    """Offsets in bytes into a block's dynamic shared memory, and the number of segments of the miss set."""

    _fields_ = (
        ("miss_bits", _I32),
        ("miss_prefix", _I32),
        ("touched", _I32),
        ("positions", _I32),
        ("stamps", _I32),
        ("victims", _I32),
        ("rows", _I32),
        ("stages", _I32),
        ("miss_segments", _I32),
    )


class ClusterOffsets(ctypes.Structure):
    """The same for a kernel of clusters. The last three are sizes: words of both bit sets, misses of a block."""

    _fields_ = (
        ("missed", _I32),
        ("touched", _I32),
        ("excluded", _I32),
        ("misses", _I32),
        ("victims", _I32),
        ("rows", _I32),
        ("stages", _I32),
        ("missed_words", _I32),
        ("touched_words", _I32),
        ("capacity", _I32),
    )


class ResolveArgs(ctypes.Structure):
    """Arguments of both resolve kernels. Pointers are device addresses; shapes stand in `source/layout.cuh`."""

    _fields_ = (
        ("num_rows", _I32),
        ("topk", _I32),
        ("num_slots", _I32),
        ("max_pages", _I32),
        ("hot_blocks", _I32),
        ("hot_rows", _I32),
        ("max_tokens", _I32),
        ("num_positions", _I32),
        ("plan_rows", _I32),
        ("plan_capacity", _I32),
        ("cluster", ClusterOffsets),
        ("reserved", _I32 * 2),
        ("positions", _POINTER),
        ("row_slot", _POINTER),
        ("out", _POINTER),
        ("resident", _POINTER),
        ("host", _POINTER),
        ("hot", _POINTER),
        ("position_of", _POINTER),
        ("hot_row_of", _POINTER),
        ("stamp", _POINTER),
        ("step", _POINTER),
        ("queue", _POINTER),
        ("queue_state", _POINTER),
        ("source", PagedRowsArgs),
        ("destination", PagedRowsArgs),
        ("plan_count", _POINTER),
        ("plan_host_row", _POINTER),
        ("plan_slab_row", _POINTER),
        ("totals", _POINTER),
        ("status", _POINTER),
        ("scratch", _POINTER),
        ("shared", SharedOffsets),
    )


class MoveArgs(ctypes.Structure):
    """Arguments of `move_rows`: copies `source_row[r][i]` to `destination_row[r][i]` in each of `num_layers` layers.

    There are `num_rows` rows of `row_length` pairs, of which `count[r]` count if `count` is not 0; `totals` (or 0)
    counts the bytes.
    """

    _fields_ = (
        ("source_row", _POINTER),
        ("destination_row", _POINTER),
        ("count", _POINTER),
        ("totals", _POINTER),
        ("row_length", _I64),
        ("num_rows", _I32),
        ("num_layers", _I32),
        ("source", PagedRowsArgs * MAX_LAYERS),
        ("destination", PagedRowsArgs * MAX_LAYERS),
    )


class ResetArgs(ctypes.Structure):
    """Arguments of `reset_slots`."""

    _fields_ = (
        ("slots", _POINTER),
        ("position_of", _POINTER),
        ("queue_state", _POINTER),
        ("num_resets", _I32),
        ("num_slots", _I32),
        ("hot_rows", _I32),
        ("reserved", _I32),
    )


class CopyRun(ctypes.Structure):
    """Equal pieces of a page: offsets and strides in bytes at both ends; words before them, and of a piece."""

    _fields_ = (
        ("source_offset", _U64),
        ("destination_offset", _U64),
        ("source_stride", _U64),
        ("destination_stride", _U64),
        ("first_word", _U32),
        ("words_per_piece", _U32),
    )


class CopyArgs(ctypes.Structure):
    """Arguments of `copy_pages`: copies `num_runs` runs of `num_pages` pages, whose addresses are in two arrays."""

    _fields_ = (
        ("source_bases", _POINTER),
        ("destination_bases", _POINTER),
        ("num_pages", _U32),
        ("words_per_page", _U32),
        ("num_runs", _I32),
        ("word_bytes", _I32),
        ("runs", CopyRun * MAX_RUNS),
    )


def size_macros() -> tuple[tuple[str, str], ...]:
    """Macros that tell a kernel how large the host believes its arguments to be."""
    return (
        ("RESOLVE_ARGS_BYTES", str(ctypes.sizeof(ResolveArgs))),
        ("MOVE_ARGS_BYTES", str(ctypes.sizeof(MoveArgs))),
        ("RESET_ARGS_BYTES", str(ctypes.sizeof(ResetArgs))),
        ("COPY_ARGS_BYTES", str(ctypes.sizeof(CopyArgs))),
    )
