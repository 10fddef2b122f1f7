"""Prompts that are alike and come together are computed once, nobody waits for ever, and everyone says the same."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.config import CachePlan
from hisparse.engine import LoadedModel
from hisparse.engine.pages_underway import PagesUnderway
from hisparse.engine.request import Request, RequestStatus
from hisparse.engine.reuse import ReusedTokens
from hisparse.engine.waiting_queue import WaitingQueue
from hisparse.errors import CapacityError, InvariantError
from hisparse.protocol import Table
from hisparse.residency import HiSparseCoordinator
from tests.engine.paper_tiers import PaperTiers, Weather
from tests.engine.paper_worker import BLOCK_SIZE, Drive, small_plan
from tests.engine.parity import Case, assert_parity, prompt, run
from tests.engine.requests import drain, make_request
from tests.engine.watched_drive import WatchedDrive

TEXT = [random.Random(3).randrange(2) for _ in range(60)]
PATIENCE = 150
"""Steps in a row that may compute nothing, with late copies and tiers that are late."""


def wait_for_nobody(patch: pytest.MonkeyPatch) -> None:
    """Have everybody compute what it lacks, as if the index were empty."""
    patch.setattr(PagesUnderway, "last_of", lambda self, keys: None)


def ask(drive: Drive, tokens: Sequence[int], name: str, max_tokens: int = 3) -> Request:
    request = make_request(name, list(tokens), max_tokens)
    drive.scheduler.add(request)
    return request


def parked(drive: Drive) -> list[str]:
    """Names of the requests that wait for somebody else's pages."""
    waiting = drive.scheduler.waiting
    return [request.request_id for request in waiting if request not in waiting.ready]


# Once instead of four times.


@pytest.mark.parametrize("chunk", [60, 100, 1000])
def test_four_prompts_at_once_are_computed_once(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def computed() -> list[int]:
        drive = WatchedDrive(small_plan(40, 90, index_blocks=90), seed=0, chunk=chunk)
        requests = [ask(drive, TEXT[:42], f"r{number}") for number in range(4)]
        drain(drive)
        assert all(request.reused.total == 42 for request in requests)
        return [request.reused.computed for request in requests]

    assert computed() == [42, 2, 2, 2]
    wait_for_nobody(monkeypatch)
    assert sum(computed()) > 2 * 42, "the control computes what the first of them computes, too"


def test_a_beginning_that_two_prompts_share_is_computed_once_and_what_differs_by_both() -> None:
    drive = WatchedDrive(small_plan(40, 90, index_blocks=90), seed=0, chunk=1000)
    one = ask(drive, TEXT[:42], "one")
    other = ask(drive, TEXT[:21] + [1 - token for token in TEXT[21:42]], "other")
    drain(drive)
    assert one.reused == ReusedTokens(computed=42)
    assert other.reused == ReusedTokens(device=20, computed=22)


def test_whoever_is_alone_with_its_prompt_passes() -> None:
    drive = WatchedDrive(small_plan(40, 90, index_blocks=90), seed=0, chunk=1000)
    ask(drive, TEXT[:42], "one")
    ask(drive, TEXT[:42], "same")
    ask(drive, [1 - token for token in TEXT[:42]], "other")
    drive.step()
    assert drive.admitted == ["one", "other"]
    drive.step()
    assert drive.admitted == ["one", "other", "same"]
    assert drive.num_passed == 1


def test_a_page_on_its_way_to_the_host_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slab is smaller than the prompt: when its last page is there, copies of earlier ones are still under way."""

    def computed() -> int:
        total = 0
        for seed in range(12):
            drive = WatchedDrive(small_plan(7, 90, index_blocks=90), seed, max_delay=3, chunk=1000)
            for number in range(3):
                ask(drive, TEXT, f"r{number}")
            drain(drive)
            total += drive.scheduler.reused.computed
        return total

    least = 12 * (60 + 2 * BLOCK_SIZE)
    assert computed() == least
    monkeypatch.setattr(HiSparseCoordinator, "is_being_copied", lambda self, key: False)
    assert computed() > least


# Owners that leave.


def stalled(max_running: int = 4) -> tuple[Drive, PaperTiers]:
    """A drive in which "owner" runs and waits for its first pages from below, and "same" waits for it."""
    tiers = PaperTiers(random.Random(0), has_files=False, weather=Weather(max_delay=0))
    plan = small_plan(40, 90, index_blocks=90, max_running=max_running)
    drive = WatchedDrive(plan, seed=0, chunk=1000, tiers=tiers)
    ask(drive, TEXT[:42], "before")
    drain(drive)
    while drive.scheduler.num_open:
        drive.step()
    drive.scheduler.reset_prefix_cache()
    tiers.weather = Weather(min_delay=8, max_delay=8)
    for name in ("owner", "same"):
        ask(drive, TEXT[:42], name)
    drive.step()
    assert drive.admitted == ["before", "owner"]
    assert parked(drive) == ["same"]
    return drive, tiers


def test_whoever_waits_for_a_page_that_is_loaded_finds_it_when_it_came() -> None:
    drive, tiers = stalled()
    (same,) = drive.scheduler.waiting
    drain(drive)
    assert same.reused == ReusedTokens(device=40, computed=2)
    assert len(tiers.loaded) == 1


@pytest.mark.parametrize("how", ["aborted", "preempted", "preempted for good", "forgotten"])
def test_when_the_owner_leaves_the_next_one_owns_the_pages(how: str) -> None:
    drive, _ = stalled()
    scheduler = drive.scheduler
    owner, (same,) = scheduler.running["owner"], scheduler.waiting
    another = ask(drive, TEXT[:42], "another")
    drive.step()
    assert parked(drive) == ["same", "another"]
    if how == "aborted":
        scheduler.finish(owner)
    elif how == "forgotten":
        scheduler.reset_prefix_cache(tiers=True)
    else:
        scheduler._send_back(owner)
        if how == "preempted for good":
            scheduler.finish(owner)
    assert parked(drive) == []
    drive.step()
    heir = owner if how == "preempted" else same
    assert heir.status is RequestStatus.RUNNING
    assert another.status is RequestStatus.WAITING
    drain(drive)
    computed = heir.reused.computed + another.reused.computed
    assert computed <= 42 + 2
    assert another.reused.computed == 2


def test_whoever_waits_is_woken_once_by_the_last_page_that_it_shares() -> None:
    drive, _ = stalled()
    underway, coordinator = drive.scheduler.underway, drive.scheduler.coordinator
    for num_shared in (0, 1, 5, 10):
        tokens = TEXT[: num_shared * BLOCK_SIZE] + [1 - token for token in TEXT[num_shared * BLOCK_SIZE : 42]]
        keys = coordinator.prefix_keys(make_request("", tokens, 1).tokens)
        assert underway.last_of(keys) == (keys[num_shared - 1] if num_shared else None)


def test_a_request_that_ends_while_it_waits_is_not_woken() -> None:
    drive, _ = stalled()
    (same,) = drive.scheduler.waiting
    drive.scheduler.finish(same)
    assert not drive.scheduler.waiting.awaited
    drain(drive)
    assert drive.admitted == ["before", "owner"]


# Whatever happens.


@dataclass(frozen=True)
class Event:
    """Before a step. `kind`: "ask" `times` for a prompt of `length` tokens, all but the last `own` of text `which`;
    "abort" or "preempt" the request number `which`; "forget" what the pools hold; "step" without anything before."""

    kind: str
    which: int = 0
    length: int = 1
    own: int = 0
    max_tokens: int = 1
    times: int = 1


@dataclass(frozen=True)
class Story:
    """What is asked of a scheduler, over which pools and how late reports are."""

    plan: CachePlan
    chunk: int
    delay: int
    weather: Weather | None
    events: tuple[Event, ...]


class Reader(WatchedDrive):
    """Each next token is read out of the rows of the whole text, so it tells if they are not what they should be."""

    def _take_token(self, request: Request) -> bool:
        page, row = divmod(len(request.tokens) - 1, BLOCK_SIZE)
        worker = self.workers[0]
        content = worker.slab[worker.tables[Table.RESIDENT][request.slot, page]][row]
        request.tokens.append(content >> 3 & 1)
        if request.num_output < request.params.max_tokens:
            return False
        self.scheduler.finish(request)
        return True


TEXTS = [[random.Random(seed).randrange(2) for _ in range(80)] for seed in range(3)]


def tell(story: Story, seen: Counter[str] | None = None) -> list[Request]:
    """All requests of a story, which have ended."""
    tiers = None if story.weather is None else PaperTiers(random.Random(1), num_rows=12, weather=story.weather)
    drive = Reader(story.plan, 0, story.delay, chunk=story.chunk, tiers=tiers)
    requests: list[Request] = []
    for event in story.events:
        _let_happen(event, drive, requests)
        drive.step()
        if seen is not None:
            seen["parked"] += len(parked(drive))
    drain_patiently(drive)
    if seen is not None:
        seen["passed"] += drive.num_passed
        seen["preempted"] += drive.scheduler.num_preemptions
        seen["computed"] += drive.scheduler.reused.computed
    assert all(request.status is RequestStatus.FINISHED for request in requests)
    assert not drive.scheduler.waiting.awaited
    return requests


def _let_happen(event: Event, drive: Drive, requests: list[Request]) -> None:
    scheduler = drive.scheduler
    if event.kind == "ask":
        shared = TEXTS[event.which % len(TEXTS)][: max(0, event.length - event.own)]
        rng = random.Random(event.length)
        tokens = shared + [rng.randrange(2) for _ in range(event.length - len(shared))]
        for _ in range(event.times):
            request = make_request(f"r{len(requests)}", tokens, event.max_tokens)
            try:
                scheduler.add(request)
            except CapacityError:
                return
            requests.append(request)
    elif event.kind == "forget":
        scheduler.reset_prefix_cache()
    elif requests and event.kind in ("abort", "preempt"):
        request = requests[event.which % len(requests)]
        if event.kind == "abort":
            scheduler.finish(request)
        elif request.status is RequestStatus.RUNNING:
            scheduler._send_back(request)


def drain_patiently(drive: Drive) -> None:
    idle = 0
    while drive.scheduler.has_work:
        idle = 0 if drive.step() else idle + 1
        assert idle <= PATIENCE, f"nothing was computed for {idle} steps"
        assert drive.num_steps < 20_000


ASKS = st.builds(
    Event,
    st.just("ask"),
    st.integers(0, 2),
    st.integers(1, 60),
    st.sampled_from([0, 0, 1, 5, 20]),
    st.integers(1, 12),
    st.sampled_from([1, 1, 2, 4]),
)
EVENTS = st.one_of(
    ASKS,
    ASKS,
    ASKS,
    st.builds(Event, st.sampled_from(["abort", "preempt"]), st.integers(0, 20)),
    st.just(Event("forget")),
    st.just(Event("step")),
)
PLANS = st.builds(
    small_plan,
    st.sampled_from([6, 7, 9, 14, 30]),
    st.sampled_from([17, 22, 40, 90]),
    st.sampled_from([21, 30, 80]),
    st.sampled_from([1, 2, 4, 6]),
)
WEATHERS = st.sampled_from(
    [None, None, Weather(), Weather(max_delay=3, fails=0.2, overdue=0.2, withdrawn=0.1, dropped=0.2)]
)
STORIES = st.builds(
    Story,
    PLANS,
    st.sampled_from([3, 8, 40, 200]),
    st.sampled_from([0, 1, 3]),
    WEATHERS,
    st.lists(EVENTS, max_size=25).map(tuple),
)


def assert_nobody_sees_the_index(story: Story) -> None:
    """Everybody ends, and says what it says when nobody waits for anybody; who was aborted, as far as it came."""
    with_index = tell(story)
    with pytest.MonkeyPatch.context() as patch:
        wait_for_nobody(patch)
        without = tell(story)
    both = list(zip(with_index, without, strict=True))
    for one, other in both:
        num_tokens = min(len(one.tokens), len(other.tokens))
        assert one.tokens[:num_tokens] == other.tokens[:num_tokens], f"{one.request_id} says something else"
    if not any(event.kind == "abort" for event in story.events):
        assert all(one.num_output == other.num_output == one.params.max_tokens for one, other in both)


@settings(max_examples=120)
@given(STORIES)
def test_whatever_happens_everybody_ends_and_nobody_sees_the_index(story: Story) -> None:
    assert_nobody_sees_the_index(story)


def random_story(seed: int) -> Story:
    """Many prompts that are alike, over pools that hold a few of them."""
    rng = random.Random(seed)
    events: list[Event] = []
    for _ in range(20):
        kind = rng.choice(["ask", "ask", "abort", "preempt", "step", "step"])
        own, length, times = rng.choice([0, 0, 1, 5]), rng.randint(20, 60), rng.choice([1, 2, 4])
        events.append(Event(kind, rng.randrange(20), length, own, rng.randint(1, 12), times))
    plan = small_plan(rng.choice([7, 9, 14, 30]), rng.choice([22, 40, 90]), rng.choice([30, 80]), rng.choice([4, 6]))
    return Story(plan, rng.choice([40, 200]), rng.choice([0, 1, 3]), rng.choice([None, Weather()]), tuple(events))


def test_the_stories_reach_what_they_are_meant_to_reach() -> None:
    seen, without = Counter[str](), Counter[str]()
    for seed in range(40):
        tell(random_story(seed), seen)
    with pytest.MonkeyPatch.context() as patch:
        wait_for_nobody(patch)
        for seed in range(40):
            tell(random_story(seed), without)
    assert min(seen["parked"] / 10, seen["passed"], seen["preempted"]) > 10, seen
    assert without["parked"] == without["passed"] == 0
    assert seen["computed"] < without["computed"], (seen, without)


# The same with one rule broken.


def _never_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "release", lambda self, keys: None)
    patch.setattr(PagesUnderway, "assert_invariants", lambda self, running: None)


def _keep_what_owners_lacked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagesUnderway, "leave", lambda self, request: self._next.pop(request, None))
    patch.setattr(PagesUnderway, "assert_invariants", lambda self, running: None)


def _pass_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "first", property(lambda self: self._ready[-1] if self._ready else None))


@pytest.mark.parametrize("damage", [_never_release, _keep_what_owners_lacked, _pass_everybody])
def test_control_a_broken_rule_is_noticed(damage: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        with pytest.raises((AssertionError, InvariantError)):
            list(map(tell, map(random_story, range(60))))


# The engine.


@pytest.mark.parametrize(("spare_blocks", "copy_delay"), [(None, 0), (40, 1), (6, 3)])
def test_four_long_prompts_at_once_say_what_stock_says_for_one_prompts_work(
    tiny: LoadedModel, spare_blocks: int | None, copy_delay: int
) -> None:
    length = 500
    case = Case((prompt(9, length),) * 4, 12, spare_blocks, chunk=2100, max_running=4, copy_delay=copy_delay)
    outcome = run(tiny, case)
    assert_parity(tiny, case, outcome)
    reused = outcome.stats.reused
    assert reused.total == 4 * length
    assert length <= reused.computed <= length + 3 * case.block_size


def test_control_without_the_index_four_prompts_are_four_prompts_work(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_nobody(monkeypatch)
    case = Case((prompt(9, 500),) * 4, max_tokens=2, spare_blocks=None, chunk=2100, max_running=4)
    outcome = run(tiny, case)
    assert_parity(tiny, case, outcome)
    assert outcome.stats.reused == ReusedTokens(computed=2000)
