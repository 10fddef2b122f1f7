"""A connector carries commands and reports unchanged, and insists on its life cycle and on its own messages."""

from array import array
from collections.abc import Callable, Iterator

import pytest

from hisparse.cache import KVCacheManager, TableLog
from hisparse.connector import (
    ConnectorMetadata,
    ConnectorRole,
    ConnectorWorkerMetadata,
    HiSparseConnector,
    HiSparseMetadata,
    HiSparseWorkerMetadata,
)
from hisparse.errors import InvariantError, ProtocolError
from hisparse.protocol import Direction, SparseKVOffloadCommand, SparseKVWorkerReport, Table
from hisparse.residency import HiSparseCoordinator
from hisparse.worker import HiSparseWorker
from tests.residency.world import World as ResidencyWorld
from tests.worker.world import make_plan


@pytest.fixture
def worker_side() -> Iterator[HiSparseConnector]:
    plan = make_plan()
    staging = KVCacheManager(plan, TableLog()).staging
    connector = HiSparseConnector.for_worker(HiSparseWorker(plan, staging))
    yield connector
    connector.shutdown()


@pytest.fixture
def world() -> ResidencyWorld:
    return ResidencyWorld()


@pytest.fixture
def scheduler_side(world: ResidencyWorld) -> HiSparseConnector:
    return HiSparseConnector.for_scheduler(world.coordinator, world.log)


def run_step(connector: HiSparseConnector, meta: HiSparseMetadata) -> HiSparseWorkerMetadata:
    connector.bind_connector_metadata(meta)
    connector.start_load_kv()
    connector.wait_for_save()
    answer = connector.build_connector_worker_meta()
    connector.clear_connector_metadata()
    return answer


# The scheduler's side.


def test_metadata_drains_what_was_planned(world: ResidencyWorld, scheduler_side: HiSparseConnector) -> None:
    assert scheduler_side.role is ConnectorRole.SCHEDULER
    world.start("a", 2, num_pages=4)
    world.coordinator.reclaim(1)
    command = scheduler_side.build_connector_meta(7).command
    assert command.step == 7
    (transfer,) = command.transfers
    assert transfer.direction is Direction.DEVICE_TO_HOST
    assert {(update.table, update.slot) for update in command.updates} == {(Table.RESIDENT, 2), (Table.INDEXER, 2)}
    assert scheduler_side.build_connector_meta(8).command.is_empty
    world.coordinator.remove("a")
    assert scheduler_side.build_connector_meta(9).command.resets == (2,)


def test_a_report_reaches_the_coordinator(world: ResidencyWorld, scheduler_side: HiSparseConnector) -> None:
    world.start("a", 2, num_pages=4)
    world.coordinator.reclaim(1)
    (transfer,) = scheduler_side.build_connector_meta(1).command.transfers
    ids = (transfer.transfer_id,)
    scheduler_side.update_connector_output(HiSparseWorkerMetadata(SparseKVWorkerReport(0, ids, ids)))
    assert world.coordinator.num_in_flight == 0
    updates = scheduler_side.build_connector_meta(2).command.updates
    assert {update.table for update in updates} == {Table.RESIDENT, Table.HOST}
    with pytest.raises(ProtocolError, match=f"transfer {transfer.transfer_id} enqueued, which finished"):
        scheduler_side.update_connector_output(HiSparseWorkerMetadata(SparseKVWorkerReport(0, ids)))


# The worker's side.


def test_a_step_of_the_worker_follows_the_life_cycle(worker_side: HiSparseConnector) -> None:
    assert worker_side.role is ConnectorRole.WORKER
    for step in (1, 2):
        answer = run_step(worker_side, HiSparseMetadata(SparseKVOffloadCommand(step)))
        assert answer.report == SparseKVWorkerReport(0)


WORKER_CALLS: list[Callable[[HiSparseConnector], object]] = [
    HiSparseConnector.start_load_kv,
    HiSparseConnector.wait_for_save,
    HiSparseConnector.build_connector_worker_meta,
]


@pytest.mark.parametrize("call", WORKER_CALLS)
def test_nothing_works_before_a_step_is_bound_nor_after_it_was_cleared(
    worker_side: HiSparseConnector, call: Callable[[HiSparseConnector], object]
) -> None:
    with pytest.raises(ProtocolError, match="no step is bound"):
        call(worker_side)
    run_step(worker_side, HiSparseMetadata(SparseKVOffloadCommand(1)))
    with pytest.raises(ProtocolError, match="no step is bound"):
        call(worker_side)


def test_a_step_is_not_bound_over_another(worker_side: HiSparseConnector) -> None:
    worker_side.bind_connector_metadata(HiSparseMetadata(SparseKVOffloadCommand(1)))
    with pytest.raises(ProtocolError, match="step 2 was bound while step 1 still is"):
        worker_side.bind_connector_metadata(HiSparseMetadata(SparseKVOffloadCommand(2)))


def test_a_step_is_started_before_it_is_reported_and_started_once(worker_side: HiSparseConnector) -> None:
    worker_side.bind_connector_metadata(HiSparseMetadata(SparseKVOffloadCommand(1)))
    with pytest.raises(ProtocolError, match="no step to finish"):
        worker_side.build_connector_worker_meta()
    worker_side.start_load_kv()
    with pytest.raises(ProtocolError, match="step 1 started before step 1 finished"):
        worker_side.start_load_kv()


def test_a_step_that_was_carried_out_does_not_come_again(worker_side: HiSparseConnector) -> None:
    meta = HiSparseMetadata(SparseKVOffloadCommand(1))
    run_step(worker_side, meta)
    worker_side.bind_connector_metadata(meta)
    with pytest.raises(ProtocolError, match="step 1 came after step 1"):
        worker_side.start_load_kv()


def test_shutdown_closes_the_worker_and_may_be_repeated(worker_side: HiSparseConnector) -> None:
    worker_side.shutdown()
    worker_side.shutdown()
    worker_side.bind_connector_metadata(HiSparseMetadata(SparseKVOffloadCommand(1)))
    with pytest.raises(InvariantError, match="closed"):
        worker_side.start_load_kv()


# Foreign messages and foreign roles.


class OtherMetadata(ConnectorMetadata):
    """What another connector sends."""


class OtherWorkerMetadata(ConnectorWorkerMetadata):
    """What another connector answers."""


def test_messages_of_another_connector_are_refused_by_name(
    scheduler_side: HiSparseConnector, worker_side: HiSparseConnector
) -> None:
    with pytest.raises(ProtocolError, match="OtherMetadata"):
        worker_side.bind_connector_metadata(OtherMetadata())
    with pytest.raises(ProtocolError, match="OtherWorkerMetadata"):
        scheduler_side.update_connector_output(OtherWorkerMetadata())
    run_step(worker_side, HiSparseMetadata(SparseKVOffloadCommand(1)))


def test_calls_of_the_other_role_are_refused(scheduler_side: HiSparseConnector, worker_side: HiSparseConnector) -> None:
    command = HiSparseMetadata(SparseKVOffloadCommand(1))
    for call in [lambda side: side.bind_connector_metadata(command), *WORKER_CALLS]:
        with pytest.raises(InvariantError, match="has the scheduler role"):
            call(scheduler_side)
    report = HiSparseWorkerMetadata(SparseKVWorkerReport(0))
    for other in (lambda side: side.build_connector_meta(1), lambda side: side.update_connector_output(report)):
        with pytest.raises(InvariantError, match="has the worker role"):
            other(worker_side)
    scheduler_side.shutdown()


def test_both_sides_together_bring_a_page_to_the_host() -> None:
    plan = make_plan()
    log = TableLog()
    kv = KVCacheManager(plan, log)
    coordinator = HiSparseCoordinator(kv, log, b"root".ljust(16, b"\0"))
    scheduler, worker = HiSparseConnector.for_scheduler(coordinator, log), HiSparseWorker(plan, kv.staging)
    connector = HiSparseConnector.for_worker(worker)
    kv.add("a", 1)
    coordinator.add("a", 1, array("i", range(16)))
    assert kv.grow("a", 4).granted
    coordinator.seal("a", 16)
    coordinator.reclaim(1)
    for step in range(3):
        scheduler.update_connector_output(run_step(connector, scheduler.build_connector_meta(step)))
        coordinator.assert_invariants()
    pages = coordinator.pages("a")
    assert pages.num_host_backed > 0
    assert worker.tables[Table.HOST][1, :4].tolist() == list(pages.host)
    assert worker.tables[Table.RESIDENT][1, :4].tolist() == list(kv.resident.blocks("a"))
    connector.shutdown()
