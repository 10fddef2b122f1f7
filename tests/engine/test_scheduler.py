"""The scheduler under pressure: nothing stands still, the oldest goes first, and every row is where the tables say."""

import random
from array import array
from dataclasses import replace

import pytest

from hisparse.config import CachePlan, WriteBack
from hisparse.connector import HiSparseMetadata
from hisparse.engine.request import Request, RequestStatus
from hisparse.engine.scheduled_step import ScheduledStep
from hisparse.engine.scheduler import Scheduler
from hisparse.errors import CapacityError, InvariantError
from hisparse.protocol import TransferId
from tests.engine.paper_worker import BLOCK_SIZE, Drive, PaperWorker, random_plan, small_plan
from tests.engine.requests import PATIENCE, drain, make_request, queue_some, run_one
from tests.engine.watched_drive import WatchedDrive


def stress(seed: int, num_requests: int = 25, num_workers: int = 1, plan: CachePlan | None = None) -> WatchedDrive:
    """Random requests, some aborted, over random pools, to the end. Returns the drive for more questions."""
    rng = random.Random(seed)
    delay, chunk = rng.choice([0, 1, 3]), rng.choice([3, 8, 12, 40])
    drive = WatchedDrive(plan or random_plan(rng), seed, delay, num_workers, chunk)
    scheduler = drive.scheduler
    queued: list[Request] = []
    idle = 0
    while len(queued) < num_requests:
        queue_some(scheduler, rng, queued)
        if scheduler.running and rng.random() < 0.03:
            scheduler.finish(rng.choice(list(scheduler.running.values())))
        oldest = next(iter(scheduler.running.values()), None)
        idle = 0 if drive.step() or not scheduler.has_work else idle + 1
        assert idle <= PATIENCE, f"nothing was computed for {idle} steps"
        assert oldest is None or oldest.status is not RequestStatus.WAITING, "the oldest was preempted"
    drain(drive)
    assert all(request.status is RequestStatus.FINISHED for request in queued)
    return drive


@pytest.mark.parametrize("seed", range(40))
def test_under_any_pressure_every_request_ends_and_reads_its_own_rows(seed: int) -> None:
    drive = stress(seed)
    assert drive.scheduler.kv.use().resident == 0


@pytest.mark.parametrize("seed", range(100, 115))
def test_workers_whose_reports_come_late_change_nothing(seed: int) -> None:
    stress(seed, num_workers=2)


@pytest.mark.parametrize("seed", range(200, 210))
def test_where_nothing_may_leave_requests_wait_until_they_fit_whole(seed: int) -> None:
    drive = stress(seed, plan=small_plan(device_blocks_=24, index_blocks=80, write_back=WriteBack.NEVER))
    assert len(drive.admitted) > 10
    assert drive.scheduler.num_preemptions == 0
    assert drive.scheduler.coordinator.totals.spills == 0
    control = stress(seed, plan=small_plan(device_blocks_=24, index_blocks=80, host_blocks=90))
    assert control.scheduler.coordinator.totals.spills > 0


def test_the_stress_reaches_what_it_is_meant_to_reach() -> None:
    drives = [stress(seed) for seed in range(40, 60)]
    totals = [drive.scheduler.coordinator.totals for drive in drives]
    assert sum(drive.scheduler.num_preemptions for drive in drives) > 8
    assert sum(total.spills for total in totals) > 200
    assert sum(total.shared_spills for total in totals) > 20
    assert sum(total.restores for total in totals) > 20


def test_control_a_copy_that_was_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = PaperWorker.start

    def start(worker: PaperWorker, meta: HiSparseMetadata) -> tuple[TransferId, ...]:
        command = meta.command
        kept = tuple(replace(transfer, copies=transfer.copies[1:]) for transfer in command.transfers)
        sound(worker, HiSparseMetadata(replace(command, transfers=kept)))
        return tuple(transfer.transfer_id for transfer in command.transfers)

    monkeypatch.setattr(PaperWorker, "start", start)
    with pytest.raises((AssertionError, KeyError)):
        list(map(stress, range(5)))


def test_control_a_request_that_never_gets_its_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_find_start", lambda self, request: None)
    with pytest.raises(AssertionError, match="nothing was computed"):
        stress(0)


def test_control_a_preempted_oldest_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def preempt_oldest(self: Scheduler, step: ScheduledStep) -> bool:
        oldest = next(iter(self.running.values()))
        self._send_back(oldest)
        step.decodes = [request for request in step.decodes if request is not oldest]
        step.prefills = [work for work in step.prefills if work[0] is not oldest]
        return True

    monkeypatch.setattr(Scheduler, "_preempt_youngest", preempt_oldest)
    with pytest.raises(AssertionError, match="oldest was preempted"):
        list(map(stress, range(20)))


def test_a_hit_that_would_leave_no_room_beside_it_is_adopted_in_part() -> None:
    """The slab's five free blocks hold five pages of the prompt; two more are needed at once to go on."""
    drive = Drive(small_plan(device_blocks_=7), seed=0)
    text = [at % 2 for at in range(40)]
    run_one(drive, make_request("first", text[:20], 1))
    coordinator = drive.scheduler.coordinator
    assert coordinator.find_prefix(coordinator.prefix_keys(array("i", text))).num_pages == 5
    drive.scheduler.add(make_request("second", text, 4))
    assert drive.step() == 0, "the first chunk waits for adopted pages to leave"
    assert drive.scheduler.running["second"].num_computed == 3 * BLOCK_SIZE
    drain(drive)


def test_a_request_at_the_head_is_not_overtaken_by_one_that_would_fit() -> None:
    drive = Drive(small_plan(device_blocks_=7), seed=0)
    for name, length in (("long", 40), ("also long", 40), ("short", 2)):
        drive.scheduler.add(make_request(name, [len(name)] * length, 3))
    drain(drive)
    assert drive.admitted == ["long", "also long", "short"]


def test_what_may_grow_over_the_limit_is_refused_with_both_numbers() -> None:
    drive = Drive(small_plan(), seed=0)
    with pytest.raises(CapacityError, match="may grow to 81 tokens; the limit is 80"):
        drive.scheduler.add(make_request("long", [1] * 70, 12))
    drive.scheduler.add(make_request("fits", [1] * 70, 11))


def test_what_the_index_pool_can_never_hold_is_refused_with_both_numbers() -> None:
    drive = Drive(small_plan(index_blocks=10), seed=0)
    with pytest.raises(CapacityError, match="its index keys need 11 blocks, the indexer pool has 9"):
        drive.scheduler.add(make_request("long", [1] * 40, 3))


def spilled_pair(seed: int = 0) -> Drive:
    """Two requests whose pages do not fit the slab together, both decoding."""
    drive = Drive(small_plan(device_blocks_=20, host_blocks=60, index_blocks=60), seed)
    drive.scheduler.add(make_request("stays", [1] * 40, 30))
    drive.scheduler.add(make_request("leaves", [0] * 40, 8))
    while len(drive.scheduler.running) < 2 or not drive.scheduler.coordinator.totals.spills:
        drive.step()
    return drive


def test_pages_come_back_into_blocks_that_would_lie_idle() -> None:
    drive = spilled_pair()
    drain(drive)
    assert drive.scheduler.coordinator.totals.restores > 0


def test_nothing_comes_back_while_somebody_waits_for_blocks() -> None:
    drive = spilled_pair()
    drive.scheduler.finish(drive.scheduler.running["leaves"])
    slab = drive.scheduler.kv.slab
    slab.release(slab.allocate(slab.num_free))
    waits = make_request("waits", [0, 1] * 20, 4)
    drive.scheduler.waiting.append(waits)
    drive.scheduler.restore_idle()
    assert drive.scheduler.coordinator.num_in_flight == 0
    drive.scheduler.waiting.remove(waits)
    drive.scheduler.restore_idle()
    assert drive.scheduler.coordinator.num_in_flight == 1


def test_a_steady_decode_sends_an_empty_command() -> None:
    drive = Drive(small_plan(device_blocks_=30), seed=0)
    drive.scheduler.add(make_request("steady", [1] * 9, 8))
    drive.step()
    commands = []
    for _ in range(3):
        step = drive.scheduler.schedule()
        assert isinstance(step.meta, HiSparseMetadata)
        commands.append(step.meta.command.is_empty)
        drive.scheduler.complete(step)
        step.decodes[0].tokens.append(1)
    assert commands == [True, True, True], "positions 9 to 11 lie in the page that the prompt began"


@pytest.mark.parametrize("damage", ["slot", "status"])
def test_damage_is_found_by_the_invariants(damage: str) -> None:
    drive = Drive(small_plan(), seed=0)
    for name in ("a", "b"):
        drive.scheduler.add(make_request(name, [ord(name)] * 9, 8))
    drive.step()
    request = drive.scheduler.running["a"]
    if damage == "slot":
        request.slot = drive.scheduler.running["b"].slot
    else:
        drive.scheduler.waiting.append(request)
    with pytest.raises(InvariantError):
        drive.scheduler.assert_invariants()
