"""The offload manager beside a naive model, while workers, the tier below, threads and time do what they like.

The model knows which chunks are ready, coming and held, from the outside alone. Only the choice of victims is the
manager's: a chunk that the model thinks ready may be gone, if an eviction was counted and nobody held it.
Contents are checked by the workers, who see a wrong value when a block was reused, mixed up or published too early.
"""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hisparse.errors import InvariantError, ProtocolError
from hisparse.offload.cpu_tier import EntryState
from hisparse.offload.messages import LookupStatus, OffloadReport, TransferKind, TransferOutcome
from hisparse.protocol import TransferId
from tests.offload.offload_world import World

NAMES = st.sampled_from(["r0", "r1", "r2", "r3"])
PICK = st.integers(0, 1 << 16)
DEADLINE_S = 3.0
PROMPTS = [[f"{a}{b}{i}".encode() if i > 1 else f"{a}{i}".encode() for i in range(5)] for a in "xy" for b in "pq"]
"""Four prompts of five chunks; two and two share their first two."""


@dataclass(eq=False)
class Copy:
    """One chunk in one block, as the model sees it."""

    key: bytes
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
    due_s: float = 0.0


@dataclass(eq=False)
class Asking:
    """A request: its claims, until when it may be told to wait, and whether a load of it failed."""

    claims: list[Copy] = field(default_factory=list)
    patience_s: float | None = None
    gave_up: bool = False
    loading: TransferId | None = None


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
    )
    def start(self, num_blocks: int, num_workers: int, has_tier: bool, policy: str, limit: int) -> None:
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
            transfer_deadline_s=2 * DEADLINE_S,
        )
        self.model = Model()
        self.num_evicted = 0

    # What requests do

    @rule(name=NAMES, prompt=PICK, length=st.integers(1, 5))
    def lookup(self, name: str, prompt: int, length: int) -> None:
        keys = PROMPTS[prompt % len(PROMPTS)][:length]
        request = self.model.requests.setdefault(name, Asking())
        if request.loading is not None:
            with pytest.raises(InvariantError, match="while transfer"):
                self.world.manager.lookup(name, keys)
            return
        answer = self.world.manager.lookup(name, keys)
        now_s = self.world.now_s
        request.patience_s = now_s + DEADLINE_S if request.patience_s is None else request.patience_s
        # Claims of before are held until the answer, so they count for what may have been evicted on the way.
        self.see_what_changed()
        run = self.model.run(keys)
        ready = next((i for i, copy in enumerate(run) if copy.state != "ready"), len(run))
        if answer.status in (LookupStatus.PENDING, LookupStatus.RETRY):
            assert now_s < request.patience_s
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
            request.loading = transfer_id
            self.begin(transfer_id, TransferKind.LOAD, name, copies)

    @rule(name=NAMES, prompt=PICK, start=st.integers(0, 4), length=st.integers(1, 5))
    def store(self, name: str, prompt: int, start: int, length: int) -> None:
        keys = PROMPTS[prompt % len(PROMPTS)][start : start + length]
        self.model.requests.setdefault(name, Asking())
        accepted, transfer_id = self.world.store(name, keys)
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
        due_s = self.world.now_s + 2 * DEADLINE_S
        self.model.moving[transfer_id] = Moving(kind, name, copies, self.world.num_workers, due_s=due_s)

    @rule(name=NAMES)
    def finish(self, name: str) -> None:
        self.world.manager.finish(name)
        self.model.requests.pop(name, None)
        for moving in self.model.moving.values():
            moving.request = None if moving.request == name else moving.request

    @rule()
    def reset(self) -> None:
        self.world.manager.reset()
        for copy in list(self.model.present.values()):
            self.model.withdraw(copy)

    # What workers do

    @precondition(lambda self: self.world.todo)
    @rule(pick=PICK, goes_well=st.sampled_from([True, True, True, False]))
    def work(self, pick: int, goes_well: bool) -> None:
        transfer_id, worker = sorted(self.world.todo)[pick % len(self.world.todo)]
        (self.world.copy if goes_well else self.world.fail)(transfer_id, worker)
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
            request.patience_s = None

    def hear(self) -> None:
        """Take events; model what is overdue, and that each transfer is overdue and over once."""
        overdue = {event[0] for event in self.world.manager.take_events() if event.outcome is TransferOutcome.OVERDUE}
        expected = set()
        for transfer_id, moving in self.model.moving.items():
            if not moving.overdue and moving.due_s <= self.world.now_s:
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
        self.world.executor.run_all()

    @precondition(lambda self: self.world.tier.work)
    @rule(pick=PICK, how=st.sampled_from(["well", "well", "miss", "error", "lost"]))
    def end_below(self, pick: int, how: str) -> None:
        number = pick % len(self.world.tier.work)
        what, key, _, _ = self.world.tier.work[number]
        if how == "lost":
            self.world.tier.kept.pop(key, None)
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
        self.see_work_below(model)
        entries = {entry.key: entry for entry in cpu.entries() if entry.state is not EntryState.WITHDRAWN}
        held = model.held()
        gone = [copy for key, copy in model.present.items() if key not in entries]
        assert len(gone) == cpu.num_evicted - self.num_evicted
        self.num_evicted = cpu.num_evicted
        for copy in gone:
            assert copy.state == "ready"
            assert copy not in held
            model.withdraw(copy)
        for key in coming or ():
            if key not in model.present:
                model.present[key] = Copy(key)
        assert {key: copy.state for key, copy in model.present.items()} == {
            key: entry.state.value for key, entry in entries.items()
        }

    def see_work_below(self, model: Model) -> None:
        for what, key, _, _ in self.world.tier.work[len(model.below) :]:
            if what == "load":
                # What is present is not asked for below, so it cannot be evicted and promoted in one call.
                assert key not in model.present
                model.present[key] = Copy(key)
            model.below.append(model.present[key])

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for name in list(self.model.requests):
            self.world.manager.finish(name)
        self.world.tier.refuses.clear()
        self.world.settle()
        self.world.settle()
        manager = self.world.manager
        assert all(entry.references == 0 for entry in manager.cpu.entries())
        # Nothing is lost: the whole tier can be filled anew.
        fresh = [f"fresh{i}".encode() for i in range(self.num_blocks)]
        done = 0
        while done < len(fresh):
            accepted, _ = self.world.store("last", fresh[done:])
            assert accepted
            done += accepted
            self.world.settle()
            self.world.settle()
        assert manager.cpu.num_ready(fresh) == self.num_blocks


TestOffloadMachine = OffloadMachine.TestCase
