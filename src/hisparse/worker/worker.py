"""HiSparseWorker: one rank's side of the residency protocol, and owner of its memory."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

import torch

from hisparse.config import CachePlan
from hisparse.errors import InvariantError, ProtocolError
from hisparse.kernels.contract import HotState, MissPlan, ResolverCounters
from hisparse.protocol import DeviceBlockId, SparseKVOffloadCommand, SparseKVWorkerReport
from hisparse.worker.backend import Backend, CpuBackend
from hisparse.worker.device import IndexerStore, Slab
from hisparse.worker.handle import HandleContext, HiSparseCacheHandle, StagingCounters
from hisparse.worker.host_pool import HostPool
from hisparse.worker.runtime import CacheViews, FollowerRuntime, LeaderRuntime, ResolveContext
from hisparse.worker.shared_pool import PoolSharing
from hisparse.worker.staging import StagingArea
from hisparse.worker.tables import WorkerTables
from hisparse.worker.transfers import TransferEngine
from hisparse.worker.upload import upload


class HiSparseWorker:
    """Carries out one command a step and reports what it saw. Close it, or use it as a context manager.

    A step is `start_step` → forward, through `handles` and `indexer` → `finish_step`. It never allocates or frees a
    logical block: which block is whose comes with the commands.

    `handles[layer]` is the cache of a layer of the model, a `HiSparseCacheHandle`, through which the forward writes,
    resolves and reads KV rows. `indexer` holds the index keys, which are counted by leaders and not by layers.
    `tables` are the block tables, int32 `[max_running, pages]` each, as of the last `start_step`: read them to find
    where a slot's rows lie (`tables.physical_rows`); only commands change them. All three stay the same objects for the
    worker's life.
    """

    def __init__(
        self,
        plan: CachePlan,
        staging: Sequence[DeviceBlockId],
        *,
        rank: int = 0,
        backend: Backend | None = None,
        sharing: PoolSharing | None = None,
    ) -> None:
        """`staging`: the slab blocks that the scheduler leased for prefill staging, for the worker's whole life.

        `sharing`: this rank's part in a host pool that all ranks of the node share; None gives it one for itself.

        Raises `BackendError` when memory cannot be had, and gives back what it had by then; `InvariantError` for a
        staging lease that is not the plan's.
        """
        if len(staging) != plan.staging_blocks or max(staging, default=0) >= plan.num_device_blocks:
            raise InvariantError(
                f"staging blocks {tuple(staging)} are not a lease of {plan.staging_blocks} slab blocks"
            )
        backend = backend if backend is not None else CpuBackend()
        self.plan = plan
        self.rank = rank
        self._stream = backend.make_stream()
        self._step: int | None = None
        self._in_step = False
        self._closed = False
        with ExitStack() as undo:
            allocate_host = backend.allocate_host if sharing is None else sharing.allocate_host
            self.host_pool = HostPool(plan.host, plan.num_host_blocks, allocate_host)
            undo.callback(self.host_pool.close)
            self.slab = Slab(plan, backend.allocate_device)
            self.indexer = IndexerStore(plan, backend.allocate_device)
            self.tables = WorkerTables(plan, backend.device)
            self._resolve_counters = ResolverCounters.allocate(backend.device)
            self._staging_counters = StagingCounters()
            resolve_context = ResolveContext(
                backend.make_resolver(),
                backend.make_side_stream(),
                self.tables.block_tables(),
                self._resolve_counters,
            )
            area = StagingArea(staging, plan.config.block_size, backend.device)
            runtimes = self._make_runtimes(resolve_context, backend.device)
            self._leaders = tuple(runtime for runtime in runtimes if isinstance(runtime, LeaderRuntime))
            handle_context = HandleContext(plan.model.row, self._stream, area, self._staging_counters)
            self.handles = tuple(HiSparseCacheHandle(runtime, handle_context) for runtime in runtimes)
            self.transfers = TransferEngine(
                self._stream,
                self.slab.pages(),
                self.host_pool.pages(),
                plan.device,
                None if sharing is None else sharing.host_writes(self._stream),
            )
            undo.pop_all()

    def start_step(self, command: SparseKVOffloadCommand) -> None:
        """Put the command's transfers in the stream, then apply its resets and updates to the tables.

        Raises `ProtocolError` for a step that is not after the last one, one that starts before the last finished,
        and whatever `TransferEngine.enqueue` and `WorkerTables.apply` find wrong.
        """
        self._check_open()
        if self._in_step:
            raise ProtocolError(f"step {command.step} started before step {self._step} finished")
        if self._step is not None and command.step <= self._step:
            raise ProtocolError(f"step {command.step} came after step {self._step}")
        self._step = command.step
        self._in_step = True
        self._stream.begin_step()
        if command.is_empty:
            return
        self.transfers.enqueue(command.transfers)
        forgotten = self.tables.apply(command.resets, command.updates)
        if forgotten:
            slots = upload(forgotten, torch.int64, self.tables.device)
            for leader in self._leaders:
                leader.forget(slots)

    def finish_step(self) -> SparseKVWorkerReport:
        """What was enqueued and what was seen to complete since the last report.

        Raises `ProtocolError` when no step was started, and `InvariantError` when a follower did not load what its
        leader resolved.
        """
        self._check_open()
        if not self._in_step:
            raise ProtocolError(f"no step to finish: the last one started was {self._step}")
        for leader in self._leaders:
            leader.assert_followed()
        self._in_step = False
        return SparseKVWorkerReport(self.rank, self.transfers.take_enqueued(), self.transfers.poll())

    def order_before_compute(self) -> None:
        """Whatever is done to device blocks in the current stream after this call sees every copy of earlier steps.

        Forward passes see to it themselves; this is for others who read and write pages, such as the offload path.
        """
        self._check_open()
        self._stream.order_before_compute()

    def wait_host_writes(self) -> None:
        """Block until every page that was enqueued for the host so far has landed there."""
        self._check_open()
        self.transfers.wait_host_writes()

    def counters(self) -> dict[str, int]:
        """Totals since the start, resolved and staged rows together. Waits for the device.

        `resident`, `hot`, `miss`, `unreachable` as resolvers count them; `bytes` loaded from the host row by row;
        `host_to_device_bytes` are those and the pages restored, `device_to_host_bytes` the pages spilled. `status`
        is the resolver's sticky word. All bytes are payload.
        """
        totals = self._resolve_counters.read()
        for name in totals:
            totals[name] += getattr(self._staging_counters, name)
        totals["host_to_device_bytes"] = totals["bytes"] + self.transfers.host_to_device_bytes
        totals["device_to_host_bytes"] = self.transfers.device_to_host_bytes
        totals["status"] = int(self._resolve_counters.status)
        return totals

    def close(self) -> None:
        """Wait for copies in flight, then give all memory back. Handles raise from here on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._stream.synchronize()
        finally:
            self.host_pool.close()
            self.slab.close()
            self.indexer.close()

    def __enter__(self) -> "HiSparseWorker":
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_runtimes(
        self, context: ResolveContext, device: torch.device
    ) -> tuple[LeaderRuntime | FollowerRuntime, ...]:
        """One runtime a layer, in order. A leader stands before its followers."""
        config, leader_of = self.plan.config, self.plan.model.leader_of
        views = [CacheViews(self.host_pool.layer(layer), self.slab.layer(layer)) for layer in range(len(leader_of))]
        leaders: dict[int, LeaderRuntime] = {}
        runtimes: list[LeaderRuntime | FollowerRuntime] = []
        for layer, leader in enumerate(leader_of):
            if leader == layer:
                state = HotState.allocate(config.max_running, config.hot_rows, config.max_tokens, device)
                plan = MissPlan.allocate(config.max_running, config.hot_rows, device)
                followers = {other: views[other] for other, of in enumerate(leader_of) if of == layer != other}
                leaders[layer] = LeaderRuntime(layer, views[layer], context, state, plan, followers)
                runtimes.append(leaders[layer])
            else:
                runtimes.append(FollowerRuntime(layer, views[layer], context, leaders[leader]))
        return tuple(runtimes)

    def _check_open(self) -> None:
        if self._closed:
            raise InvariantError(f"worker {self.rank} was closed")
