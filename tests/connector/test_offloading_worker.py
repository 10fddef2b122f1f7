"""The worker's side of offloading: what it reports, in which order, and what it does when a copy cannot be made."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from hisparse.cache.groups import GroupKind
from hisparse.connector import (
    ConnectorMetadata,
    ConnectorWorkerMetadata,
    OffloadingConnector,
    OffloadingMetadata,
    OffloadingWorker,
    OffloadingWorkerMetadata,
    RegionCopies,
)
from hisparse.connector.offloading_messages import NOT_WANTED
from hisparse.errors import BackendError, InvariantError, ProtocolError
from hisparse.offload.messages import OffloadReport, TransferKind
from hisparse.offload.transfer import PageBatch
from hisparse.protocol import TransferId
from tests.connector.offloading_world import BOTH, INDEXER, RESIDENT, OffloadingWorld

STORE, LOAD = TransferKind.STORE, TransferKind.LOAD


class Event:
    def __init__(self) -> None:
        self.is_done = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self.num_waits += 1


class Machine:
    """Copies of both groups: writes down what is asked of it, and fails where it is told to."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self.batches: list[PageBatch] = []

    # The device.

    def bind(self, mapping: object, alignment: int) -> Any:
        raise NotImplementedError

    def begin(self) -> None:
        raise NotImplementedError

    def end(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    # The groups.

    def store(self, pages: PageBatch) -> Event:
        return self._copy("store", pages)

    def load(self, pages: PageBatch) -> Event:
        return self._copy("load", pages)

    def _copy(self, what: str, pages: PageBatch) -> Event:
        self.log.append(what)
        self.batches.append(pages)
        if self.error is not None:
            raise self.error
        return self.end()

    def worker(self, groups: tuple[GroupKind, ...] = BOTH) -> OffloadingWorker:
        return OffloadingWorker(
            3,
            cast(Any, dict.fromkeys(groups, self)),
            self,
            order=lambda: self.log.append("order"),
            release=lambda: self.log.append("release"),
        )


def copies(
    number: int, kind: TransferKind = STORE, group: GroupKind = RESIDENT, blocks: tuple[int, ...] = (5,)
) -> RegionCopies:
    return RegionCopies(group, TransferId(number), kind, (2,), (blocks,))


def ids(*numbers: int) -> tuple[TransferId, ...]:
    return tuple(map(TransferId, numbers))


def test_a_transfer_is_enqueued_at_once_and_completed_when_its_event_was_seen() -> None:
    machine = Machine()
    worker = machine.worker()
    worker.start((copies(1), copies(1, LOAD, INDEXER), copies(2)))
    assert machine.log == ["order", "store", "load", "store"]
    assert worker.take_reports() == (
        (RESIDENT, OffloadReport(3, enqueued=ids(1, 2))),
        (INDEXER, OffloadReport(3, enqueued=ids(1))),
    )
    assert worker.take_reports() == ()
    # A stream does not overtake itself: what ends later is not reported before.
    machine.events[1].is_done = True
    assert worker.take_reports() == ()
    machine.events[0].is_done = True
    assert worker.take_reports() == (
        (RESIDENT, OffloadReport(3, completed=ids(1))),
        (INDEXER, OffloadReport(3, completed=ids(1))),
    )
    assert worker.num_in_flight == 1


def test_a_step_without_copies_orders_nothing() -> None:
    machine = Machine()
    machine.worker().start(())
    assert machine.log == []


def test_pages_that_are_not_wanted_are_left_out() -> None:
    machine = Machine()
    machine.worker().start((RegionCopies(RESIDENT, TransferId(1), LOAD, (4, 7), ((NOT_WANTED, 3), (9, NOT_WANTED))),))
    (batch,) = machine.batches
    assert [found.tolist() for found in (batch.local_blocks, batch.rows, batch.chunk_blocks)] == [
        [3, 9],
        [4, 7],
        [1, 0],
    ]
    assert batch.rows.dtype == np.int64


@pytest.mark.parametrize(
    "error",
    [OSError(12, "no memory"), MemoryError(), BackendError("the driver refused")],
    ids=["os", "memory", "driver"],
)
def test_a_copy_that_the_machine_refuses_has_failed_once_what_was_begun_of_it_is_over(error: Exception) -> None:
    machine = Machine()
    worker = machine.worker()
    machine.error = error
    worker.start((copies(1),))
    machine.error = None
    worker.start((copies(2),))
    assert worker.take_reports() == ((RESIDENT, OffloadReport(3, enqueued=ids(2))),)
    for event in machine.events:
        event.is_done = True
    assert worker.take_reports() == ((RESIDENT, OffloadReport(3, completed=ids(2), failed=ids(1))),)


def test_a_fault_of_ours_is_no_misfortune() -> None:
    machine = Machine()
    machine.error = InvariantError("block 99 is not there")
    with pytest.raises(InvariantError, match="block 99"):
        machine.worker().start((copies(1),))


def test_transfers_of_other_groups_and_ids_that_came_before_are_refused() -> None:
    worker = Machine().worker((INDEXER,))
    with pytest.raises(ProtocolError, match="transfer 1 is of the resident group, which is not offloaded"):
        worker.start((copies(1),))
    worker.start((copies(2, group=INDEXER),))
    for number in (1, 2):
        with pytest.raises(ProtocolError, match=f"transfer {number} of the indexer group came after 2"):
            worker.start((copies(number, group=INDEXER),))


def test_closing_waits_for_what_is_under_way_and_then_gives_the_regions_back_once() -> None:
    machine = Machine()
    worker = machine.worker()
    worker.start((copies(1), copies(2)))
    worker.close()
    worker.close()
    assert [event.num_waits for event in machine.events] == [1, 1]
    assert machine.log[-1:] == ["release"]
    assert machine.log.count("release") == 1


# The connector around it.


def test_a_step_follows_the_life_cycle() -> None:
    machine = Machine()
    connector = OffloadingConnector.for_worker(machine.worker())
    connector.bind_connector_metadata(OffloadingMetadata(1, (copies(1),)))
    connector.start_load_kv()
    connector.wait_for_save()
    answer = connector.build_connector_worker_meta()
    assert answer == OffloadingWorkerMetadata(((RESIDENT, OffloadReport(3, enqueued=ids(1))),))
    with pytest.raises(ProtocolError, match="step 2 was bound while step 1 still is"):
        connector.bind_connector_metadata(OffloadingMetadata(2))
    connector.clear_connector_metadata()
    connector.shutdown()
    connector.shutdown()
    assert machine.log == ["order", "store", "release"]


CALLS: list[Callable[[OffloadingConnector], object]] = [
    OffloadingConnector.start_load_kv,
    OffloadingConnector.wait_for_save,
    OffloadingConnector.build_connector_worker_meta,
]


@pytest.mark.parametrize("call", CALLS)
def test_nothing_works_before_a_step_is_bound_or_in_the_other_role(
    call: Callable[[OffloadingConnector], object],
) -> None:
    with pytest.raises(ProtocolError, match="no step is bound"):
        call(OffloadingConnector.for_worker(Machine().worker()))
    with pytest.raises(InvariantError, match="has the scheduler role"):
        call(OffloadingWorld().connector)


def test_messages_of_another_connector_and_calls_of_the_other_role_are_refused() -> None:
    scheduler, worker = OffloadingWorld().connector, OffloadingConnector.for_worker(Machine().worker())
    with pytest.raises(ProtocolError, match="ConnectorMetadata"):
        worker.bind_connector_metadata(ConnectorMetadata())
    with pytest.raises(ProtocolError, match="ConnectorWorkerMetadata"):
        scheduler.update_connector_output(ConnectorWorkerMetadata())
    for call in (
        lambda: worker.build_connector_meta(1),
        lambda: worker.update_connector_output(OffloadingWorkerMetadata()),
    ):
        with pytest.raises(InvariantError, match="has the worker role"):
            call()
    with pytest.raises(InvariantError, match="has the scheduler role"):
        scheduler.bind_connector_metadata(OffloadingMetadata(1))
