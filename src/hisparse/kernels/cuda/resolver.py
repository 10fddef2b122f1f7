"""`CudaResolver`: the resolver contract on an NVIDIA GPU."""

from collections.abc import Sequence

import torch

from hisparse.errors import InputError
from hisparse.kernels.contract import BlockTables, HotState, MissPlan, PagedRows, ResolverCounters, Selection
from hisparse.kernels.cuda import driver, ops
from hisparse.kernels.cuda.arguments import MAX_LAYERS
from hisparse.kernels.cuda.checks import check_resolve, check_rows, check_tensors, plan_tensors
from hisparse.kernels.cuda.parameters import MAX_ROWS


class CudaResolver:
    """`kernels.contract.Resolver` for tensors on one CUDA device. Host rows lie in pinned memory.

    Every method only launches: one kernel on torch's current stream, no wait, no read-back; the output comes from
    torch's caching allocator. Calls can be captured in a CUDA graph once each was made before with rows of the same
    size (the first one compiles). `resolve` serves one stream at a time, because its launches share scratch memory;
    the other methods may run on any stream beside it.

    A request may have 8 rows in one call of `resolve`. With more it may be told, by -1 and `STATUS_UNION_OVERFLOW`,
    that its union is too large although its hot rows would take it.

    Every method raises `InputError` for tensors that a kernel cannot take.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        """Raises `BackendError` when the device, its driver or the compiler is missing or too old."""
        driver.device_limits(torch.device(device).index or 0)
        self.device = torch.empty(0, device=device).device
        self._scratch = torch.zeros(MAX_ROWS, dtype=torch.int32, device=self.device)

    def resolve(
        self,
        selection: Selection,
        tables: BlockTables,
        state: HotState,
        source: PagedRows,
        destination: PagedRows,
        plan: MissPlan,
        counters: ResolverCounters,
    ) -> torch.Tensor:
        """Plan and copy for a leader. Returns int32 `[num_rows, topk]` physical rows; overwrites `plan`."""
        self._check_device("positions", selection.positions)
        check_resolve(selection, tables, state, plan, counters)
        check_rows(source, destination, self.device)
        out = torch.empty_like(selection.positions)
        ops.resolve(
            out,
            [selection.positions, selection.row_slot],
            [tables.resident, tables.host, tables.hot],
            [state.position_of, state.hot_row_of, state.stamp, state.step, state.queue, state.queue_state],
            source.storage,
            destination.storage,
            [plan.count, plan.host_row, plan.slab_row],
            [counters.totals, counters.status],
            self._scratch,
            ops.layout_numbers(source.layout) + ops.layout_numbers(destination.layout),
            selection.leased,
        )
        return out

    def replay_plan(
        self,
        plan: MissPlan,
        sources: Sequence[PagedRows],
        destinations: Sequence[PagedRows],
        counters: ResolverCounters,
    ) -> None:
        """Make the leader's copies for all its followers, in one launch per 16 of them.

        `sources[i]` and `destinations[i]` are one follower's rows; all of them share one host and one slab allocation.
        """
        self._check_device("the plan's host_row", plan.host_row)
        check_tensors(plan_tensors(plan), self.device)
        for source, destination in zip(sources, destinations, strict=True):
            check_rows(source, destination, self.device)
        _check_shared(sources)
        _check_shared(destinations)
        for first in range(0, len(sources), MAX_LAYERS):
            pairs = zip(sources[first : first + MAX_LAYERS], destinations[first : first + MAX_LAYERS], strict=True)
            layouts = [number for pair in pairs for rows in pair for number in ops.layout_numbers(rows.layout)]
            ops.move_rows(
                plan.host_row,
                plan.slab_row,
                plan.count,
                sources[0].storage,
                destinations[0].storage,
                layouts,
                counters.totals,
            )

    def gather_rows(
        self, host_row: torch.Tensor, slab_row: torch.Tensor, source: PagedRows, destination: PagedRows
    ) -> None:
        """Copy host rows to slab rows: int64 `[n]` each; a pair with a -1 is skipped. Serves prefill staging."""
        self._move(host_row, slab_row, source, destination)

    def mirror_rows(
        self, slab_row: torch.Tensor, host_row: torch.Tensor, source: PagedRows, destination: PagedRows
    ) -> None:
        """Copy rows of the slab (`source`) to host rows (`destination`): int64 `[n]` each; -1 pairs are skipped."""
        self._move(slab_row, host_row, source, destination)

    def reset_slots(self, state: HotState, slots: torch.Tensor) -> None:
        """Forget the hot rows of `slots` (int64 `[n]`)."""
        self._check_device("slots", slots)
        expected = (
            ("position_of", state.position_of, torch.int32, (-1, -1)),
            ("queue_state", state.queue_state, torch.int32, (state.position_of.shape[0], 4)),
            ("slots", slots, torch.int64, (-1,)),
        )
        check_tensors(expected, self.device)
        ops.reset_slots(state.position_of, state.queue_state, slots)

    def _move(
        self, source_row: torch.Tensor, destination_row: torch.Tensor, source: PagedRows, destination: PagedRows
    ) -> None:
        self._check_device("the source rows", source_row)
        expected = (
            ("the source rows", source_row, torch.int64, (-1,)),
            ("the destination rows", destination_row, torch.int64, (source_row.numel(),)),
        )
        check_tensors(expected, self.device)
        check_rows(source, destination, self.device)
        layouts = ops.layout_numbers(source.layout) + ops.layout_numbers(destination.layout)
        ops.move_rows(source_row, destination_row, None, source.storage, destination.storage, layouts, None)

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self.device:
            raise InputError(f"{name} is on {tensor.device}; this resolver serves {self.device}")


def _check_shared(rows: Sequence[PagedRows]) -> None:
    for other in rows[1:]:
        if other.storage.data_ptr() != rows[0].storage.data_ptr():
            raise InputError("the layers of one replay lie in different allocations: replay them one at a time")
        if other.layout.row_bytes != rows[0].layout.row_bytes:
            raise InputError("the layers of one replay have rows of different size: replay them one at a time")
