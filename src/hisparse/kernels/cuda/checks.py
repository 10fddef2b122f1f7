"""What the CUDA operators are given, checked before a kernel reads an address from it. Every check raises `InputError`.

Nothing here waits for the device.
"""

from collections.abc import Iterable

import torch

from hisparse.errors import InputError
from hisparse.geometry import MAX_ROW_BYTES, ROW_ALIGNMENT, PagedLayout, align_up
from hisparse.kernels.contract import (
    COUNTER_NAMES,
    BlockTables,
    HotState,
    MissPlan,
    PagedRows,
    ResolverCounters,
    Selection,
)

Expected = tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]
"""Name, tensor, dtype and shape; -1 stands for any extent."""

_MAX_ROWS = 2**31


def check_tensors(expected: Iterable[Expected], device: torch.device) -> None:
    """Each tensor is contiguous, on `device`, and of the dtype and shape that its name promises."""
    for name, tensor, dtype, shape in expected:
        if tensor.device != device:
            raise InputError(f"{name} is on {tensor.device}, not on {device}: move it there")
        if tensor.dtype != dtype:
            raise InputError(f"{name} is {tensor.dtype}, not {dtype}")
        fits = tensor.dim() == len(shape) and all(
            want in (-1, extent) for want, extent in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if extent < 0 else str(extent) for extent in shape)
            raise InputError(f"{name} has shape {list(tensor.shape)}, not [{wanted}]")
        if not tensor.is_contiguous():
            raise InputError(f"{name} is not contiguous: pass {name}.contiguous()")


def check_resolve(
    selection: Selection, tables: BlockTables, state: HotState, plan: MissPlan, counters: ResolverCounters
) -> None:
    """The tensors of one `resolve`, against each other."""
    device = selection.positions.device
    num_slots, hot_rows = state.position_of.shape
    num_rows, topk = selection.positions.shape
    check_tensors(
        (
            ("positions", selection.positions, torch.int32, (-1, -1)),
            ("row_slot", selection.row_slot, torch.int32, (num_rows,)),
            ("the resident table", tables.resident, torch.int32, (num_slots, -1)),
            ("the host table", tables.host, torch.int32, (num_slots, tables.resident.shape[1])),
            ("the hot table", tables.hot, torch.int32, (num_slots, -1)),
            ("position_of", state.position_of, torch.int32, (-1, -1)),
            ("hot_row_of", state.hot_row_of, torch.int16, (num_slots, -1)),
            ("stamp", state.stamp, torch.int32, (num_slots, hot_rows)),
            ("step", state.step, torch.int32, (num_slots,)),
            ("queue", state.queue, torch.int16, (num_slots, align_up(hot_rows, 4))),
            ("queue_state", state.queue_state, torch.int32, (num_slots, 4)),
            *plan_tensors(plan),
            ("the counters' totals", counters.totals, torch.int64, (len(COUNTER_NAMES),)),
            ("the counters' status", counters.status, torch.int32, (1,)),
        ),
        device,
    )
    max_rows, capacity = plan.host_row.shape
    most = min(num_rows * topk, hot_rows)
    if max_rows < num_rows or capacity < most:
        raise InputError(
            f"a plan for {max_rows} rows of {capacity} copies is too small: this call can need {num_rows} of {most}"
        )


def plan_tensors(plan: MissPlan) -> tuple[Expected, ...]:
    """What `check_tensors` expects of a plan."""
    shape = (plan.count.numel(), plan.host_row.shape[-1])
    return (
        ("the plan's count", plan.count, torch.int32, (-1,)),
        ("the plan's host_row", plan.host_row, torch.int64, shape),
        ("the plan's slab_row", plan.slab_row, torch.int64, shape),
    )


def check_rows(source: PagedRows, destination: PagedRows, device: torch.device) -> None:
    """Two views that rows are copied between: their sizes agree, their rows are aligned, `device` can reach both."""
    for name, rows in (("source", source), ("destination", destination)):
        _check_storage(name, rows.storage, rows.layout, device)
    for what in ("row_bytes", "block_size"):
        ours, theirs = getattr(source.layout, what), getattr(destination.layout, what)
        if ours != theirs:
            raise InputError(f"source and destination differ in {what}: {ours} and {theirs}")


def _check_storage(name: str, storage: torch.Tensor, layout: PagedLayout, device: torch.device) -> None:
    check_tensors(((f"the {name} storage", storage, torch.uint8, (-1,)),), storage.device)
    if storage.device != device and not (storage.device.type == "cpu" and storage.is_pinned()):
        raise InputError(
            f"the {name} storage is on {storage.device} and {device} cannot read it: "
            f"allocate it there, or in pinned host memory"
        )
    if layout.end_bytes > storage.numel():
        raise InputError(f"the {name} layout ends at byte {layout.end_bytes} of a storage of {storage.numel()}")
    first = storage.data_ptr() + layout.offset
    for what, value in (("address", first), ("block stride", layout.block_stride), ("row stride", layout.row_stride)):
        if value % ROW_ALIGNMENT:
            raise InputError(f"the {name}'s {what} {value} is not a multiple of {ROW_ALIGNMENT} bytes: align its rows")
    if layout.row_bytes % ROW_ALIGNMENT or layout.row_bytes > MAX_ROW_BYTES:
        raise InputError(
            f"rows of {layout.row_bytes} bytes: a multiple of {ROW_ALIGNMENT} up to {MAX_ROW_BYTES} is needed"
        )
    if layout.block_size & (layout.block_size - 1):
        raise InputError(f"block size {layout.block_size} must be a power of two, such as 16 or 64")
    if layout.num_rows >= _MAX_ROWS and name == "destination":
        raise InputError(f"{layout.num_rows} rows in one slab pass the int32 that outputs are: use fewer")
