"""The kernels as torch operators: `torch.ops.hisparse.*`. What `torch.compile` and CUDA graphs see.

The operators trust their arguments; `CudaResolver` checks them. Tensors of one contract type travel as one list, in
the order in which the type declares them, and a layout as its six numbers (`layout_numbers`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.geometry import PagedLayout
from hisparse.kernels.cuda import driver
from hisparse.kernels.cuda.arguments import MAX_LAYERS, MoveArgs, PagedRowsArgs, ResetArgs, ResolveArgs
from hisparse.kernels.cuda.parameters import (
    ResolveShape,
    Specialization,
    plan_look_up,
    plan_move,
    plan_replay,
    plan_resolve,
)

LAYOUT_NUMBERS = 6

_RESET_BLOCKS_PER_SLOT = 8
_RESET_SLOTS_AT_ONCE = 1024
_MOVE_STATIC_SHARED_BYTES = 2048


def layout_numbers(layout: PagedLayout) -> list[int]:
    """A layout as the integers that an operator takes."""
    return [
        layout.offset,
        layout.block_stride,
        layout.row_stride,
        layout.row_bytes,
        layout.block_size,
        layout.num_blocks,
    ]


def _paged_rows(storage: Tensor, numbers: Sequence[int]) -> PagedRowsArgs:
    offset, block_stride, row_stride, _, block_size, _ = numbers
    return PagedRowsArgs(storage.data_ptr() + offset, block_stride, row_stride, block_size.bit_length() - 1)


@torch.library.custom_op("hisparse::resolve", mutates_args={"out", "state", "destination", "plan", "counters"})
def resolve(
    out: Tensor,
    selection: list[Tensor],
    tables: list[Tensor],
    state: list[Tensor],
    source: Tensor,
    destination: Tensor,
    plan: list[Tensor],
    counters: list[Tensor],
    scratch: Tensor,
    layouts: list[int],
    leased: bool,
) -> None:
    """`Resolver.resolve` into `out`, int32 `[num_rows, topk]`.

    `scratch`: int32 `[num_rows]` or more, 0 before and after; launches that may overlap need their own.
    `layouts`: those of `source` and `destination`. `leased`: as in `Selection`.
    """
    positions, row_slot = selection
    position_of, hot_row_of = state[:2]
    count, host_row, _ = plan
    num_rows, topk = positions.shape
    num_slots, hot_rows = position_of.shape
    if num_rows == 0 or topk == 0:
        count.zero_()
        _advance(state[3], row_slot, tables[2])
        return
    device = out.device.index
    shape = ResolveShape(num_rows, topk, hot_rows, hot_row_of.shape[1], layouts[3], num_slots)
    plan_launch = plan_resolve if leased else plan_look_up
    launch = plan_launch(shape, driver.device_limits(device))
    plan_rows, plan_capacity = host_row.shape
    addresses = (positions, row_slot, out, *tables, *state)
    arguments = ResolveArgs(
        num_rows,
        topk,
        num_slots,
        tables[0].shape[1],
        tables[2].shape[1],
        hot_rows,
        hot_row_of.shape[1],
        min(hot_row_of.shape[1], tables[0].shape[1] * layouts[4]),
        plan_rows,
        plan_capacity,
        launch.cluster_offsets,
        (0, 0),
        *(tensor.data_ptr() for tensor in addresses),
        _paged_rows(source, layouts[:LAYOUT_NUMBERS]),
        _paged_rows(destination, layouts[LAYOUT_NUMBERS:]),
        *(tensor.data_ptr() for tensor in (*plan, *counters, scratch)),
        launch.offsets,
    )
    with torch.cuda.device(device):
        kernel = driver.load(launch.specialization, device)
        kernel.launch(launch.grid, launch.shared_bytes, arguments)


def _advance(step: Tensor, row_slot: Tensor, hot: Tensor) -> None:
    """Advance the clock of every leased slot that has a row: what is left of a step that selects nothing."""
    seen = torch.zeros(step.numel() + 1, dtype=torch.int32, device=step.device)
    seen.scatter_(0, (row_slot + 1).long(), 1)
    step.add_(seen[1:] * (hot != 0).any(1))


@torch.library.custom_op("hisparse::move_rows", mutates_args={"destination", "totals"})
def move_rows(
    source_row: Tensor,
    destination_row: Tensor,
    count: Tensor | None,
    source: Tensor,
    destination: Tensor,
    layouts: list[int],
    totals: Tensor | None,
) -> None:
    """Copy rows `source_row[i]` to `destination_row[i]`, int64 `[n]`; a pair with a -1 is skipped.

    `count`: int32 `[max_rows]` on the device, then the others are `[max_rows, capacity]` and only the first `count[r]`
    pairs of row r count; all of them when None. `layouts`: source and destination
    of each layer, up to `MAX_LAYERS` layers. `totals`: the counters, to which the bytes are added.
    """
    num_layers = len(layouts) // (2 * LAYOUT_NUMBERS)
    if source_row.numel() == 0:
        return
    device = source_row.device.index
    limits = driver.device_limits(device)
    arguments = MoveArgs(
        source_row=source_row.data_ptr(),
        destination_row=destination_row.data_ptr(),
        count=0 if count is None else count.data_ptr(),
        totals=0 if totals is None else totals.data_ptr(),
        num_rows=1 if count is None else count.numel(),
        row_length=source_row.numel() if count is None else source_row.shape[1],
        num_layers=num_layers,
    )
    for layer in range(num_layers):
        first = 2 * layer * LAYOUT_NUMBERS
        arguments.source[layer] = _paged_rows(source, layouts[first : first + LAYOUT_NUMBERS])
        arguments.destination[layer] = _paged_rows(
            destination, layouts[first + LAYOUT_NUMBERS : first + 2 * LAYOUT_NUMBERS]
        )
    starts_bytes = 4 * arguments.num_rows
    available = limits.shared_bytes - _MOVE_STATIC_SHARED_BYTES - starts_bytes
    # Only a plan's copies are counted on the device, and only they run beside the forward pass.
    plan = plan_move if count is None else plan_replay
    launch = plan(layouts[3], source_row.numel() * num_layers, limits, available)
    with torch.cuda.device(device):
        kernel = driver.load(launch.specialization, device)
        kernel.launch((launch.blocks, 1), launch.specialization.stage_bytes + starts_bytes, arguments)


@torch.library.custom_op("hisparse::reset_slots", mutates_args={"position_of", "queue_state"})
def reset_slots(position_of: Tensor, queue_state: Tensor, slots: Tensor) -> None:
    """Set the rows `slots`, int64 `[n]`, of `position_of` to -1 and of `queue_state` to 0."""
    if slots.numel() == 0:
        return
    device = position_of.device.index
    num_slots, hot_rows = position_of.shape
    addresses = (slots.data_ptr(), position_of.data_ptr(), queue_state.data_ptr())
    arguments = ResetArgs(*addresses, slots.numel(), num_slots, hot_rows)
    with torch.cuda.device(device):
        kernel = driver.load(Specialization("reset_slots"), device)
        kernel.launch((_RESET_BLOCKS_PER_SLOT, min(slots.numel(), _RESET_SLOTS_AT_ONCE)), 0, arguments)


@resolve.register_fake
def _(
    out: Tensor,
    selection: list[Tensor],
    tables: list[Tensor],
    state: list[Tensor],
    source: Tensor,
    destination: Tensor,
    plan: list[Tensor],
    counters: list[Tensor],
    scratch: Tensor,
    layouts: list[int],
    leased: bool,
) -> None:
    """All results are written in place."""


@move_rows.register_fake
def _(
    source_row: Tensor,
    destination_row: Tensor,
    count: Tensor | None,
    source: Tensor,
    destination: Tensor,
    layouts: list[int],
    totals: Tensor | None,
) -> None:
    torch._check(len(layouts) <= 2 * LAYOUT_NUMBERS * MAX_LAYERS)


@reset_slots.register_fake
def _(position_of: Tensor, queue_state: Tensor, slots: Tensor) -> None:
    """All results are written in place."""
