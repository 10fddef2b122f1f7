"""The offload manager beside a naive model, while workers, the tier below, threads and time do what they like.

The model knows which chunks are ready, coming and held, from the outside alone. Only the choice of victims is the
manager's: a chunk that the model thinks ready may be gone, if an eviction was counted and nobody held it.
Contents are checked by the workers, who see a wrong value when a block was reused, mixed up or published too early.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hisparse.errors import InvariantError, ProtocolError
from hisparse.offload.cpu_tier import Entry, EntryState
from hisparse.offload.lookups import MIN_WAITS
from hisparse.offload.messages import Lookup, LookupStatus, OffloadReport, TransferKind, TransferOutcome
from hisparse.protocol import TransferId
from tests.offload.offload_world import World

NAME_LIST = ["r0", "r1", "r2", "r3"]
NAMES = st.sampled_from(NAME_LIST)
PICK = st.integers(0, 1 << 16)
DEADLINE_S = 3.0
LIMIT_S = 4 * DEADLINE_S
PROMPTS = [[f"{a}{b}{i}".encode() if i > 1 else f"{a}{i}".encode() for i in range(5)] for a in "xy" for b in "pq"]
"""Four prompts of five chunks; two and two share their first two."""


@dataclass(eq=False)
class Copy:
    """One chunk in one block, as the model sees it. `entry`: the manager's, to tell it from a later one of its key."""

    key: bytes
    entry: Entry | None
    state: str = "coming"


@dataclass(eq=False)
class Moving:
    """A transfer on its way."""

    kind: TransferKind
    request: str | None
    copies: list[Copy]
    left: int
    failed: bool = False
    overdue: bool = False
    due_s: float | None = None


@dataclass(eq=False)
class Asking:
    """A request: its claims, what it loaded or stored, how long it waits, and whether a load of it failed.

    `progress_s`: its last look-up before which anything had got further anywhere, `num_events` of it; `num_waits`: how
    often it was told to wait since. `waited_s`: all in all, up to the look-up at `asked_s`.
    """

    claims: list[Copy] = field(default_factory=list)
    chain: set[bytes] = field(default_factory=set)
    ahead: bool = False
    progress_s: float | None = None
    num_events: int = 0
    num_waits: int = 0
    waited_s: float = 0.0
    asked_s: float = 0.0
    is_waiting: bool = False
    gave_up: bool = False
    loading: TransferId | None = None

    def ask(self, now_s: float, num_events: int) -> None:
        """A look-up: note what time it is for the request."""
        self.waited_s += now_s - self.asked_s if self.is_waiting else 0.0
        self.asked_s = now_s
        if self.progress_s is None or num_events != self.num_events:
            self.progress_s, self.num_waits = now_s, 0

    def may_wait(self, now_s: float) -> bool:
        assert self.progress_s is not None
        is_late = now_s >= self.progress_s + DEADLINE_S and self.num_waits >= MIN_WAITS
        return not is_late and self.waited_s < LIMIT_S

    def heard(self, waits: bool, num_events: int) -> None:
        self.is_waiting, self.num_events = waits, num_events
        self.num_waits += waits


class Model:
    """What must be so, whatever the manager's insides."""

    def __init__(self) -> None:
        self.present: dict[bytes, Copy] = {}
        self.moving: dict[TransferId, Moving] = {}
        self.below: list[Copy] = []
        """Chunks that the tier below reads or fills, in the order of its work."""
        self.requests: dict[str, Asking] = {}

    def held(self) -> set[Copy]:
        claims = [copy for request in self.requests.values() for copy in request.claims]
        return {*claims, *self.below, *(copy for moving in self.moving.values() for copy in moving.copies)}

    def withdraw(self, copy: Copy) -> None:
        copy.state = "gone"
        if self.present.get(copy.key) is copy:
            del self.present[copy.key]

    def run(self, keys: list[bytes]) -> list[Copy]:
        run: list[Copy] = []
        for key in keys:
            if key not in self.present:
                break
            run.append(self.present[key])
        return run

    def give_up(self, transfer_id: TransferId, moving: Moving) -> None:
        request = self.requests.get(moving.request or "")
        if request is not None and request.loading == transfer_id:
            request.gave_up = True
            request.loading = None


@settings(max_examples=150, stateful_step_count=60, deadline=None)
class OffloadMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 8),
        num_workers=st.integers(1, 3),
        has_tier=st.booleans(),
        policy=st.sampled_from(["lru", "arc"]),
        limit=st.integers(1, 6),
        is_kept=st.booleans(),
    )
    def start(self, num_blocks: int, num_workers: int, has_tier: bool, policy: str, limit: int, is_kept: bool) -> None:
        self.num_blocks = num_blocks
        self.world = World(
            num_blocks,
            num_workers,
            has_tier,
            policy=policy,
            max_stores=limit,
            max_tier_writes=limit,
            max_tier_loads=limit,
            lookup_deadline_s=DEADLINE_S,
            lookup_limit_s=LIMIT_S,
            transfer_deadline_s=2 * DEADLINE_S,
        )
        self.world.is_stepping = False
        for key in {key for prompt in PROMPTS for key in prompt if is_kept}:
            self.world.tier.kept[key] = {worker: (key, worker) for worker in range(num_workers)}
        self.last: dict[str, tuple[int, int]] = {}
        """Prompt and length of the last look-up of each request."""
        self.model = Model()
        self.num_evicted = 0
        self.handed_out_s = float("-inf")
        self.num_events = 0
        """Anything that a request may have waited for."""

    # What requests do

    @rule(name=NAMES, prompt=PICK, length=st.sampled_from([1, 2, 3, 5, 5, 5]))
    def lookup(self, name: str, prompt: int, length: int) -> None:
        whole = PROMPTS[prompt % len(PROMPTS)]
        keys = whole[:length]
        self.last[name] = (prompt, length)
        request = self.model.requests.setdefault(name, Asking())
        if request.loading is not None:
            with pytest.raises(InvariantError, match="while transfer"):
                self.world.manager.lookup(name, keys)
            return
        now_s = self.world.now_s
        if request.ahead:
            request.ahead, request.progress_s, request.is_waiting = False, None, False
        request.ask(now_s, self.num_events)
        # Of former claims only those are held all the while that are in this chain too.
        run = self.model.run(keys)
        request.claims = [copy for copy in request.claims if copy in run and not request.gave_up]
        answer = self.ask(lambda: self.world.manager.lookup(name, whole, length))
        self.see_what_changed()
        run = self.model.run(keys)
        ready = next((i for i, copy in enumerate(run) if copy.state != "ready"), len(run))
        waits = answer.status in (LookupStatus.PENDING, LookupStatus.RETRY)
        if waits:
            # What it began itself has only now begun.
            assert request.may_wait(now_s) or request.num_events != self.num_events
            assert not request.gave_up
            assert ready < len(keys)
            assert answer.num_chunks == ready
            request.claims = run
        elif request.gave_up:
            assert answer == (LookupStatus.MISS, 0)
            request.claims = []
        else:
            assert answer == (LookupStatus.HIT if ready else LookupStatus.MISS, ready)
            request.claims = run[:ready]
        request.heard(waits, self.num_events)

    @rule(pick=PICK, seconds=st.sampled_from([0.0, 0.0, 0.5, DEADLINE_S]), is_answered=st.booleans())
    def ask_again(self, pick: int, seconds: float, is_answered: bool) -> None:
        """As requests do: the same once more, in the next step."""
        name = NAME_LIST[pick % len(NAME_LIST)]
        if name in self.last:
            self.wait(seconds)
            if is_answered:
                self.answer_probes()
            self.lookup(name, *self.last[name])

    @rule(name=NAMES, prompt=PICK)
    def lose_patience(self, name: str, prompt: int) -> None:
        """Nothing gets any further, so it is not told to wait for ever."""
        for _ in range(MIN_WAITS + 2):
            self.lookup(name, prompt, 5)
            self.wait(DEADLINE_S)
        request = self.model.requests[name]
        assert request.loading is not None or not request.is_waiting

    @rule(name=NAMES, prompt=PICK)
    def look_ahead(self, name: str, prompt: int) -> None:
        """For a request that does not run: it holds nothing, promises nothing and takes nothing that others want."""
        request = self.model.requests.setdefault(name, Asking())
        if request.loading is not None:
            return
        wanted = set().union(*(other.chain for other in self.model.requests.values()))
        before = dict(self.model.present)
        request.claims = [] if request.gave_up else request.claims
        self.ask(lambda: self.world.manager.lookup(name, PROMPTS[prompt % len(PROMPTS)], ahead=True))
        self.see_what_changed()
        assert all(copy.state != "gone" for key, copy in before.items() if key in wanted)
        assert self.world.manager.cpu.num_ahead <= self.num_blocks // 2
        request.claims, request.ahead = [], True

    def ask(self, lookup: Callable[[], Lookup]) -> Lookup:
        """Look up, and count what is begun by that."""
        tier, executor = self.world.tier, self.world.executor
        before = len(tier.work) + len(executor.tasks)
        answer = lookup()
        self.num_events += len(tier.work) + len(executor.tasks) != before
        return answer

    @rule(name=NAMES, count=st.integers(1, 5))
    def load(self, name: str, count: int) -> None:
        request = self.model.requests.get(name)
        if request is None or request.loading is not None or count > len(request.claims):
            with pytest.raises(InvariantError, match="promised"):
                self.world.manager.prepare_load(name, count)
            return
        copies = request.claims[:count]
        # A claim that came or was withdrawn since is as the manager now sees it.
        if any(copy.state == "coming" for copy in copies):
            with pytest.raises(InvariantError, match="still coming"):
                self.world.manager.prepare_load(name, count)
            return
        transfer_id = self.world.load(name, [copy.key for copy in copies])
        request.claims = []
        assert (transfer_id is None) == any(copy.state == "gone" for copy in copies)
        if transfer_id is not None:
            request.chain |= {copy.key for copy in copies}
            request.loading = transfer_id
            self.begin(transfer_id, TransferKind.LOAD, name, copies)

    @rule(name=NAMES, prompt=PICK, start=st.integers(0, 4), length=st.integers(1, 5))
    def store(self, name: str, prompt: int, start: int, length: int) -> None:
        keys = PROMPTS[prompt % len(PROMPTS)][start : start + length]
        request = self.model.requests.setdefault(name, Asking())
        accepted, transfer_id = self.world.store(name, keys)
        request.chain |= set(keys[:accepted])
        self.num_events += 1
        self.see_what_changed(coming=keys[:accepted])
        begun = [self.model.present[key] for key in self.stored_keys(transfer_id)]
        assert all(key in self.model.present for key in keys[:accepted])
        if transfer_id is not None:
            self.begin(transfer_id, TransferKind.STORE, name, begun)

    def stored_keys(self, transfer_id: TransferId | None) -> list[bytes]:
        if transfer_id is None:
            return []
        transfer, keys = self.world.open[transfer_id]
        return [keys[copy.position] for copy in transfer.chunks]

    def begin(self, transfer_id: TransferId, kind: TransferKind, name: str, copies: list[Copy]) -> None:
        self.model.moving[transfer_id] = Moving(kind, name, copies, self.world.num_workers)

    @rule()
    def step(self) -> None:
        """The workers are given what was begun."""
        self.world.manager.hand_out()
        self.handed_out_s = self.world.now_s
        for moving in self.model.moving.values():
            if moving.due_s is None:
                moving.due_s = self.world.now_s + 2 * DEADLINE_S
        self.hear()

    @rule(name=NAMES, prompt=PICK, is_written=st.booleans())
    def compute(self, name: str, prompt: int, is_written: bool) -> None:
        """A prompt as it usually goes: all of it is computed and stored by all workers, and written below."""
        self.store(name, prompt, 0, 5)
        self.step()
        while self.world.todo:
            self.work(0, True)
        while is_written and self.world.tier.work:
            self.end_below(0, "well")

    @rule(name=NAMES, prompt=PICK, how=st.sampled_from(["well", "well", "miss"]), is_ahead=st.booleans())
    def fetch(self, name: str, prompt: int, how: str, is_ahead: bool) -> None:
        """A prompt that comes a second time: the tier below answers, and what came is loaded."""
        if is_ahead:
            self.look_ahead(name, prompt)
            self.answer_probes()
            self.look_ahead(name, prompt)
        self.lookup(name, prompt, 5)
        self.answer_probes()
        self.ask_again(NAME_LIST.index(name), 0.0, False)
        while self.world.tier.work:
            self.end_below(len(self.world.tier.work) - 1, how)
            how = "well"
        self.ask_again(NAME_LIST.index(name), 0.0, False)
        ready = [copy.state == "ready" for copy in self.model.requests[name].claims]
        if ready and self.model.requests[name].loading is None:
            self.load(name, [*ready, False].index(False) or 1)

    @rule(name=NAMES)
    def finish(self, name: str) -> None:
        self.num_events += 1
        self.world.manager.finish(name)
        self.model.requests.pop(name, None)
        for moving in self.model.moving.values():
            moving.request = None if moving.request == name else moving.request

    @rule()
    def reset(self) -> None:
        self.num_events += 1
        self.world.manager.reset()
        for copy in list(self.model.present.values()):
            self.model.withdraw(copy)

    # What workers do

    @precondition(lambda self: self.world.todo)
    @rule(pick=PICK, goes_well=st.sampled_from([True, True, True, False]))
    def work(self, pick: int, goes_well: bool) -> None:
        transfer_id, worker = sorted(self.world.todo)[pick % len(self.world.todo)]
        (self.world.copy if goes_well else self.world.fail)(transfer_id, worker)
        self.num_events += 1
        moving = self.model.moving[transfer_id]
        moving.left -= 1
        moving.failed |= not goes_well
        if not moving.left:
            del self.model.moving[transfer_id]
            self.end(transfer_id, moving)
        self.hear()

    def end(self, transfer_id: TransferId, moving: Moving) -> None:
        if moving.failed:
            self.model.give_up(transfer_id, moving)
            for copy in moving.copies:
                self.model.withdraw(copy)
        for copy in moving.copies:
            copy.state = "ready" if copy.state == "coming" else copy.state
        request = self.model.requests.get(moving.request or "")
        if request is not None and request.loading == transfer_id:
            request.loading = None
            request.progress_s, request.is_waiting = None, False

    def hear(self) -> None:
        """Take events; model what is overdue, and that each transfer is overdue and over once."""
        overdue = {event[0] for event in self.world.manager.take_events() if event.outcome is TransferOutcome.OVERDUE}
        self.see_work_below(self.model)
        expected = set()
        for transfer_id, moving in self.model.moving.items():
            is_due = moving.due_s is not None and moving.due_s <= self.handed_out_s
            if not moving.overdue and is_due:
                expected.add(transfer_id)
                moving.overdue = True
                self.model.give_up(transfer_id, moving)
                for copy in moving.copies:
                    self.model.withdraw(copy)
        assert overdue == expected

    @rule(transfer=st.integers(-1, 40), worker=st.integers(-1, 3), what=st.sampled_from(["enqueued", "completed"]))
    def report_nonsense(self, transfer: int, worker: int, what: str) -> None:
        transfer_id = TransferId(transfer)
        if what == "enqueued" and (transfer_id, worker) in self.world.todo:
            return
        with pytest.raises(ProtocolError, match=f"worker {worker}"):
            self.world.manager.report(OffloadReport(worker, **{what: (transfer_id,)}))

    # What goes on below, and time

    @rule()
    def answer_probes(self) -> None:
        self.num_events += 1
        self.world.executor.run_all()

    @precondition(lambda self: self.world.tier.work)
    @rule(pick=PICK, how=st.sampled_from(["well", "well", "miss", "error", "lost"]))
    def end_below(self, pick: int, how: str) -> None:
        number = pick % len(self.world.tier.work)
        what, key, _, _ = self.world.tier.work[number]
        if how == "lost":
            self.world.tier.kept.pop(key, None)
        self.num_events += 1
        came = how in ("well", "lost") and key in self.world.tier.kept
        self.world.tier.end(number, well=how in ("well", "lost"), error=OSError(5, "I/O") if how == "error" else None)
        copy = self.model.below.pop(number)
        if what == "load" and came:
            copy.state = "ready" if copy.state == "coming" else copy.state
        elif what == "load":
            self.model.withdraw(copy)
        self.hear()

    @rule(what=st.sampled_from(["lookup", "store", "load"]))
    def break_or_mend_below(self, what: str) -> None:
        self.world.tier.refuses ^= {what}

    @rule(seconds=st.sampled_from([0.5, DEADLINE_S]))
    def wait(self, seconds: float) -> None:
        self.world.now_s += seconds
        self.hear()

    # What must be so

    @invariant()
    def the_manager_is_consistent(self) -> None:
        self.world.manager.assert_invariants()
        self.see_what_changed()

    def see_what_changed(self, coming: list[bytes] | None = None) -> None:
        """Bring the model up to date with what only the manager could decide, and check that it could."""
        model, cpu = self.model, self.world.manager.cpu
        entries = {entry.key: entry for entry in cpu.entries() if entry.state is not EntryState.WITHDRAWN}
        held = model.held()
        gone = [copy for key, copy in model.present.items() if entries.get(key) is not copy.entry]
        assert len(gone) == cpu.num_evicted - self.num_evicted
        self.num_evicted = cpu.num_evicted
        for copy in gone:
            assert copy.state == "ready"
            assert copy not in held
            model.withdraw(copy)
        self.see_work_below(model)
        for key in coming or ():
            if key not in model.present:
                model.present[key] = Copy(key, entries[key])
        assert {key: copy.state for key, copy in model.present.items()} == {
            key: entry.state.value for key, entry in entries.items()
        }

    def see_work_below(self, model: Model) -> None:
        for what, key, _, _ in self.world.tier.work[len(model.below) :]:
            if what == "load":
                # What is present is not asked for below.
                assert key not in model.present
                model.present[key] = Copy(key, self.world.manager.cpu.get(key))
            model.below.append(model.present[key])

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for name in list(self.model.requests):
            self.world.manager.finish(name)
        self.world.tier.refuses.clear()
        self.settle()
        manager = self.world.manager
        assert all(entry.references == 0 for entry in manager.cpu.entries())
        # Nothing is lost: the whole tier can be filled anew.
        fresh = [f"fresh{i}".encode() for i in range(self.num_blocks)]
        done = 0
        while done < len(fresh):
            accepted, _ = self.world.store("last", fresh[done:])
            assert accepted
            done += accepted
            self.settle()
        assert manager.cpu.num_ready(fresh) == self.num_blocks

    def settle(self) -> None:
        """Until nothing is under way and nothing waits for its turn to be written."""
        self.world.settle()
        while self.world.tier.work or self.world.todo:
            self.world.settle()


TestOffloadMachine = OffloadMachine.TestCase
