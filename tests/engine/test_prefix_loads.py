"""KV that comes from below the pools: the right bytes or none, whatever is late, lost, evicted or preempted."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from hisparse.cache.groups import GroupKind
from hisparse.connector.prefix_source import GroupPages, TicketId, TierEvent, TierOutcome
from hisparse.engine.prefix_loads import PrefixLoads
from hisparse.engine.request import Request, RequestStatus
from hisparse.engine.reuse import ReusedTokens
from hisparse.errors import InvariantError, ProtocolError
from hisparse.residency import Arrival, Arrivals, HiSparseCoordinator, Pin
from tests.engine.paper_tiers import BOTH, PaperTiers, Weather
from tests.engine.paper_worker import BLOCK_SIZE, Drive, random_plan, small_plan
from tests.engine.requests import drain, make_request, queue_some, run_one

PATIENCE = 150
"""Steps in a row that may compute nothing: a look-up at the end of its patience, a copy that is overdue, one more."""
CALM = Weather(max_delay=0)
WEATHERS = (
    Weather(),
    CALM,
    Weather(max_delay=3, fails=0.1, withdrawn=0.1, dropped=0.2),
    Weather(max_delay=3, fails=0.2, overdue=0.2, withdrawn=0.1, dropped=0.2),
)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2) for _ in range(length)]


# Stress.


def stress(seed: int, num_requests: int = 30) -> Drive:
    """Requests come, meet each other's prefixes, are aborted and preempted; tiers are late, wrong and forgetful; caches
    are reset and weights swapped. All of it follows from `seed`. Returns the drive after the last ticket ended.
    """
    rng = random.Random(seed)
    groups = rng.choice([BOTH, BOTH, (GroupKind.INDEXER,)])
    tiers = PaperTiers(rng, rng.choice([3, 10, 40, 1000]), rng.random() < 0.6, groups, rng.choice(WEATHERS))
    workers, chunk = rng.choice([1, 1, 2]), rng.choice([3, 8, 12, 40])
    drive = Drive(random_plan(rng), seed, rng.choice([0, 1, 3]), workers, chunk, tiers)
    scheduler = drive.scheduler
    queued: list[Request] = []
    idle = 0
    coordinator = scheduler.coordinator
    while len(queued) < num_requests or scheduler.has_work or scheduler.num_open or coordinator.num_in_flight:
        if len(queued) < num_requests:
            queue_some(scheduler, rng, queued)
            if queued and rng.random() < 0.03:
                scheduler.finish(rng.choice(queued))
        if rng.random() < 0.015:
            scheduler.reset_prefix_cache(tiers=rng.random() < 0.3)
        elif rng.random() < 0.01:
            drive.swap_weights()
        idle = 0 if drive.step() or not scheduler.has_work else idle + 1
        assert idle <= PATIENCE, f"nothing was computed for {idle} steps"
    assert all(request.status is RequestStatus.FINISHED for request in queued)
    counted = sum(request.num_prompt for request in queued if request.is_counted)
    assert scheduler.reused.total == counted, "a prompt is counted once, and whole"
    return drive


def soundly(seed: int) -> Drive:
    """`stress`, naming its seed when it fails."""
    try:
        return stress(seed)
    except Exception as error:
        error.add_note(f"reproduce with tests.engine.test_prefix_loads.stress({seed})")
        raise


@pytest.mark.parametrize("seed", range(0, 160, 8))
def test_whatever_fails_below_every_request_ends_and_reads_its_own_rows(seed: int) -> None:
    for each in range(seed, seed + 8):
        drive = soundly(each)
        slab, index_pool = drive.scheduler.kv.slab, drive.scheduler.kv.index_pool
        assert slab.num_leased == len(drive.scheduler.kv.staging)
        assert index_pool.num_leased == 0


def test_the_stress_reaches_what_it_is_meant_to_reach() -> None:
    counts: Counter[str] = Counter()
    reused: Counter[str] = Counter()
    num_preemptions = num_steps = 0
    for seed in range(1000, 1060):
        drive = soundly(seed)
        assert drive.tiers is not None
        counts.update(drive.tiers.counts)
        reused.update(drive.scheduler.reused.as_dict())
        num_preemptions += drive.scheduler.num_preemptions
        num_steps += drive.num_steps
    assert num_steps > 5000
    assert min(reused.values()) > 400, reused
    assert min(counts[name] for name in ("loads", "stores", "failed", "overdue", "files")) > 100, counts
    assert counts["withdrawn"] > 5
    assert num_preemptions > 60


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = stress(7), stress(7)
    assert first.scheduler.reused == second.scheduler.reused
    assert first.num_steps == second.num_steps
    assert first.admitted == second.admitted


# The same with one rule of the house broken.


def _pin_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arrivals, "pin", lambda self, slab, indexer: Pin(slab, indexer))
    patch.setattr(Arrivals, "unpin", lambda self, pin: None)
    patch.setattr(PrefixLoads, "assert_invariants", lambda self, running: None)


def _free_what_is_overdue(patch: pytest.MonkeyPatch) -> None:
    sound = Arrivals.detach

    def broken(self: Arrivals, arrival: Arrival) -> None:
        sound(self, arrival)
        self._end_leases(arrival.resident, arrival.indexer, ())
        arrival.resident = arrival.indexer = [0] * arrival.num_pages  # type: ignore[assignment, list-item]

    patch.setattr(Arrivals, "detach", broken)


def _use_what_failed(patch: pytest.MonkeyPatch) -> None:
    sound = PrefixLoads._see_load

    def broken(self: PrefixLoads, event: TierEvent) -> None:
        outcome = TierOutcome.DONE if event.outcome is TierOutcome.FAILED else event.outcome
        sound(self, event._replace(outcome=outcome))

    patch.setattr(PrefixLoads, "_see_load", broken)


def _use_before_it_came(patch: pytest.MonkeyPatch) -> None:
    sound = PrefixLoads._begin

    def broken(self: PrefixLoads, request: Request, asking: object, num_pages: int) -> object:
        answer = sound(self, request, asking, num_pages)  # type: ignore[arg-type]
        for load in self._loads.values():
            if load.request is request:
                for key, block in zip(load.arrival.keys, load.arrival.resident, strict=True):
                    if block:
                        self._coordinator.kv.slab.publish(block, key)
        return answer

    patch.setattr(PrefixLoads, "_begin", broken)


def _find_what_was_forgotten(patch: pytest.MonkeyPatch) -> None:
    sound = HiSparseCoordinator.forget_content

    def broken(self: HiSparseCoordinator, root: bytes | None = None) -> None:
        if root is None:
            sound(self, root)

    patch.setattr(HiSparseCoordinator, "forget_content", broken)


def _shift_the_claims(patch: pytest.MonkeyPatch) -> None:
    sound = Arrivals.claim
    patch.setattr(Arrivals, "claim", lambda self, name, first, blocks: sound(self, name, first - 1, blocks))


CONTROLS = [
    _pin_nothing,
    _free_what_is_overdue,
    _use_what_failed,
    _use_before_it_came,
    _find_what_was_forgotten,
    _shift_the_claims,
]


@pytest.mark.parametrize("damage", CONTROLS)
def test_control_a_broken_rule_is_noticed(damage: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        with pytest.raises((AssertionError, InvariantError, KeyError)):
            list(map(stress, range(200)))


# One thing at a time.


def calm_drive(tiers: PaperTiers, device_blocks: int = 30, host_blocks: int = 90, max_running: int = 4) -> Drive:
    plan = small_plan(device_blocks, host_blocks, index_blocks=90, max_running=max_running)
    return Drive(plan, seed=0, tiers=tiers)


def tiers_of(has_files: bool = False, groups: tuple[GroupKind, ...] = BOTH, **weather: float) -> PaperTiers:
    return PaperTiers(random.Random(0), has_files=has_files, groups=groups, weather=Weather(**weather))  # type: ignore[arg-type]


def settle(drive: Drive) -> None:
    """Step until nothing is under way any more, neither here nor below."""
    drain(drive)
    for _ in range(2000):
        if not (drive.scheduler.num_open or drive.scheduler.coordinator.num_in_flight):
            return
        drive.step()
    pytest.fail(f"{drive.scheduler.num_open} tickets stay open")


def store(drive: Drive, *prompts: list[int]) -> None:
    """Have the tiers keep prompts that the pools know nothing of any more."""
    for number, prompt in enumerate(prompts):
        run_one(drive, make_request(f"stored {number}", prompt, 1))
    settle(drive)
    drive.scheduler.reset_prefix_cache()
    drive.scheduler.reused = ReusedTokens()


def ask(drive: Drive, prompt: list[int], max_tokens: int = 1, name: str = "asks") -> Request:
    request = make_request(name, prompt, max_tokens)
    drive.scheduler.add(request)
    return request


@pytest.mark.parametrize("is_below", ["cpu_tier", "files"])
@pytest.mark.parametrize("rest", [0, 1, BLOCK_SIZE - 1])
def test_what_was_stored_is_loaded_and_only_the_rest_is_computed(rest: int, is_below: str) -> None:
    """A prompt that fills its last page computes that page: the logits of its last token are wanted."""
    tiers = tiers_of(has_files=is_below == "files")
    drive = calm_drive(tiers)
    prompt = text(1, 5 * BLOCK_SIZE + rest)
    store(drive, prompt)
    if is_below == "files":
        tiers.cpu.clear()
    request = ask(drive, prompt, max_tokens=9)
    settle(drive)
    num_loaded = (5 if rest else 4) * BLOCK_SIZE
    expected = ReusedTokens(computed=len(prompt) - num_loaded)
    setattr(expected, is_below, num_loaded)
    assert request.reused == drive.scheduler.reused == expected


def test_what_the_pools_have_is_not_loaded() -> None:
    tiers = tiers_of()
    drive = calm_drive(tiers)
    prompt = text(1, 30)
    store(drive, prompt)
    store(drive, prompt[:17])
    drive.scheduler.reset_prefix_cache()
    run_one(drive, make_request("short", prompt[:17], 1))
    settle(drive)
    tiers.loaded.clear()
    request = ask(drive, prompt)
    settle(drive)
    assert request.reused == ReusedTokens(device=16, cpu_tier=12, computed=2)
    assert [[(part.first_page, len(part.blocks)) for part in load] for load in tiers.loaded] == [[(4, 3), (4, 3)]]


def on_the_host_only(tiers: PaperTiers, prompt: list[int]) -> Drive:
    """Rows of most of the prompt are on the host, and its index keys nowhere above the tiers."""
    drive = Drive(small_plan(8, host_blocks=90, index_blocks=90), seed=0, tiers=tiers)
    run_one(drive, make_request("before", prompt, 2))
    settle(drive)
    drive.scheduler.kv.index_pool.forget_all()
    slab = drive.scheduler.kv.slab
    slab.release(slab.allocate(slab.num_free))
    tiers.loaded.clear()
    return drive


@pytest.mark.parametrize("groups", [BOTH, (GroupKind.INDEXER,)])
def test_of_rows_that_the_host_has_only_the_index_keys_are_loaded(groups: tuple[GroupKind, ...]) -> None:
    prompt = text(1, 61)
    tiers = tiers_of(groups=groups)
    drive = on_the_host_only(tiers, prompt)
    hit = drive.scheduler.coordinator.find_prefix(
        drive.scheduler.coordinator.prefix_keys(make_request("", prompt, 1).tokens), look_beyond=True
    )
    on_host = len(hit.host_beyond)
    assert (hit.num_pages, on_host > 8) == (0, True)
    request = ask(drive, prompt, max_tokens=4)
    settle(drive)
    kinds = Counter[GroupKind]()
    for load in tiers.loaded:
        kinds.update({part.group: len(part.blocks) for part in load})
    # What the host lacks comes from the tiers if they keep rows, and is computed otherwise.
    num_loaded = 15 if GroupKind.RESIDENT in groups else on_host
    assert kinds == Counter({GroupKind.INDEXER: num_loaded, GroupKind.RESIDENT: num_loaded - on_host})
    assert request.reused == ReusedTokens(cpu_tier=num_loaded * BLOCK_SIZE, computed=61 - num_loaded * BLOCK_SIZE)


@pytest.mark.parametrize("fails", [False, True])
def test_host_pages_are_held_while_their_index_keys_are_loaded_and_given_back_if_they_fail(fails: bool) -> None:
    prompt = text(1, 61)
    tiers = tiers_of(groups=(GroupKind.INDEXER,))
    drive = on_the_host_only(tiers, prompt)
    host_pool = drive.scheduler.coordinator.host_pool
    assert host_pool.num_leased == 0
    tiers.weather = Weather(min_delay=3, fails=float(fails))
    request = ask(drive, prompt, max_tokens=4)
    drive.step()
    held = host_pool.num_leased
    assert held > 8
    while drive.scheduler.num_open:
        drive.step()
    assert drive.scheduler.coordinator.arrivals.claimants() == (), "given back, or adopted"
    assert request.pages is not None
    if fails:
        assert request.tiers_failed
    else:
        assert request.pages.num_host_backed == held, "all of them were adopted"
    settle(drive)
    num_loaded = 0 if fails else held * BLOCK_SIZE
    assert request.reused == ReusedTokens(cpu_tier=num_loaded, computed=61 - num_loaded)


def test_a_prefix_larger_than_slab_and_cpu_tier_flows_through_in_pieces() -> None:
    tiers = PaperTiers(random.Random(0), num_rows=5, weather=CALM)
    drive = Drive(small_plan(8, host_blocks=90, index_blocks=90), seed=0, tiers=tiers)
    prompt = text(1, 75)
    store(drive, prompt)
    request = ask(drive, prompt, max_tokens=3)
    settle(drive)
    assert request.reused.computed == 3
    assert request.reused.files > 60
    assert len(tiers.loaded) >= 4


def test_a_request_that_is_told_to_ask_again_computes_when_its_patience_ends_and_others_go_on() -> None:
    tiers = tiers_of(has_files=True)
    drive = calm_drive(tiers)
    prompt = text(1, 40)
    store(drive, prompt)
    tiers.cpu.clear()
    tiers.weather = Weather(min_delay=1000, patience=7)
    request, other = ask(drive, prompt), ask(drive, text(2, 12), max_tokens=6, name="other")
    for _ in range(6):
        drive.step()
        assert request.num_computed == 0
    assert other.status is RequestStatus.FINISHED
    settle(drive)
    assert request.reused == ReusedTokens(computed=40)


def test_what_a_waiting_request_could_use_is_brought_up_and_nothing_is_held_for_it() -> None:
    tiers = tiers_of(has_files=True)
    drive = calm_drive(tiers, max_running=1)
    prompt = text(1, 40)
    store(drive, prompt)
    tiers.cpu.clear()
    ask(drive, text(2, 40), max_tokens=20, name="runs")
    waits = ask(drive, prompt, name="waits")
    for _ in range(10):
        drive.step()
        assert "waits" not in tiers._claims
    assert waits.status is RequestStatus.WAITING
    assert len({key for _, key in tiers.cpu} & set(waits.prefix_keys or ())) >= 9
    tiers.files.clear()
    settle(drive)
    assert waits.reused.computed <= 4, "it came from memory, although the files are gone"


@pytest.mark.parametrize("num_known", [13, 25, 53])
def test_a_hit_that_was_shortened_while_the_request_waited_is_taken_up_again(num_known: int) -> None:
    """It waits for more than the pools have, and is admitted with less of that than they have: room is scarce."""
    tiers = tiers_of(has_files=True)
    drive = Drive(small_plan(6, host_blocks=90, index_blocks=90), seed=0, tiers=tiers)
    prompt = text(1, 61)
    store(drive, prompt)
    run_one(drive, make_request("before", prompt[:num_known], 1))
    settle(drive)
    tiers.cpu.clear()
    tiers.loaded.clear()
    tiers.weather = Weather(min_delay=1000, patience=3)
    request = ask(drive, prompt)
    settle(drive)
    assert tiers.loaded == []
    known = num_known // BLOCK_SIZE * BLOCK_SIZE
    assert (request.reused.total, request.reused.computed) == (61, 61 - known)


def test_a_load_that_failed_is_computed_and_not_tried_again() -> None:
    tiers = tiers_of()
    drive = calm_drive(tiers)
    prompt = text(1, 40)
    store(drive, prompt)
    tiers.weather = Weather(fails=1.0)
    request = ask(drive, prompt)
    settle(drive)
    assert request.reused == ReusedTokens(computed=40)
    assert len(tiers.loaded) == 1


class FickleTiers(PaperTiers):
    """Withdraw the first `num_withdrawn` promises and keep the others."""

    num_withdrawn = 0

    def begin_load(self, request_id: str, keys: Sequence[bytes], pages: Sequence[GroupPages]) -> TicketId | None:
        self.weather = Weather(max_delay=0, withdrawn=float(self.counts["withdrawn"] < self.num_withdrawn))
        return super().begin_load(request_id, keys, pages)


@pytest.mark.parametrize(("num_withdrawn", "num_loaded"), [(1, 36), (2, 0)])
def test_a_promise_that_is_withdrawn_is_asked_for_once_more(num_withdrawn: int, num_loaded: int) -> None:
    tiers = FickleTiers(random.Random(0), has_files=False)
    drive = calm_drive(tiers)
    prompt = text(1, 40)
    store(drive, prompt)
    tiers.num_withdrawn = num_withdrawn
    request = ask(drive, prompt)
    settle(drive)
    assert tiers.counts["withdrawn"] == num_withdrawn
    assert request.reused == ReusedTokens(cpu_tier=num_loaded, computed=40 - num_loaded)


@pytest.mark.parametrize("comes", [True, False])
def test_an_overdue_load_keeps_its_blocks_to_its_end_and_nobody_waits_for_it(comes: bool) -> None:
    tiers = tiers_of()
    drive = calm_drive(tiers)
    prompt = text(1, 40)
    store(drive, prompt)
    tiers.weather = Weather(max_delay=0, overdue=1.0, fails=float(not comes))
    request = ask(drive, prompt, max_tokens=4)
    drive.step()
    tiers.weather = CALM
    (copy,) = [copy for copy in tiers._open if copy.is_load]
    copy.due = 1000
    while request.status is not RequestStatus.FINISHED:
        drive.step()
    assert request.reused == ReusedTokens(computed=40)
    kv = drive.scheduler.kv
    blocks = {part.group: part.blocks for part in copy.pages}
    assert all(kv.slab.leases(block) == 1 for block in blocks[GroupKind.RESIDENT])
    assert all(kv.index_pool.leases(block) == 1 for block in blocks[GroupKind.INDEXER])
    drive.scheduler.reset_prefix_cache()
    copy.due = 0
    settle(drive)
    assert not any(kv.slab.leases(block) for block in blocks[GroupKind.RESIDENT])
    keys = drive.scheduler.coordinator.prefix_keys(request.tokens)
    assert drive.scheduler.coordinator.find_prefix(keys).num_pages == 0, "what was forgotten stays forgotten"


def test_what_comes_for_nobody_any_more_is_found_by_the_next() -> None:
    tiers = tiers_of()
    drive = calm_drive(tiers)
    prompt = text(1, 40)
    store(drive, prompt)
    tiers.weather = Weather(min_delay=3)
    request = ask(drive, prompt)
    drive.step()
    drive.scheduler.finish(request)
    settle(drive)
    again = ask(drive, prompt, name="again")
    settle(drive)
    assert again.reused == ReusedTokens(device=36, computed=4)


def test_a_preempted_request_loads_again_what_it_lost() -> None:
    tiers = tiers_of()
    drive = calm_drive(tiers)
    prompt = text(1, 40)
    store(drive, prompt)
    request = ask(drive, prompt, max_tokens=6)
    while request.num_output < 3:
        drive.step()
    drive.scheduler._send_back(request)
    assert request.reused == ReusedTokens()
    drive.scheduler.reset_prefix_cache()
    settle(drive)
    assert request.reused.total == 40
    assert request.reused.cpu_tier >= 36
    assert drive.scheduler.reused == ReusedTokens(cpu_tier=36, computed=4), "a prompt is counted once"


def test_two_prompts_of_60_percent_of_the_host_pool_each_come_one_after_the_other() -> None:
    tiers = tiers_of()
    host_blocks = 21
    drive = Drive(small_plan(7, host_blocks, index_blocks=90), seed=0, tiers=tiers)
    prompts = [text(seed, 12 * BLOCK_SIZE + 1) for seed in (1, 2)]
    store(drive, *prompts)
    one, two = (ask(drive, prompt, 6, f"r{number}") for number, prompt in enumerate(prompts))
    assert 12 / (host_blocks - 1) == 0.6
    together = 0
    while drive.scheduler.has_work:
        drive.step()
        together += {one.request_id, two.request_id} <= drive.scheduler.running.keys() and two.num_computed > 40
        assert drive.num_steps < 1000
    assert one.reused.cpu_tier == two.reused.cpu_tier == 48
    assert together == 0


@pytest.mark.parametrize("is_stored", [True, False])
def test_identical_prompts_at_once_read_the_same_rows(is_stored: bool) -> None:
    tiers = tiers_of(max_delay=3)
    drive = Drive(small_plan(40, 90, index_blocks=90, max_running=6), seed=0, tiers=tiers)
    prompt = text(1, 33)
    if is_stored:
        store(drive, prompt)
    requests = [ask(drive, prompt, 5, f"r{number}") for number in range(6)]
    settle(drive)
    assert all(request.reused.total == 33 for request in requests)
    computed = [request.reused.computed for request in requests]
    assert computed == [1] * 6 if is_stored else computed[0] == 33


def test_a_page_that_seals_while_copies_are_in_flight_is_stored_as_it_is() -> None:
    tiers = tiers_of(min_delay=9, max_delay=9)
    drive = Drive(small_plan(9, 90, index_blocks=90), seed=0, max_delay=3, tiers=tiers)
    request = ask(drive, text(1, 9), max_tokens=40)
    most_open = most_spills = 0
    while drive.scheduler.has_work:
        drive.step()
        most_open = max(most_open, drive.scheduler.num_open)
        most_spills = max(most_spills, drive.scheduler.coordinator.num_in_flight)
    settle(drive)
    assert (most_open > 1, most_spills > 0) == (True, True)
    assert len(tiers.cpu) == 2 * ((request.num_prompt + 39) // BLOCK_SIZE)


def test_a_hit_that_is_evicted_between_look_up_and_admission_is_loaded_instead() -> None:
    """The look-up of a waiting request found all pages in the pools; somebody else needed the blocks."""
    tiers = tiers_of()
    drive = Drive(small_plan(14, 60, index_blocks=90, max_running=1), seed=0, tiers=tiers)
    prompt = text(1, 33)
    run_one(drive, make_request("before", prompt, 1))
    settle(drive)
    ask(drive, text(2, 40), 12, "evicts")
    request = ask(drive, prompt, 3)
    drive.step()
    asking = drive.scheduler.loads._asking[request.request_id]  # type: ignore[union-attr]
    assert asking.have == (8, 8)
    settle(drive)
    assert asking.have != request.reused
    assert request.reused.total == 33
    assert request.reused.cpu_tier > 0


@pytest.mark.parametrize("when", ["loading", "waiting", "decoding"])
def test_nothing_of_the_former_weights_is_read_after_a_swap(when: str) -> None:
    tiers = tiers_of(max_delay=3, min_delay=3)
    drive = calm_drive(tiers, max_running=1 if when == "waiting" else 4)
    prompt = text(1, 40)
    store(drive, prompt)
    if when == "waiting":
        ask(drive, text(2, 10), 20, "runs")
    request = ask(drive, prompt, max_tokens=8)
    for _ in range(2 if when != "decoding" else 8):
        drive.step()
    assert (request.num_output > 0) == (when == "decoding")
    tokens = list(request.tokens)
    drive.swap_weights()
    settle(drive)
    assert list(request.tokens[: len(tokens)]) == tokens
    assert request.reused == ReusedTokens(computed=40)
    again = ask(drive, prompt, name="again")
    settle(drive)
    assert again.reused.computed == 4, "what the new weights computed is kept"


def test_with_tiers_forgotten_too_a_prompt_is_computed_anew() -> None:
    tiers = tiers_of()
    drive = calm_drive(tiers)
    prompt = text(1, 40)
    store(drive, prompt)
    drive.scheduler.reset_prefix_cache(tiers=True)
    request = ask(drive, prompt)
    settle(drive)
    assert request.reused == ReusedTokens(computed=40)


def test_what_there_was_no_room_for_is_offered_once_more_at_the_end() -> None:
    tiers = tiers_of(dropped=1.0)
    drive = calm_drive(tiers)
    request = ask(drive, text(1, 24), max_tokens=6)
    while request.num_output < 5:
        drive.step()
    assert tiers.cpu == {}
    tiers.weather = CALM
    settle(drive)
    assert tiers.offered == [("asks", 0, 3), ("asks", 3, 6), ("asks", 6, 7), ("asks", 0, 7)]
    assert len(tiers.cpu) == 2 * 7


def test_without_a_source_nothing_is_asked_and_nothing_is_open() -> None:
    drive = Drive(small_plan(), seed=0)
    request = ask(drive, text(1, 20))
    drain(drive)
    assert (request.asks_tiers, drive.scheduler.num_open) == (False, 0)
    assert request.reused == ReusedTokens(computed=20)


def test_an_event_of_a_ticket_that_is_not_open_is_refused_by_its_number() -> None:
    tiers = tiers_of()
    drive = calm_drive(tiers)
    tiers._events.append(TierEvent(TicketId(77), TierOutcome.DONE))
    with pytest.raises(ProtocolError, match="ticket 77 is done, and is not open"):
        drive.scheduler.schedule()


def test_a_request_that_runs_alone_waits_for_blocks_that_a_late_copy_holds() -> None:
    tiers = tiers_of()
    drive = Drive(small_plan(7, 40, index_blocks=90), seed=0, tiers=tiers)
    prompt = text(1, 40)
    store(drive, prompt)
    tiers.weather = Weather(max_delay=0, overdue=1.0)
    request = ask(drive, prompt, max_tokens=4)
    drive.step()
    (copy,) = [copy for copy in tiers._open if copy.is_load]
    tiers.weather = CALM
    copy.due = 40
    for _ in range(20):
        drive.step()
    assert request.status is RequestStatus.RUNNING
    assert drive.scheduler.num_preemptions == 0
    copy.due = 0
    settle(drive)
    assert request.status is RequestStatus.FINISHED
