"""OffloadingConnector: carries copies between pages and region to the workers, and their reports back."""

from typing import Protocol

from hisparse.cache.groups import GroupKind
from hisparse.connector.base import ConnectorMetadata, ConnectorRole, ConnectorWorkerMetadata, KVConnector
from hisparse.connector.offloading_messages import OffloadingMetadata, OffloadingWorkerMetadata, RegionCopies
from hisparse.connector.offloading_source import OffloadingSource
from hisparse.errors import InvariantError, ProtocolError
from hisparse.offload.messages import OffloadReport

CLOSE_SECONDS = 30.0
"""What the scheduler's role waits, at its shutdown, for what is on its way to files."""


class CopyWorker(Protocol):
    """What the worker's role drives: `OffloadingWorker`."""

    def start(self, copies: tuple[RegionCopies, ...]) -> None: ...

    def take_reports(self) -> tuple[tuple[GroupKind, OffloadReport], ...]: ...

    def close(self) -> None: ...


class OffloadingConnector(KVConnector):
    """Build one with `for_scheduler` or `for_worker`. Workers start its copies behind HiSparse's of the same step."""

    def __init__(
        self, role: ConnectorRole, source: OffloadingSource | None = None, worker: CopyWorker | None = None
    ) -> None:
        super().__init__(role)
        self._source = source
        self._worker = worker
        self._bound: OffloadingMetadata | None = None
        self._is_shut_down = False

    @classmethod
    def for_scheduler(cls, source: OffloadingSource) -> "OffloadingConnector":
        """The role that drains the copies which `source` has planned. The connector closes it at shutdown."""
        return cls(ConnectorRole.SCHEDULER, source=source)

    @classmethod
    def for_worker(cls, worker: CopyWorker) -> "OffloadingConnector":
        """The role that has `worker` copy. The connector closes it at shutdown."""
        return cls(ConnectorRole.WORKER, worker=worker)

    @property
    def source(self) -> OffloadingSource:
        """The prefix source that the scheduler asks. Raises `InvariantError` in the worker's role."""
        if self._source is None:
            raise InvariantError("this OffloadingConnector has the worker role; the scheduler's side was called")
        return self._source

    def build_connector_meta(self, step: int) -> OffloadingMetadata:
        return OffloadingMetadata(step, self.source.take_copies())

    def update_connector_output(self, meta: ConnectorWorkerMetadata) -> None:
        source = self.source
        if not isinstance(meta, OffloadingWorkerMetadata):
            raise ProtocolError(f"OffloadingConnector was given a {type(meta).__name__}, the report of another")
        for group, report in meta.reports:
            source.report(group, report)

    def bind_connector_metadata(self, meta: ConnectorMetadata) -> None:
        self._worker_side()
        if not isinstance(meta, OffloadingMetadata):
            raise ProtocolError(f"OffloadingConnector was given a {type(meta).__name__}, metadata of another connector")
        if self._bound is not None:
            raise ProtocolError(f"step {meta.step} was bound while step {self._bound.step} still is")
        self._bound = meta

    def start_load_kv(self) -> None:
        self._worker_side().start(self._metadata().copies)

    def wait_for_save(self) -> None:
        """Nothing to wait for: blocks stay leased until their copies have been seen to be done."""
        self._metadata()

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata:
        self._metadata()
        return OffloadingWorkerMetadata(self._worker_side().take_reports())

    def clear_connector_metadata(self) -> None:
        self._bound = None

    def shutdown(self) -> None:
        """Scheduler: what is worth keeping goes to files, for `CLOSE_SECONDS` at most. Worker: the regions go back.

        The scheduler's role comes first, since its file tier reads the region.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._source is not None:
            self._source.close(CLOSE_SECONDS)
        if self._worker is not None:
            self._worker.close()

    def _metadata(self) -> OffloadingMetadata:
        self._worker_side()
        if self._bound is None:
            raise ProtocolError("no step is bound: bind_connector_metadata comes first")
        return self._bound

    def _worker_side(self) -> CopyWorker:
        if self._worker is None:
            raise InvariantError("this OffloadingConnector has the scheduler role; the worker's side was called")
        return self._worker
