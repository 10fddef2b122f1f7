"""MultiConnector: several connectors as one. Each child hears what its other half said, and nothing else."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hisparse.connector.base import ConnectorMetadata, ConnectorRole, ConnectorWorkerMetadata, KVConnector
from hisparse.errors import InvariantError, ProtocolError


@dataclass(frozen=True, slots=True)
class MultiMetadata(ConnectorMetadata):
    """One step's metadata of every child, by the child's place."""

    children: tuple[ConnectorMetadata, ...]


@dataclass(frozen=True, slots=True)
class MultiWorkerMetadata(ConnectorWorkerMetadata):
    """One worker's answers of every child, by the child's place."""

    children: tuple[ConnectorWorkerMetadata, ...]


class MultiConnector(KVConnector):
    """Drives children of one role, in order; both roles are given the same kinds of children in the same order.

    The order matters to workers: HiSparse's connector first, because it brings tables and page copies up to date.
    """

    def __init__(self, children: Sequence[KVConnector]) -> None:
        """Raises `InvariantError` without children, or when their roles differ."""
        if not children or len({child.role for child in children}) != 1:
            raise InvariantError(f"children have the roles {[child.role.value for child in children]}, not one")
        super().__init__(children[0].role)
        self.children = tuple(children)

    def build_connector_meta(self, step: int) -> MultiMetadata:
        self._require(ConnectorRole.SCHEDULER)
        return MultiMetadata(tuple(child.build_connector_meta(step) for child in self.children))

    def update_connector_output(self, meta: ConnectorWorkerMetadata) -> None:
        self._require(ConnectorRole.SCHEDULER)
        if not isinstance(meta, MultiWorkerMetadata) or len(meta.children) != len(self.children):
            raise ProtocolError(f"MultiConnector of {len(self.children)} children was given {_described(meta)}")
        for child, part in zip(self.children, meta.children, strict=True):
            child.update_connector_output(part)

    def bind_connector_metadata(self, meta: ConnectorMetadata) -> None:
        self._require(ConnectorRole.WORKER)
        if not isinstance(meta, MultiMetadata) or len(meta.children) != len(self.children):
            raise ProtocolError(f"MultiConnector of {len(self.children)} children was given {_described(meta)}")
        with ExitStack() as undo:
            for child, part in zip(self.children, meta.children, strict=True):
                child.bind_connector_metadata(part)
                # A step is bound at all children or at none: one that refuses does not leave the others with it.
                undo.callback(child.clear_connector_metadata)
            undo.pop_all()

    def start_load_kv(self) -> None:
        self._require(ConnectorRole.WORKER)
        for child in self.children:
            child.start_load_kv()

    def wait_for_save(self) -> None:
        self._require(ConnectorRole.WORKER)
        for child in self.children:
            child.wait_for_save()

    def build_connector_worker_meta(self) -> MultiWorkerMetadata:
        self._require(ConnectorRole.WORKER)
        return MultiWorkerMetadata(tuple(child.build_connector_worker_meta() for child in self.children))

    def clear_connector_metadata(self) -> None:
        for child in self.children:
            child.clear_connector_metadata()

    def shutdown(self) -> None:
        """Every child, the last one first, whatever the others raise."""
        with ExitStack() as all_of_them:
            for child in self.children:
                all_of_them.callback(child.shutdown)

    def _require(self, role: ConnectorRole) -> None:
        if self.role is not role:
            raise InvariantError(f"this MultiConnector has the {self.role.value} role; the {role.value}'s was called")


def _described(meta: ConnectorMetadata | ConnectorWorkerMetadata) -> str:
    if isinstance(meta, MultiMetadata | MultiWorkerMetadata):
        return f"a {type(meta).__name__} for {len(meta.children)}"
    return f"a {type(meta).__name__}"
