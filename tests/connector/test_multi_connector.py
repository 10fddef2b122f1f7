"""Several connectors as one: each child hears its own half, in order, whatever the others do."""

from dataclasses import dataclass

import pytest

from hisparse.connector import (
    ConnectorMetadata,
    ConnectorRole,
    ConnectorWorkerMetadata,
    KVConnector,
    MultiConnector,
    MultiMetadata,
    MultiWorkerMetadata,
)
from hisparse.errors import InvariantError, ProtocolError


@dataclass(frozen=True)
class Said(ConnectorMetadata):
    by: str
    step: int


@dataclass(frozen=True)
class Answered(ConnectorWorkerMetadata):
    by: str


class Child(KVConnector):
    """Says who it is, and writes down what it hears in a list that all children share."""

    def __init__(self, name: str, role: ConnectorRole, heard: list[str]) -> None:
        super().__init__(role)
        self.name, self.heard = name, heard
        self.bound: Said | None = None

    def build_connector_meta(self, step: int) -> Said:
        return Said(self.name, step)

    def update_connector_output(self, meta: ConnectorWorkerMetadata) -> None:
        if not isinstance(meta, Answered) or meta.by != self.name:
            raise ProtocolError(f"{self.name} was given {meta}")
        self.heard.append(f"{self.name} hears {meta.by}")

    def bind_connector_metadata(self, meta: ConnectorMetadata) -> None:
        if not isinstance(meta, Said) or meta.by != self.name:
            raise ProtocolError(f"{self.name} was given {meta}")
        self.bound = meta

    def start_load_kv(self) -> None:
        self.heard.append(f"{self.name} starts")

    def wait_for_save(self) -> None:
        self.heard.append(f"{self.name} waits")

    def build_connector_worker_meta(self) -> Answered:
        return Answered(self.name)

    def clear_connector_metadata(self) -> None:
        self.bound = None

    def shutdown(self) -> None:
        self.heard.append(f"{self.name} ends")


def make(role: ConnectorRole, *names: str) -> tuple[MultiConnector, list[str]]:
    heard: list[str] = []
    return MultiConnector([Child(name, role, heard) for name in names]), heard


SCHEDULER, WORKER = ConnectorRole.SCHEDULER, ConnectorRole.WORKER


def test_every_child_hears_what_its_other_half_said() -> None:
    scheduler, heard_back = make(SCHEDULER, "a", "b")
    worker, heard = make(WORKER, "a", "b")
    meta = scheduler.build_connector_meta(3)
    assert meta.children == (Said("a", 3), Said("b", 3))
    worker.bind_connector_metadata(meta)
    worker.start_load_kv()
    worker.wait_for_save()
    scheduler.update_connector_output(worker.build_connector_worker_meta())
    worker.clear_connector_metadata()
    assert heard == ["a starts", "b starts", "a waits", "b waits"]
    assert heard_back == ["a hears a", "b hears b"]
    assert all(child.bound is None for child in worker.children if isinstance(child, Child))


def test_messages_of_other_children_or_of_another_number_of_them_are_refused() -> None:
    scheduler, _ = make(SCHEDULER, "a", "b")
    worker, _ = make(WORKER, "a", "b")
    for meta, said in (
        (MultiMetadata((Said("a", 1),)), "2 children was given a MultiMetadata for 1"),
        (Said("a", 1), "2 children was given a Said"),
    ):
        with pytest.raises(ProtocolError, match=said):
            worker.bind_connector_metadata(meta)
    with pytest.raises(ProtocolError, match="b was given"):
        worker.bind_connector_metadata(MultiMetadata((Said("a", 1), Said("c", 1))))
    assert all(child.bound is None for child in worker.children if isinstance(child, Child))
    with pytest.raises(ProtocolError, match="2 children was given a Answered"):
        scheduler.update_connector_output(Answered("a"))
    with pytest.raises(ProtocolError, match="a was given"):
        scheduler.update_connector_output(MultiWorkerMetadata((Answered("b"), Answered("a"))))


def test_children_have_one_role_and_calls_of_the_other_are_refused() -> None:
    with pytest.raises(InvariantError, match="not one"):
        MultiConnector([])
    with pytest.raises(InvariantError, match="scheduler', 'worker"):
        MultiConnector([Child("a", SCHEDULER, []), Child("b", WORKER, [])])
    scheduler, _ = make(SCHEDULER, "a")
    worker, _ = make(WORKER, "a")
    assert (scheduler.role, worker.role) == (SCHEDULER, WORKER)
    for call in (
        lambda: worker.build_connector_meta(1),
        lambda: worker.update_connector_output(MultiWorkerMetadata(())),
        lambda: scheduler.bind_connector_metadata(MultiMetadata(())),
        scheduler.start_load_kv,
        scheduler.wait_for_save,
        scheduler.build_connector_worker_meta,
    ):
        with pytest.raises(InvariantError, match="role; the"):
            call()


def test_all_children_are_shut_down_the_last_one_first_even_if_one_fails() -> None:
    class Broken(Child):
        def shutdown(self) -> None:
            super().shutdown()
            raise RuntimeError("broken")

    heard: list[str] = []
    children = [Child("a", WORKER, heard), Broken("b", WORKER, heard), Child("c", WORKER, heard)]
    with pytest.raises(RuntimeError, match="broken"):
        MultiConnector(children).shutdown()
    assert heard == ["c ends", "b ends", "a ends"]
