"""HiSparseConnector: carries residency commands to the workers and their reports back."""

from dataclasses import dataclass

from hisparse.cache.table_log import TableLog
from hisparse.connector.base import ConnectorMetadata, ConnectorRole, ConnectorWorkerMetadata, KVConnector
from hisparse.errors import InvariantError, ProtocolError
from hisparse.protocol import SparseKVOffloadCommand, SparseKVWorkerReport
from hisparse.residency import HiSparseCoordinator
from hisparse.worker import HiSparseWorker


@dataclass(frozen=True, slots=True)
class HiSparseMetadata(ConnectorMetadata):
    """One step's command on its way to the workers."""

    command: SparseKVOffloadCommand


@dataclass(frozen=True, slots=True)
class HiSparseWorkerMetadata(ConnectorWorkerMetadata):
    """One worker's report on its way to the coordinator."""

    report: SparseKVWorkerReport


class HiSparseConnector(KVConnector):
    """Carries residency commands to the workers and their reports back: what a step loop calls, ours or another.

    One connector per role; build it with `for_scheduler` or `for_worker`. The scheduler's turns what the coordinator
    and the managers decided into one command a step (`build_connector_meta`) and gives the coordinator every worker's
    report (`update_connector_output`). A worker's binds the command, has it carried out before the forward
    (`start_load_kv`) and reports after it (`build_connector_worker_meta`); unbind it before the next step.

    Raises `ProtocolError` for metadata of another connector, a step bound while another is or none, and for what the
    coordinator or the worker finds out of order; `InvariantError` when a method of the other role is called.
    """

    def __init__(
        self,
        role: ConnectorRole,
        scheduler: tuple[HiSparseCoordinator, TableLog] | None = None,
        worker: HiSparseWorker | None = None,
    ) -> None:
        super().__init__(role)
        self._scheduler = scheduler
        self._worker = worker
        self._bound: SparseKVOffloadCommand | None = None

    @classmethod
    def for_scheduler(cls, coordinator: HiSparseCoordinator, log: TableLog) -> "HiSparseConnector":
        """The role that drains `coordinator`'s transfers and `log`'s table updates into commands."""
        return cls(ConnectorRole.SCHEDULER, scheduler=(coordinator, log))

    @classmethod
    def for_worker(cls, worker: HiSparseWorker) -> "HiSparseConnector":
        """The role that has `worker` carry the commands out. The connector closes the worker at shutdown."""
        return cls(ConnectorRole.WORKER, worker=worker)

    def build_connector_meta(self, step: int) -> HiSparseMetadata:
        coordinator, log = self._scheduler_side()
        resets, updates = log.drain()
        return HiSparseMetadata(SparseKVOffloadCommand(step, coordinator.take_transfers(), resets, updates))

    def update_connector_output(self, meta: ConnectorWorkerMetadata) -> None:
        coordinator, _ = self._scheduler_side()
        if not isinstance(meta, HiSparseWorkerMetadata):
            raise ProtocolError(f"HiSparseConnector was given a {type(meta).__name__}, the report of another connector")
        coordinator.apply(meta.report)

    def bind_connector_metadata(self, meta: ConnectorMetadata) -> None:
        self._worker_side()
        if not isinstance(meta, HiSparseMetadata):
            raise ProtocolError(f"HiSparseConnector was given a {type(meta).__name__}, metadata of another connector")
        if self._bound is not None:
            raise ProtocolError(f"step {meta.command.step} was bound while step {self._bound.step} still is")
        self._bound = meta.command

    def start_load_kv(self) -> None:
        self._worker_side().start_step(self._command())

    def wait_for_save(self) -> None:
        """Nothing to wait for: stream order keeps the next step's writes behind this step's copies."""
        self._command()

    def build_connector_worker_meta(self) -> HiSparseWorkerMetadata:
        self._command()
        return HiSparseWorkerMetadata(self._worker_side().finish_step())

    def clear_connector_metadata(self) -> None:
        self._bound = None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _command(self) -> SparseKVOffloadCommand:
        self._worker_side()
        if self._bound is None:
            raise ProtocolError("no step is bound: bind_connector_metadata comes first")
        return self._bound

    def _scheduler_side(self) -> tuple[HiSparseCoordinator, TableLog]:
        if self._scheduler is None:
            raise InvariantError("this HiSparseConnector has the worker role; the scheduler's side was called")
        return self._scheduler

    def _worker_side(self) -> HiSparseWorker:
        if self._worker is None:
            raise InvariantError("this HiSparseConnector has the scheduler role; the worker's side was called")
        return self._worker
