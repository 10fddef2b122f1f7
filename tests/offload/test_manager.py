"""What a request is told, what is kept, and that whatever fails becomes a miss. Each test plays the workers itself."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from hisparse.errors import InvariantError
from hisparse.offload.messages import Lookup, LookupStatus, OffloadReport, TransferEvent, TransferKind, TransferOutcome
from hisparse.offload.tier_probes import BATCH, MAX_PROBES
from hisparse.protocol import TransferId
from tests.offload.offload_world import World, chain

HIT, PENDING, RETRY, MISS = LookupStatus.HIT, LookupStatus.PENDING, LookupStatus.RETRY, LookupStatus.MISS
NOTHING = Lookup(MISS, 0)


def outcomes(events: tuple[TransferEvent, ...]) -> list[TransferOutcome]:
    return [event.outcome for event in events]


def test_what_was_stored_is_hit_and_loaded() -> None:
    world = World(num_blocks=4, num_workers=2)
    a = chain("a", 3)
    assert world.manager.lookup("first", a) == NOTHING
    assert world.store("first", a)[0] == 3
    assert outcomes(world.settle()) == [TransferOutcome.ENQUEUED, TransferOutcome.DONE]
    assert world.manager.lookup("second", a) == Lookup(HIT, 3)
    world.load("second", a)
    world.settle()
    assert world.manager.stats.loads == 3


def test_a_prefix_is_hit_up_to_its_first_absent_chunk() -> None:
    world = World(num_blocks=8)
    a = chain("a", 4)
    world.keep("first", a[:2] + a[3:])
    assert world.manager.lookup("second", a) == Lookup(HIT, 2)
    assert world.manager.lookup("third", chain("b", 1) + a) == NOTHING


def test_a_chunk_counts_once_every_worker_has_stored_it_and_not_before() -> None:
    world = World(num_blocks=4, num_workers=3)
    a = chain("a", 1)
    _, transfer = world.store("first", a)
    assert transfer is not None
    for worker in (2, 0):
        world.copy(transfer, worker)
        assert world.manager.lookup("second", a) == Lookup(PENDING, 0)
        assert world.manager.take_events() == ()
    world.copy(transfer, 1)
    assert world.manager.lookup("second", a) == Lookup(HIT, 1)


def test_a_chunk_on_its_way_is_not_stored_again() -> None:
    world = World(num_blocks=4)
    a = chain("a", 3)
    world.store("first", a[:2])
    plan = world.manager.prepare_store("second", a)
    assert plan.num_accepted == 3
    assert plan.transfer is not None
    assert [copy.position for copy in plan.transfer.chunks] == [2]
    assert world.manager.prepare_store("third", a).transfer is None


def test_a_hit_cannot_be_evicted_before_it_is_loaded() -> None:
    world = World(num_blocks=2)
    a, b = chain("a", 2), chain("b", 2)
    world.keep("first", a)
    assert world.manager.lookup("second", a) == Lookup(HIT, 2)
    assert world.store("third", b) == (0, None)
    assert world.manager.stats.dropped_stores == 2
    transfer = world.load("second", a)
    assert transfer is not None
    assert world.store("third", b) == (0, None)
    world.settle()
    assert world.store("third", b)[0] == 2


def test_a_claim_ends_with_its_request() -> None:
    world = World(num_blocks=2)
    world.keep("first", chain("a", 2))
    world.manager.lookup("second", chain("a", 2))
    world.manager.finish("second")
    world.manager.finish("second")
    assert world.store("third", chain("b", 2))[0] == 2


def test_of_a_prompt_larger_than_the_tier_the_beginning_stays() -> None:
    world = World(num_blocks=4)
    world.keep("other", chain("b", 4))
    a = chain("a", 10)
    for start in range(0, 10, 2):
        world.store("first", a[start : start + 2])
        world.settle()
    world.manager.finish("first")
    assert world.manager.lookup("second", a) == Lookup(HIT, 4)


def test_a_prefix_loses_its_end_before_its_beginning() -> None:
    for as_one in (True, False):
        world = World(num_blocks=4)
        a = chain("a", 4)
        for part in [a] if as_one else [a[:1], a[1:3], a[3:]]:
            world.store("first", part)
            world.settle()
        world.manager.finish("first")
        world.keep("other", chain("b", 1))
        assert world.manager.lookup("second", a) == Lookup(HIT, 3)


def test_a_prefix_that_is_read_loses_its_end_first_while_its_reader_runs() -> None:
    world = World(num_blocks=3)
    a = chain("a", 3)
    world.keep("first", a)
    world.manager.lookup("second", a)
    world.load("second", a)
    world.settle()
    world.keep("third", chain("b", 1))
    assert world.manager.lookup("fourth", a) == Lookup(HIT, 2)


def test_a_prefix_that_was_stored_loses_its_end_first_while_its_request_runs() -> None:
    world = World(num_blocks=3)
    a = chain("a", 3)
    world.store("first", a)
    world.settle()
    world.store("second", chain("b", 1))
    world.settle()
    assert world.manager.lookup("third", a) == Lookup(HIT, 2)


def test_stores_over_the_limit_are_dropped_and_may_be_offered_again() -> None:
    world = World(num_blocks=8, max_stores=3)
    a = chain("a", 5)
    assert world.store("first", a)[0] == 3
    assert world.store("second", chain("b", 1)) == (0, None)
    world.settle()
    assert world.store("first", a)[0] == 5
    world.settle()
    assert world.manager.lookup("third", a) == Lookup(HIT, 5)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_store_that_one_worker_fails_is_kept_by_nobody(worker: int) -> None:
    world = World(num_blocks=2, num_workers=2)
    a = chain("a", 2)
    _, transfer = world.store("first", a)
    assert transfer is not None
    world.fail(transfer, worker)
    # The other worker may still write: its block belongs to no one else yet.
    assert world.store("second", chain("b", 2)) == (0, None)
    world.copy(transfer, 1 - worker)
    assert outcomes(world.manager.take_events()) == [TransferOutcome.FAILED]
    assert world.manager.lookup("third", a) == NOTHING
    assert world.store("second", chain("b", 2))[0] == 2
    world.settle()
    assert world.manager.stats.failed_stores == 2


def test_a_failed_load_is_a_miss_for_its_request_from_then_on() -> None:
    world = World(num_blocks=4, num_workers=2, has_tier=True)
    a = chain("a", 2)
    world.keep("first", a)
    assert world.manager.lookup("second", a) == Lookup(HIT, 2)
    transfer = world.load("second", a)
    assert transfer is not None
    world.copy(transfer, 0)
    world.fail(transfer, 1)
    assert outcomes(world.manager.take_events()) == [TransferOutcome.FAILED]
    # The tier below has it still, but a request that was disappointed once is not told to wait again.
    for _ in range(3):
        assert world.manager.lookup("second", a) == NOTHING
        world.settle()
    assert world.store("second", a)[0] == 2


def test_a_worker_that_never_answers_costs_a_load_its_deadline_and_no_block_is_reused_under_it() -> None:
    world = World(num_blocks=2, num_workers=2, transfer_deadline_s=5.0)
    a = chain("a", 2)
    world.keep("first", a)
    world.manager.lookup("second", a)
    transfer = world.load("second", a)
    assert transfer is not None
    world.copy(transfer, 0)
    world.pass_step(4.9)
    assert world.manager.take_events() == ()
    world.pass_step(5.0)
    assert world.manager.take_events() == (
        TransferEvent(transfer, TransferKind.LOAD, "second", TransferOutcome.OVERDUE),
    )
    assert world.manager.take_events() == ()
    assert world.manager.lookup("second", a) == NOTHING
    assert world.store("third", chain("b", 1)) == (0, None)
    world.copy(transfer, 1)
    assert outcomes(world.settle())[-1:] == [TransferOutcome.DONE]
    assert world.store("third", chain("b", 2))[0] == 2


def test_an_overdue_store_is_not_published_however_well_it_ends() -> None:
    world = World(num_blocks=2, transfer_deadline_s=5.0)
    a = chain("a", 1)
    _, transfer = world.store("first", a)
    assert transfer is not None
    world.pass_step(5.0)
    assert outcomes(world.manager.take_events()) == [TransferOutcome.OVERDUE]
    assert world.store("second", a)[0] == 1
    world.copy(transfer, 0)
    world.manager.assert_invariants()
    assert world.manager.lookup("third", a) == Lookup(PENDING, 0)
    world.settle()
    assert world.manager.lookup("third", a) == Lookup(HIT, 1)


def test_nobody_waits_for_a_store_longer_than_the_lookup_deadline() -> None:
    world = World(num_blocks=2, lookup_deadline_s=1.0)
    a = chain("a", 1)
    world.store("first", a)
    assert world.manager.lookup("second", a) == Lookup(PENDING, 0)
    world.now_s = 0.9
    assert world.manager.lookup("second", a) == Lookup(PENDING, 0)
    world.now_s = 1.0
    for _ in range(3):
        assert world.manager.lookup("second", a) == NOTHING, "what is there already is no progress"
    assert world.manager.stats.late_lookups == 1


def test_a_transfer_has_its_time_from_when_it_is_handed_out_and_idle_time_does_not_count() -> None:
    world = World(num_blocks=4, transfer_deadline_s=5.0)
    a, b = chain("a", 2), chain("b", 1)
    plan = world.manager.prepare_store("first", a)
    assert plan.transfer is not None
    # It is begun at the end of a step; the next one, which hands it out, comes much later.
    world.pass_step(100.0)
    assert world.manager.take_events() == ()
    world.now_s = 200.0
    assert world.manager.take_events() == (), "nobody was asked since it was handed out"
    world.manager.report(OffloadReport(0, (plan.transfer.transfer_id,), (plan.transfer.transfer_id,)))
    assert outcomes(world.manager.take_events()) == [TransferOutcome.ENQUEUED, TransferOutcome.DONE]
    assert world.manager.lookup("second", a) == Lookup(HIT, 2)
    # Control: what a whole step's reports leave open after its time is overdue.
    world.manager.prepare_store("first", b)
    world.pass_step(300.0)
    world.pass_step(305.0)
    assert outcomes(world.manager.take_events()) == [TransferOutcome.OVERDUE]


def test_the_copies_of_a_finished_request_go_on() -> None:
    world = World(num_blocks=2)
    a = chain("a", 2)
    world.store("first", a)
    world.manager.finish("first")
    assert [event.request for event in world.settle()] == [None, None]
    assert world.manager.lookup("second", a) == Lookup(HIT, 2)
    world.load("second", a)
    world.manager.finish("second")
    assert world.store("third", chain("b", 1)) == (0, None)
    world.settle()
    assert world.store("third", chain("b", 1))[0] == 1


def test_misuse_is_caught() -> None:
    world = World(num_blocks=2)
    a = chain("a", 2)
    with pytest.raises(InvariantError, match="promised"):
        world.manager.prepare_load("first", 1)
    world.store("first", a)
    world.manager.lookup("second", a)
    with pytest.raises(InvariantError, match="still coming"):
        world.manager.prepare_load("second", 1)
    world.settle()
    world.manager.lookup("second", a)
    with pytest.raises(InvariantError, match="promised"):
        world.manager.prepare_load("second", 3)
    world.load("second", a)
    with pytest.raises(InvariantError, match="while transfer 2 loads"):
        world.manager.lookup("second", a)


def test_after_a_reset_nothing_is_found_and_what_was_promised_is_withdrawn() -> None:
    world = World(num_blocks=4)
    a, b = chain("a", 2), chain("b", 1)
    world.keep("first", a)
    world.store("second", b)
    world.manager.lookup("third", a)
    world.manager.reset()
    world.manager.assert_invariants()
    assert world.load("third", a) is None
    assert world.manager.lookup("third", a) == NOTHING
    world.settle()
    assert world.manager.lookup("fourth", b) == NOTHING
    assert world.store("fifth", chain("c", 4))[0] == 4


# With a tier below


def spill(world: World, keys: list[bytes]) -> None:
    """Keep chunks in the tier below alone."""
    for key in keys:
        world.keep("spill", [key])
        world.manager.reset()
    assert all(key in world.tier.kept for key in keys)


def test_what_only_the_tier_below_has_comes_up_and_is_hit() -> None:
    world = World(num_blocks=4, num_workers=2, has_tier=True)
    a = chain("a", 3)
    spill(world, a)
    assert world.manager.lookup("second", a) == Lookup(RETRY, 0)
    world.executor.run_all()
    assert world.manager.lookup("second", a) == Lookup(PENDING, 0)
    world.tier.end(1)
    assert world.manager.lookup("second", a) == Lookup(PENDING, 0)
    world.tier.end(0)
    assert world.manager.lookup("second", a) == Lookup(PENDING, 2)
    world.tier.end(0)
    assert world.manager.lookup("second", a) == Lookup(HIT, 3)
    world.load("second", a)
    world.settle()


def test_a_prefix_larger_than_the_cpu_tier_hits_for_what_fits() -> None:
    world = World(num_blocks=3, has_tier=True)
    a = chain("a", 10)
    for key in a:
        world.store("first", [key])
        world.settle()
    assert len(world.tier.kept) == 10
    world.manager.finish("first")
    world.manager.reset()
    world.manager.lookup("second", a)
    world.executor.run_all()
    world.manager.lookup("second", a)
    world.tier.end_all()
    assert world.manager.lookup("second", a) == Lookup(HIT, 3)
    world.load("second", a[:3])
    world.settle()


def test_the_end_of_a_large_prompt_passes_through_to_the_tier_below_and_its_beginning_stays() -> None:
    world = World(num_blocks=3, has_tier=True)
    a = chain("a", 10)
    for key in a:
        assert world.store("first", [key])[0] == 1
        world.settle()
    assert [key for key in a if world.manager.cpu.get(key)] == [*a[:2], a[9]]


def test_what_is_claimed_by_others_bounds_what_comes_up() -> None:
    world = World(num_blocks=3, has_tier=True)
    a, b = chain("a", 3), chain("b", 2)
    spill(world, a)
    world.keep("first", b)
    assert world.manager.lookup("second", b) == Lookup(HIT, 2)
    world.manager.lookup("third", a)
    world.executor.run_all()
    world.manager.lookup("third", a)
    world.tier.end_all()
    assert world.manager.lookup("third", a) == Lookup(HIT, 1)


FAULTS = {
    "the lookup raises": (lambda world: world.tier.refuses.add("lookup"), 0),
    "the lookup never ends": (lambda world: setattr(world.executor, "run_all", lambda: None), 0),
    "the executor is down": (lambda world: setattr(world.executor, "is_down", True), 0),
    "the load raises": (lambda world: world.tier.refuses.add("load"), 0),
    "every load is a miss": (lambda world: setattr(world.tier, "end_all", lambda: end_badly(world, None)), 0),
    "every load breaks": (lambda world: setattr(world.tier, "end_all", lambda: end_badly(world, OSError(5, "I/O"))), 0),
    "no load ends": (lambda world: setattr(world.tier, "end_all", lambda: None), 0),
    "the second load is a miss": (lambda world: setattr(world.tier, "end_all", lambda: end_second_badly(world)), 1),
    "nothing goes wrong": (lambda world: None, 3),
}


def end_badly(world: World, error: Exception | None) -> None:
    while world.tier.work:
        world.tier.end(0, well=False, error=error)


def end_second_badly(world: World) -> None:
    if len(world.tier.work) > 1:
        world.tier.end(1, well=False)
    while world.tier.work:
        world.tier.end(0)


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_goes_wrong_below_is_a_miss_within_the_deadline(fault: str) -> None:
    world = World(num_blocks=4, num_workers=2, has_tier=True, lookup_deadline_s=1.0)
    a = chain("a", 3)
    spill(world, a)
    inject, expected = FAULTS[fault]
    inject(world)
    answers = []
    for _ in range(15):
        answers.append(world.manager.lookup("second", a))
        world.executor.run_all()
        world.tier.end_all()
        world.manager.assert_invariants()
        world.now_s += 0.1
    assert answers[-1] == (Lookup(HIT, expected) if expected else NOTHING)
    # Once it was answered it stays answered: nobody asks for ever.
    first = next(i for i, answer in enumerate(answers) if answer.status in (HIT, MISS))
    assert set(answers[first:]) == {answers[-1]}
    if expected:
        world.load("second", a[:expected])
        world.copy_all()


@pytest.mark.parametrize("how", ["raises", "is refused", "breaks"])
def test_a_store_that_fails_below_leaves_the_chunk_in_the_cpu_tier(how: str) -> None:
    world = World(num_blocks=4, has_tier=True)
    a = chain("a", 1)
    if how == "raises":
        world.tier.refuses.add("store")
    world.store("first", a)
    world.copy_all()
    if how != "raises":
        world.tier.end(0, well=False, error=OSError(28, "full") if how == "breaks" else None)
    world.settle()
    assert world.manager.stats.failed_tier_writes == 1
    assert ("full" in world.manager.stats.last_tier_error) == (how == "breaks")
    assert world.manager.lookup("second", a) == Lookup(HIT, 1)
    # It gets another chance when somebody reads it.
    world.tier.refuses.clear()
    world.load("second", a)
    world.settle()
    assert a[0] in world.tier.kept


def test_a_block_is_not_reused_while_the_tier_below_reads_or_fills_it() -> None:
    world = World(num_blocks=1, has_tier=True)
    a, b = chain("a", 1), chain("b", 1)
    world.store("first", a)
    world.copy_all()
    assert world.store("second", b) == (0, None)
    world.tier.end(0)
    world.manager.take_events()
    world.manager.reset()
    world.manager.lookup("third", a)
    world.executor.run_all()
    world.manager.lookup("third", a)
    world.manager.finish("third")
    assert world.store("second", b) == (0, None)
    world.tier.end(0)
    assert world.store("second", b)[0] == 1


def test_writes_below_over_the_limit_wait_for_their_turn_and_hold_nobody_up() -> None:
    world = World(num_blocks=4, has_tier=True, max_tier_writes=1)
    a = chain("a", 3)
    world.store("first", a)
    world.copy_all()
    assert world.manager.lookup("second", a) == Lookup(HIT, 3)
    for number in range(3):
        assert [key for _, key, _, _ in world.tier.work] == [a[number]], "in the order of the prompt"
        world.tier.end(0)
        world.manager.take_events()
    assert list(world.tier.kept) == a
    assert world.manager.stats.dropped_tier_writes == 0


def test_a_chunk_that_waits_to_be_written_keeps_no_block_from_others_and_is_dropped_with_it() -> None:
    world = World(num_blocks=3, has_tier=True, max_tier_writes=1)
    a, b = chain("a", 3), chain("b", 2)
    world.store("first", a)
    world.copy_all()
    world.manager.finish("first")
    assert world.store("second", b)[0] == 2
    world.manager.assert_invariants()
    assert world.manager.stats.dropped_tier_writes == 2
    for _ in range(3):
        world.settle()
    assert set(world.tier.kept) == {a[0], *b}


def test_a_chunk_that_is_below_is_evicted_before_one_that_is_not() -> None:
    world = World(num_blocks=3, has_tier=True, max_tier_writes=1)
    a = chain("a", 3)
    world.store("first", a)
    world.copy_all()
    world.tier.end(0)  # a0 is written, a1 is not; a2, the oldest, waits
    world.manager.take_events()
    world.manager.finish("first")
    world.store("second", chain("b", 1))
    assert [key for key in a if world.manager.cpu.get(key)] == a[1:]
    assert world.manager.stats.dropped_tier_writes == 0


def test_loads_from_below_over_the_limit_are_waited_for() -> None:
    world = World(num_blocks=4, has_tier=True, max_tier_loads=2)
    a = chain("a", 4)
    spill(world, a)
    world.manager.lookup("second", a)
    world.executor.run_all()
    assert world.manager.lookup("second", a) == Lookup(PENDING, 0)
    assert len(world.tier.work) == 2
    world.tier.end_all()
    assert world.manager.lookup("second", a) == Lookup(PENDING, 2)
    world.tier.end_all()
    assert world.manager.lookup("second", a) == Lookup(HIT, 4)


def test_who_gets_no_turn_to_load_waits_while_others_get_further_and_loads_then() -> None:
    world = World(num_blocks=8, has_tier=True, max_tier_loads=2, lookup_deadline_s=1.0)
    a, b = chain("a", 4), chain("b", 1)
    spill(world, a + b)
    for request, keys in (("first", a), ("second", b)):
        world.manager.lookup(request, keys)
    world.executor.run_all()
    world.manager.lookup("first", a)
    for number in range(4):
        assert world.manager.lookup("second", b) == Lookup(PENDING, 0), number
        world.now_s += 0.9
        world.tier.end(0)
        world.manager.lookup("first", a)
    assert world.manager.lookup("second", b) == Lookup(PENDING, 0)
    world.tier.end_all()
    assert world.manager.lookup("second", b) == Lookup(HIT, 1)
    assert world.manager.stats.late_lookups == 0


def test_control_who_gets_no_turn_while_nobody_gets_further_computes() -> None:
    world = World(num_blocks=8, has_tier=True, max_tier_loads=1, lookup_deadline_s=1.0)
    a, b = chain("a", 1), chain("b", 1)
    spill(world, a + b)
    for request, keys in (("first", a), ("second", b)):
        world.manager.lookup(request, keys)
    world.executor.run_all()
    for request, keys in (("first", a), ("second", b)):
        assert world.manager.lookup(request, keys) == Lookup(PENDING, 0)
    world.now_s = 1.0
    assert world.manager.lookup("second", b) == NOTHING


def test_who_finds_no_place_among_the_probes_asks_again_and_is_answered() -> None:
    world = World(num_blocks=32, has_tier=True)
    prompts = {f"r{i}": chain(f"p{i}", 2) for i in range(20)}
    for keys in prompts.values():
        spill(world, keys)
    assert {world.manager.lookup(request, keys).status for request, keys in prompts.items()} == {RETRY}
    assert len(world.executor.tasks) == MAX_PROBES
    left = dict(prompts)
    for _ in range(12):
        world.executor.run_all()
        world.tier.end_all()
        for request, keys in list(left.items()):
            answer = world.manager.lookup(request, keys)
            if answer.status in (HIT, MISS):
                assert answer == Lookup(HIT, 2)
                del left[request]
                world.load(request, keys)
                world.copy_all()
                world.manager.finish(request)
    assert not left


def test_when_the_tier_below_hangs_all_wait_for_one_deadline_and_who_comes_later_computes_at_once() -> None:
    world = World(num_blocks=4, has_tier=True, lookup_deadline_s=1.0)
    early = [(f"r{i}", chain("a", 2)) for i in range(20)]
    assert {world.manager.lookup(*ask).status for ask in early} == {RETRY}
    world.now_s = 0.9
    assert {world.manager.lookup(*ask).status for ask in early} == {RETRY}
    world.now_s = 1.0
    assert {world.manager.lookup(*ask) for ask in early} == {NOTHING}
    assert world.manager.lookup("late", chain("b", 2)) == NOTHING
    # Once it answers it is asked again.
    world.executor.run_all()
    assert world.manager.lookup("later", chain("b", 2)) == Lookup(RETRY, 0)


def test_what_a_probe_has_found_comes_up_while_it_goes_on() -> None:
    world = World(num_blocks=256, has_tier=True)
    a, b = chain("a", 3 * BATCH), chain("b", 1)
    for key in a:
        world.tier.kept[key] = {0: (key, 0)}
    world.manager.lookup("first", a)
    world.manager.lookup("second", b)
    world.executor.run_all()
    assert world.manager.lookup("first", a) == Lookup(RETRY, 0)
    assert len(world.tier.work) == BATCH
    assert world.manager.lookup("second", b) == NOTHING, "a short question does not wait for a long one to end"
    world.tier.end_all()
    assert world.manager.lookup("first", a) == Lookup(RETRY, BATCH)
    world.executor.run_all()
    assert world.manager.lookup("first", a) == Lookup(PENDING, BATCH)
    world.tier.end_all()
    assert world.manager.lookup("first", a) == Lookup(HIT, 3 * BATCH)


def test_a_probe_that_gets_further_is_waited_for_however_long_its_chain_is() -> None:
    world = World(num_blocks=512, has_tier=True, lookup_deadline_s=1.0)
    a = chain("a", 4 * BATCH)
    for key in a:
        world.tier.kept[key] = {0: (key, 0)}
    world.manager.lookup("other", chain("b", 4 * BATCH))
    for _ in range(4):
        assert world.manager.lookup("first", a).status is RETRY
        world.now_s += 0.9
        world.executor.run_all()
        world.tier.end_all()
        world.manager.lookup("other", chain("b", 4 * BATCH))
        world.manager.finish("other")
        world.manager.lookup("other", chain("b", 4 * BATCH))
    world.manager.lookup("first", a)
    world.tier.end_all()
    assert world.manager.lookup("first", a) == Lookup(HIT, 4 * BATCH)


def test_an_answer_that_is_there_is_looked_at_however_long_the_step_was() -> None:
    world = World(num_blocks=4, has_tier=True, lookup_deadline_s=2.0)
    a = chain("a", 2)
    spill(world, a)
    assert world.manager.lookup("second", a) == Lookup(RETRY, 0)
    world.executor.run_all()
    world.now_s = 10.0
    assert world.manager.lookup("second", a) == Lookup(PENDING, 0)
    world.tier.end_all()
    world.now_s = 20.0
    assert world.manager.lookup("second", a) == Lookup(HIT, 2)


def test_a_store_by_another_is_waited_for_two_steps_however_long_they_are() -> None:
    world = World(num_blocks=4, lookup_deadline_s=2.0, lookup_limit_s=1000.0)
    a = chain("a", 2)
    world.store("first", a)
    for now_s in (0.0, 50.0):
        world.now_s = now_s
        assert world.manager.lookup("second", a) == Lookup(PENDING, 0)
    world.copy_all()
    world.now_s = 100.0
    assert world.manager.lookup("second", a) == Lookup(HIT, 2)


def slow_disk(world: World, request: str, keys: list[bytes], chunk_s: float) -> tuple[Lookup, float]:
    """Ask every 10 ms while a chunk comes up every `chunk_s`. Returns the answer and when it came."""
    while True:
        world.executor.run_all()
        if world.tier.work and world.now_s >= chunk_s * (1 + len(keys) - len(world.tier.work)):
            world.tier.end(0)
        answer = world.manager.lookup(request, keys)
        if answer.status in (HIT, MISS):
            return answer, world.now_s
        world.now_s += 0.01


def test_chunks_that_come_one_by_one_are_waited_for_until_the_last() -> None:
    world = World(num_blocks=64, has_tier=True, lookup_deadline_s=1.0)
    a = chain("a", 40)
    for key in a:
        world.tier.kept[key] = {0: (key, 0)}
    answer, ended_s = slow_disk(world, "second", a, chunk_s=0.5)
    assert answer == Lookup(HIT, 40)
    assert ended_s == pytest.approx(20.0, abs=1.0)


def test_nobody_is_told_to_wait_for_longer_than_the_limit_whatever_gets_further() -> None:
    world = World(num_blocks=64, has_tier=True, lookup_deadline_s=1.0, lookup_limit_s=5.0)
    a = chain("a", 40)
    for key in a:
        world.tier.kept[key] = {0: (key, 0)}
    answer, ended_s = slow_disk(world, "second", a, chunk_s=0.5)
    assert answer.status is HIT
    assert 8 <= answer.num_chunks <= 10
    assert ended_s == pytest.approx(5.0, abs=0.1)
    # What it has waited counts after a load too.
    world.load("second", a[: answer.num_chunks])
    world.copy_all()
    assert world.manager.lookup("second", a[answer.num_chunks :]) == NOTHING


def test_who_finds_no_room_waits_for_it_as_long_as_for_anything() -> None:
    world = World(num_blocks=4, has_tier=True, lookup_deadline_s=1.0)
    a, b = chain("a", 4), chain("b", 2)
    spill(world, b)
    world.keep("first", a)
    assert world.manager.lookup("second", a) == Lookup(HIT, 4)
    world.manager.lookup("third", b)
    world.executor.run_all()
    assert world.manager.lookup("third", b) == Lookup(PENDING, 0)
    world.now_s = 0.5
    world.load("second", a)
    world.copy_all()
    assert world.manager.lookup("third", b) == Lookup(PENDING, 0)
    world.tier.end_all()
    assert world.manager.lookup("third", b) == Lookup(HIT, 2)


def test_control_who_finds_no_room_for_too_long_computes() -> None:
    world = World(num_blocks=4, has_tier=True, lookup_deadline_s=1.0)
    a, b = chain("a", 4), chain("b", 2)
    spill(world, b)
    world.keep("first", a)
    world.manager.lookup("second", a)
    world.manager.lookup("third", b)
    world.executor.run_all()
    for now_s in (0.0, 0.9):
        world.now_s = now_s
        assert world.manager.lookup("third", b) == Lookup(PENDING, 0)
    world.now_s = 1.0
    assert world.manager.lookup("third", b) == NOTHING


# Before a request runs


def look_ahead(world: World, request: str, keys: list[bytes]) -> Lookup:
    """What it comes to once the tier below has done all that it is asked to."""
    for _ in range(4):
        answer = world.manager.lookup(request, keys, ahead=True)
        world.executor.run_all()
        world.tier.end_all()
        world.manager.assert_invariants()
    return answer


def test_what_a_waiting_request_could_use_is_there_when_it_runs() -> None:
    world = World(num_blocks=8, has_tier=True)
    a = chain("a", 4)
    spill(world, a)
    assert look_ahead(world, "waits", a) == Lookup(HIT, 4)
    assert world.tier.work == []
    assert world.manager.lookup("waits", a) == Lookup(HIT, 4)
    assert world.manager.came_from_below("waits") == set(a)


def test_a_waiting_request_holds_nothing_however_long_it_waits() -> None:
    world = World(num_blocks=8, has_tier=True)
    w, r = chain("w", 16), chain("r", 8)
    for key in w + r:
        world.tier.kept[key] = {0: (key, 0)}
    assert look_ahead(world, "waits", w) == Lookup(PENDING, 4), "half of the tier, and no more"
    with pytest.raises(InvariantError, match="promised"):
        world.manager.prepare_load("waits", 1)
    assert world.store("stores", chain("s", 8))[0] == 8
    world.copy_all()
    world.settle()
    world.manager.finish("stores")
    world.now_s = 100.0
    world.manager.lookup("runs", r)
    world.executor.run_all()
    world.manager.lookup("runs", r)
    world.tier.end_all()
    assert world.manager.lookup("runs", r) == Lookup(HIT, 8)


def test_a_request_that_begins_to_run_gets_what_it_has_lost_while_it_waited() -> None:
    world = World(num_blocks=8, has_tier=True)
    a = chain("a", 4)
    for key in a:
        world.tier.kept[key] = {0: (key, 0)}
    assert look_ahead(world, "waits", a) == Lookup(HIT, 4)
    world.now_s = 100.0
    world.keep("other", chain("b", 7))
    assert len(world.manager.cpu) == 8
    for _ in range(3):
        answer = world.manager.lookup("waits", a)
        world.executor.run_all()
        world.tier.end_all()
    assert answer == Lookup(HIT, 4)


def test_looking_ahead_evicts_nothing_that_a_running_request_wants_or_that_was_brought_ahead() -> None:
    world = World(num_blocks=6, has_tier=True)
    mine, a, b = chain("m", 4), chain("a", 4), chain("b", 4)
    for key in a + b:
        world.tier.kept[key] = {0: (key, 0)}
    world.store("runs", mine)
    world.settle()
    assert look_ahead(world, "waits", a) == Lookup(PENDING, 2)
    assert look_ahead(world, "waits too", b) == Lookup(PENDING, 0)
    assert all(world.manager.cpu.get(key) for key in (*mine, *a[:2]))
    world.manager.finish("runs")
    # Now nobody wants it, and half of the tier is three blocks.
    assert look_ahead(world, "waits", a) == Lookup(PENDING, 3)
    world.manager.finish("waits")
    world.manager.assert_invariants()
    assert look_ahead(world, "waits too", b) == Lookup(PENDING, 3)


def test_looking_ahead_leaves_half_of_the_turns_to_those_that_run() -> None:
    world = World(num_blocks=64, has_tier=True, max_tier_loads=4)
    a, b = chain("a", 8), chain("b", 8)
    for key in a + b:
        world.tier.kept[key] = {0: (key, 0)}
    world.manager.lookup("waits", a, ahead=True)
    world.executor.run_all()
    world.manager.lookup("waits", a, ahead=True)
    assert len(world.tier.work) == 2
    world.manager.lookup("runs", b)
    world.executor.run_all()
    world.manager.lookup("runs", b)
    assert len(world.tier.work) == 4


# What look-ups cost


class Counted(list[bytes]):
    """Keys that count how often they are read."""

    num_read = 0

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        self.num_read += 1
        return super().__getitem__(index)  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[bytes]:
        self.num_read += len(self)
        return super().__iter__()


def test_a_look_up_costs_what_is_new_and_not_what_is_known() -> None:
    world = World(num_blocks=2048, has_tier=True)
    a = Counted(chain("a", 1024))
    for key in chain("a", 1024):
        world.tier.kept[key] = {0: (key, 0)}
    world.manager.lookup("second", a)
    world.executor.run_all()
    assert world.manager.lookup("second", a) == Lookup(PENDING, 0)
    for num_ready in (0, 1, 513):
        while len(world.tier.work) > 1024 - num_ready:
            world.tier.end(0)
        a.num_read = 0
        assert world.manager.lookup("second", a) == Lookup(PENDING, num_ready)
        assert a.num_read == 0
    world.tier.end(200, well=False)
    assert world.manager.lookup("second", a) == Lookup(PENDING, 513)
    world.tier.end_all()
    assert world.manager.lookup("second", a) == Lookup(HIT, 713)


def test_a_shorter_look_up_gives_back_what_it_is_not_about_and_a_longer_one_goes_on() -> None:
    world = World(num_blocks=4)
    a = chain("a", 4)
    world.keep("first", a)
    assert world.manager.lookup("second", a) == Lookup(HIT, 4)
    assert world.manager.lookup("second", a, 1) == Lookup(HIT, 1)
    world.manager.assert_invariants()
    assert world.store("third", chain("b", 1))[0] == 1
    assert world.manager.lookup("second", a, 9) == Lookup(HIT, 3)


def test_two_requests_wait_for_the_same_chunk_and_it_comes_up_once() -> None:
    world = World(num_blocks=4, has_tier=True)
    a = chain("a", 1)
    spill(world, a)
    for request in ("second", "third"):
        assert world.manager.lookup(request, a) == Lookup(RETRY, 0)
    world.executor.run_all()
    for request in ("second", "third"):
        assert world.manager.lookup(request, a) == Lookup(PENDING, 0)
    assert len(world.tier.work) == 1
    world.tier.end_all()
    for request in ("second", "third"):
        assert world.manager.lookup(request, a) == Lookup(HIT, 1)


def test_nobody_waits_for_a_load_from_below_that_has_hung_for_longer_than_the_deadline() -> None:
    world = World(num_blocks=2, has_tier=True, lookup_deadline_s=1.0)
    a = chain("a", 1)
    spill(world, a)
    world.manager.lookup("second", a)
    world.executor.run_all()
    assert world.manager.lookup("second", a) == Lookup(PENDING, 0)
    world.now_s = 1.0
    assert world.manager.lookup("third", a) == NOTHING
    world.tier.end_all()
    assert world.manager.lookup("third", a) == Lookup(HIT, 1)


@pytest.mark.parametrize(
    ("in_cpu", "others", "expected"),
    [
        # The other's chunk makes room for the second, though the third was used longer ago; that one stays.
        ((0, 2), 1, 3),
        # The last makes room for the second, without which it is of no use; then the third has no room.
        ((0, 3), 0, 2),
    ],
)
def test_what_comes_up_takes_the_place_of_others_first_then_of_later_chunks_and_of_no_earlier_one(
    in_cpu: tuple[int, ...], others: int, expected: int
) -> None:
    world = World(num_blocks=len(in_cpu) + others, has_tier=True)
    a = chain("a", 4)
    spill(world, a)
    for number in in_cpu:
        world.keep("first", [a[number]])
    world.keep("other", chain("b", others))
    world.manager.lookup("second", a)
    world.executor.run_all()
    world.manager.lookup("second", a)
    world.tier.end_all()
    assert world.manager.lookup("second", a) == Lookup(HIT, expected)


def test_a_tier_below_that_refuses_every_load_costs_one_chunk_its_place() -> None:
    world = World(num_blocks=3, has_tier=True)
    a, b = chain("a", 3), chain("b", 3)
    spill(world, a)
    world.keep("first", b)
    world.tier.refuses.add("load")
    world.manager.lookup("second", a)
    world.executor.run_all()
    assert world.manager.lookup("second", a) == NOTHING
    assert [key for key in b if world.manager.cpu.get(key)] == b[:2]
    assert world.manager.stats.failed_promotions == 1


def test_the_end_of_a_prompt_that_is_not_below_yet_or_that_others_need_is_not_given_up_for_more_of_it() -> None:
    world = World(num_blocks=2, has_tier=True)
    a = chain("a", 3)
    world.tier.refuses.add("store")
    world.store("first", a[:2])
    world.settle()
    assert world.store("first", a[2:]) == (0, None)
    world = World(num_blocks=2, has_tier=True)
    world.store("first", a[:2])
    world.settle()
    assert world.manager.lookup("second", a[:2]) == Lookup(HIT, 2)
    assert world.store("first", a[2:]) == (0, None)


def test_a_chunk_is_written_below_once_however_often_it_is_read() -> None:
    world = World(num_blocks=2, has_tier=True)
    a = chain("a", 1)
    world.store("first", a)
    world.copy_all()
    for request in ("second", "third"):
        world.manager.lookup(request, a)
        world.load(request, a)
        world.copy_all()
    assert [work[0] for work in world.tier.work] == ["store"]
    spill(world, a)
    world.manager.lookup("fourth", a)
    world.executor.run_all()
    world.manager.lookup("fourth", a)
    world.tier.end_all()
    assert world.manager.lookup("fourth", a) == Lookup(HIT, 1)
    world.load("fourth", a)
    world.copy_all()
    assert world.tier.work == []


def test_after_a_reset_a_chunk_may_be_stored_anew_while_its_first_block_is_still_written_below() -> None:
    world = World(num_blocks=3, has_tier=True)
    a = chain("a", 1)
    world.store("first", a)
    world.copy_all()
    world.manager.reset()
    world.store("second", a)
    world.copy_all()
    assert len(world.tier.work) == 1
    assert world.manager.cpu.num_free == 1
    world.settle()
    assert world.manager.cpu.num_free == 2
    assert world.manager.lookup("third", a) == Lookup(HIT, 1)


def test_the_question_of_a_request_that_is_gone_is_not_asked() -> None:
    world = World(num_blocks=2, has_tier=True)
    world.tier.refuses.add("lookup")
    world.manager.lookup("first", chain("a", 1))
    world.manager.finish("first")
    (future, _), *_ = world.executor.tasks
    assert future.cancelled()
    world.executor.run_all()
    assert world.manager.stats.failed_probes == 0


def test_a_key_that_is_named_twice_does_no_harm() -> None:
    world = World(num_blocks=2)
    a = chain("a", 1)
    world.keep("first", a)
    world.manager.lookup("second", a + a)
    world.manager.assert_invariants()
    world.manager.finish("second")
    world.manager.assert_invariants()


def test_closing_waits_for_what_is_under_way_no_longer_than_it_may() -> None:
    world = World(num_blocks=4, has_tier=True)
    world.store("first", chain("a", 2))
    world.copy_all()
    assert world.manager.close(0.01) == 2
    world.tier.end_all()
    assert world.manager.close(5.0) == 0
    assert world.tier.closed_within is not None
    assert 0 < world.tier.closed_within <= 5.0
    world = World(num_blocks=1)
    world.store("first", chain("a", 1))
    assert world.manager.close(0.01) == 1


def test_the_prefix_of_a_request_that_ends_is_touched_below_once_all_of_it_was_given_to_the_tier() -> None:
    world = World(num_blocks=8, has_tier=True, max_tier_writes=1)
    a = chain("a", 3)
    world.store("first", a)
    world.copy_all()
    world.manager.finish("first")
    for _ in range(2):
        assert world.tier.touched == []
        world.tier.end(0)
        world.manager.take_events()
    assert world.tier.touched == [tuple(a)]
    world.settle()
    # A hit in the CPU tier is a use of what is below.
    world.manager.lookup("second", a[:2])
    world.load("second", a[:2])
    world.copy_all()
    world.manager.finish("second")
    assert world.tier.touched == [tuple(a), tuple(a[:2])]


def test_a_tier_that_cannot_be_touched_does_no_harm() -> None:
    world = World(num_blocks=2, has_tier=True)
    world.tier.refuses.add("touch")
    world.keep("first", chain("a", 2))
    assert "touch refused" in world.manager.stats.last_tier_error
    assert world.manager.lookup("second", chain("a", 2)) == Lookup(HIT, 2)


def test_closing_writes_what_the_tier_below_has_given_up_although_it_kept_older_chunks() -> None:
    world = World(num_blocks=8, has_tier=True)
    a = chain("a", 6)
    world.executor.is_prompt = True
    for key in a:
        world.keep("first", [key])
    for lost in (a[0], a[3], a[5]):
        del world.tier.kept[lost]
    assert world.manager.close(0.01) == 2
    assert [(what, key) for what, key, _, _ in world.tier.work] == [("store", a[3]), ("store", a[5])]


def test_closing_does_not_wait_for_a_tier_that_does_not_say_what_it_has() -> None:
    world = World(num_blocks=2, has_tier=True)
    world.keep("first", chain("a", 2))
    assert world.manager.close(0.05) == 0
    assert world.tier.work == []


def test_a_reference_that_nobody_holds_is_found_by_the_invariants() -> None:
    world = World(num_blocks=2)
    world.keep("first", chain("a", 1))
    entry = world.manager.cpu.get(chain("a", 1)[0])
    assert entry is not None
    world.manager.cpu.pin(entry)
    with pytest.raises(InvariantError, match="holders do not explain"):
        world.manager.assert_invariants()


def test_the_manager_needs_no_torch() -> None:
    code = "import sys, hisparse.offload.manager; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_control_a_block_that_is_reused_under_a_copy_is_seen() -> None:
    world = World(num_blocks=1)
    a, b = chain("a", 1), chain("b", 1)
    world.keep("first", a)
    world.manager.lookup("second", a)
    transfer = world.load("second", a)
    assert transfer is not None
    entry = world.manager.cpu.get(a[0])
    assert entry is not None
    while entry.references:
        world.manager.cpu.unpin(entry)
    world.store("third", b)
    world.copy(TransferId(3), 0)
    with pytest.raises(AssertionError, match="read"):
        world.copy(transfer, 0)


def test_an_unknown_transfer_changes_nothing() -> None:
    world = World(num_blocks=2)
    a = chain("a", 1)
    _, transfer = world.store("first", a)
    assert transfer is not None
    with pytest.raises(Exception, match="transfer 99"):
        world.manager.report(OffloadReport(0, enqueued=(transfer,), completed=(transfer, TransferId(99))))
    assert world.manager.lookup("second", a) == Lookup(PENDING, 0)
    world.settle()
    assert world.manager.lookup("second", a) == Lookup(HIT, 1)
