"""HiSparseCacheHandle: what attention sees of one layer's cache, wherever its rows are."""

from dataclasses import dataclass

import torch

from hisparse.errors import InvariantError
from hisparse.geometry import RowFormat
from hisparse.kernels import fp8_rows
from hisparse.kernels.contract import Selection
from hisparse.kernels.triton_ops import require_triton
from hisparse.worker.runtime import FollowerRuntime, LeaderRuntime
from hisparse.worker.staging import StagePlan, StagingArea
from hisparse.worker.stream import CopyStream
from hisparse.worker.views import PagedCacheView, row_dtype


@dataclass(slots=True)
class StagingCounters:
    """Prefill selections since the start, under the names that resolvers count by. Changed by handles alone.

    Rows count once, for leaders; `bytes` count for every layer that loads.
    """

    resident: int = 0
    hot: int = 0
    miss: int = 0
    bytes: int = 0
    unreachable: int = 0

    def add_rows(self, plan: StagePlan) -> None:
        """Count the selections of one pass of a leader."""
        self.resident += plan.num_resident
        self.hot += plan.num_shared
        self.miss += plan.num_loaded
        self.unreachable += plan.num_unreachable


@dataclass(frozen=True, slots=True)
class HandleContext:
    """What all handles of a worker share."""

    row: RowFormat
    stream: CopyStream
    staging: StagingArea
    counters: StagingCounters


class HiSparseCacheHandle:
    """One layer's cache. Rows are physical rows of the slab; every access comes behind the step's copies.

    In a step: `write` the new rows first; then decode rows through `resolve` (a leader) or `load_followed` (a
    follower), prefill rows through `stage`, pass by pass; then `gather`.
    """

    def __init__(self, runtime: LeaderRuntime | FollowerRuntime, context: HandleContext) -> None:
        self._runtime = runtime
        self._context = context
        self._dtype = row_dtype(context.row)
        self._is_packed = context.row.name == fp8_rows.FORMAT

    @property
    def layer(self) -> int:
        """The layer's number in the model."""
        return self._runtime.layer

    @property
    def runtime(self) -> LeaderRuntime | FollowerRuntime:
        """The state behind the handle, for tests and tools."""
        return self._runtime

    @property
    def slab(self) -> PagedCacheView:
        """The layer's rows in the slab, for kernels that read resolved rows in place."""
        return self._runtime.views.slab

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens: `values` `[t, elems]` in the dtype of the rows into rows `[t]`.

        Packed rows take numbers of any float dtype, `[t, 576]`, which are packed here, or uint8 rows that are packed
        already. Raises `InvariantError` for another dtype or width and for a row that is no place to write,
        `InputError` for numbers of a width that the packed format does not have.
        """
        if self._is_packed and values.is_floating_point():
            self._context.stream.order_before_compute()
            _pack(self._runtime.views.slab, rows, values)
            return
        if values.dtype != self._dtype:
            raise InvariantError(f"layer {self.layer} stores {self._dtype} elements, not {values.dtype}")
        self._context.stream.order_before_compute()
        self._runtime.views.slab.write(rows, values)

    def resolve(self, selection: Selection) -> torch.Tensor:
        """Bring the selected rows of decode tokens into the slab: int32 `[n, topk]` physical rows, -1 for none.

        Raises `InvariantError` on a follower, which has no selection of its own, and when a follower of this layer
        did not load what was resolved before.
        """
        if not isinstance(self._runtime, LeaderRuntime):
            raise InvariantError(f"layer {self.layer} follows layer {self._runtime.leader.layer} and cannot resolve")
        self._context.stream.order_before_compute()
        return self._runtime.resolve(selection)

    def load_followed(self) -> None:
        """This follower's bytes for the rows that its leader resolved last are there for what is computed from now on.

        They are on their way since that `resolve`. Once per `resolve`; more is free. Raises `InvariantError` on a
        leader.
        """
        if not isinstance(self._runtime, FollowerRuntime):
            raise InvariantError(f"layer {self.layer} is a leader and follows nobody")
        self._context.stream.order_before_compute()
        self._runtime.join()

    def stage(self, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Bring the next pass of a prefill into reach: int32 `[n, topk]` physical rows of the first n rows, 1 ≤ n ≤ t.

        `positions`: `[t, topk]`, -1 for none; `slots`: `[t]`, -1 for padding. n is as many rows as find their host
        rows in the staging blocks together; the caller stages the others next. Resident rows are read in place; rows
        on the host are copied, each once, to the staging blocks, where they stay until this layer's next `stage`.
        A position that is in neither place gives -1 and is counted as unreachable. Raises `InvariantError` for a
        row that selects more host rows than the staging blocks hold.
        """
        self._context.stream.order_before_compute()
        plan = self._context.staging.plan(positions, slots, self._runtime.context.tables)
        if plan.num_loaded:
            self._runtime.load(plan.host_row, plan.slab_row)
        counters = self._context.counters
        counters.bytes += plan.num_loaded * self._context.row.row_bytes
        if isinstance(self._runtime, LeaderRuntime):
            counters.add_rows(plan)
        return plan.rows

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Copies of rows `[...]` as `[..., elems]`, in the rows' dtype or, packed ones, in float32; -1 gives zeros."""
        self._context.stream.order_before_compute()
        values = self._runtime.views.slab.read(rows, self._dtype)
        if not self._is_packed:
            return values
        return fp8_rows.unpack_rows(values.reshape(-1, fp8_rows.ROW_BYTES)).view(*rows.shape, fp8_rows.WIDTH)


def _pack(slab: PagedCacheView, rows: torch.Tensor, values: torch.Tensor) -> None:
    if slab.storage.device.type != "cuda":
        slab.write(rows, fp8_rows.pack_rows(values))
        return
    require_triton()
    # Loaded where it is used: importing it imports triton, which is there only beside a GPU.
    from hisparse.kernels.triton_ops.fp8_write import write_packed_rows

    write_packed_rows(slab, rows, values)
