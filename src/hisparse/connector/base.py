"""The life cycle that every connector follows, on both sides of the scheduler/worker line.

Scheduler, once a step:   build_connector_meta ──────────────┐            ┌── update_connector_output
Worker, once a step:      bind_connector_metadata → start_load_kv → (forward) → wait_for_save → build_worker_meta
                                                                                 → clear_connector_metadata

The names are those of vLLM's `KVConnectorBase_V1`, so that an adapter only forwards calls.
"""

from abc import ABC, abstractmethod
from enum import Enum


class ConnectorRole(Enum):
    """The side of the line on which a connector object stands. It never changes."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class ConnectorMetadata:
    """What a connector's scheduler role sends to its worker role. Opaque to everybody else."""


class ConnectorWorkerMetadata:
    """What a connector's worker role answers. Opaque to everybody else."""


class KVConnector(ABC):
    """One connector in one role. Calls of the other role raise `InvariantError`."""

    def __init__(self, role: ConnectorRole) -> None:
        self.role = role

    # Scheduler role.

    @abstractmethod
    def build_connector_meta(self, step: int) -> ConnectorMetadata:
        """What the workers are to do in `step`. Drains what the scheduler's side has planned."""

    @abstractmethod
    def update_connector_output(self, meta: ConnectorWorkerMetadata) -> None:
        """Take one worker's answer to a step."""

    # Worker role.

    @abstractmethod
    def bind_connector_metadata(self, meta: ConnectorMetadata) -> None:
        """Hold the step's metadata. Every bind is followed by a clear."""

    @abstractmethod
    def start_load_kv(self) -> None:
        """Begin the step's transfers and bring the tables up to date. Call before the forward pass."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Called after the forward pass; returns when the step's writes are safe from the next step's."""

    @abstractmethod
    def build_connector_worker_meta(self) -> ConnectorWorkerMetadata:
        """The worker's report on this step and on transfers of earlier ones."""

    @abstractmethod
    def clear_connector_metadata(self) -> None:
        """Forget the step's metadata."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give back what the role holds. Idempotent."""
