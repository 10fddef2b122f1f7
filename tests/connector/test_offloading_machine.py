"""The prefix source beside a naive model, while scheduler, worker, files and time do what they like.

The model knows, from the outside alone, what was stored and what is open. Contents are checked where they arrive: a
block that a load filled must hold what was computed for its page, whatever happened meanwhile.
"""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hisparse.cache.groups import GroupKind
from hisparse.connector import GroupPages, TicketId, TierOutcome
from hisparse.offload.messages import TransferKind
from tests.connector.offloading_world import BOTH, INDEXER, OffloadingWorld, prompt_keys

NAMES = st.sampled_from(["r0", "r1", "r2"])
PICK = st.integers(0, 1 << 16)
PAGES = st.integers(0, 6)
SHARED = prompt_keys("s", 3)
PROMPTS = [SHARED + prompt_keys("x", 3), SHARED + prompt_keys("y", 3), prompt_keys("z", 6)]
DEADLINE_S = 3.0


@dataclass
class Open:
    """A ticket whose last event has not been taken."""

    kind: TransferKind
    pages: list[GroupPages]
    keys: list[bytes]
    request: str
    is_overdue: bool = False


@dataclass
class Asking:
    """A request as the model sees it. `matched`: pages that can be loaded, by the last answer, beyond `have`."""

    prompt: int
    have: dict[GroupKind, int] = field(default_factory=dict)
    matched: int = 0
    loading: TicketId | None = None
    gave_up: bool = False


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class SourceMachine(RuleBasedStateMachine):
    @initialize(
        num_rows=st.integers(1, 8),
        size=st.integers(1, 3),
        has_files=st.booleans(),
        groups=st.sampled_from([BOTH, (INDEXER,)]),
    )
    def start(self, num_rows: int, size: int, has_files: bool, groups: tuple[GroupKind, ...]) -> None:
        self.world = OffloadingWorld(
            num_rows,
            size,
            has_files,
            groups,
            lookup_deadline_s=DEADLINE_S,
            transfer_deadline_s=DEADLINE_S,
        )
        self.requests: dict[str, Asking] = {}
        self.open: dict[TicketId, Open] = {}
        self.stored: set[tuple[GroupKind, bytes]] = set()
        """Chunks that were offered since the last reset: nothing else may ever be found."""

    def asking(self, name: str, prompt: int) -> Asking:
        return self.requests.setdefault(name, Asking(prompt % len(PROMPTS)))

    # The scheduler.

    @rule(name=NAMES, prompt=PICK, first=PAGES, count=PAGES)
    def offer(self, name: str, prompt: int, first: int, count: int) -> None:
        request = self.asking(name, prompt)
        keys, end = PROMPTS[request.prompt], min(first + count, 6)
        if first >= end:
            return
        pages = [self.world.computed(group, keys, first, end) for group in self.world.source.groups]
        ticket = self.world.source.offer(name, keys, pages)
        size = self.world.size
        chunks = [chunk for chunk in range(6 // size) if first <= chunk * size and (chunk + 1) * size <= end]
        self.stored |= {(group, keys[(c + 1) * size - 1]) for group in self.world.source.groups for c in chunks}
        if ticket is None:
            return
        for part in ticket.pages:
            (offered,) = [whole for whole in pages if whole.group is part.group]
            start = part.first_page - first
            assert part.blocks == offered.blocks[start : start + len(part.blocks)]
        self.open[ticket.ticket] = Open(TransferKind.STORE, list(ticket.pages), keys, name)

    @rule(name=NAMES, prompt=PICK)
    def compute_all(self, name: str, prompt: int) -> None:
        """A prompt as it usually goes: all of it is computed and kept."""
        self.offer(name, prompt, 0, 6)
        self.work_all()

    @rule(name=NAMES, prompt=PICK, rows=st.integers(0, 3), index=st.integers(0, 3))
    def fetch(self, name: str, prompt: int, rows: int, index: int) -> None:
        """A prompt that comes a second time: files answer, and what was matched is loaded."""
        self.match(name, prompt, rows, index)
        self.world.answer_files()
        self.match(name, prompt, rows, index)
        self.load(name, 6)

    @rule()
    def work_all(self) -> None:
        self.world.send()
        while self.world.todo:
            self.work(0, fails=False)
        self.take_events()

    @rule(name=NAMES, prompt=PICK, rows=PAGES, index=PAGES)
    def match(self, name: str, prompt: int, rows: int, index: int) -> None:
        request = self.asking(name, prompt)
        if request.loading is not None:
            return
        keys, have = PROMPTS[request.prompt], dict(zip(BOTH, (rows, index), strict=True))
        num_pages, waits = self.world.source.match(name, keys, have)
        request.have, request.matched = have, num_pages
        assert min(have.values()) <= num_pages <= 6
        if request.gave_up:
            assert (num_pages, waits) == (min(have.values()), False)
        size = self.world.size
        for group, held in have.items():
            if group not in self.world.source.groups:
                assert num_pages <= held
                continue
            chunks = range(held // size, -(-num_pages // size)) if held < num_pages else range(0)
            assert all((group, keys[(chunk + 1) * size - 1]) in self.stored for chunk in chunks)

    @rule(name=NAMES, count=st.integers(1, 6))
    def load(self, name: str, count: int) -> None:
        request = self.requests.get(name)
        if request is None or request.loading is not None or request.gave_up:
            return
        end = min(request.matched, min(request.have.values(), default=0) + count)
        have = {group: request.have[group] for group in self.world.source.groups if request.have}
        if not have or end <= min(have.values()):
            return
        begun = self.world.load(name, PROMPTS[request.prompt], have, end)
        request.matched = 0
        if begun is not None:
            request.loading, pages = begun
            self.open[begun[0]] = Open(TransferKind.LOAD, pages, PROMPTS[request.prompt], name)

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        self.world.source.forget(name)
        self.requests.pop(name, None)

    @rule()
    def reset(self) -> None:
        self.world.source.reset()
        self.stored.clear()
        for request in self.requests.values():
            request.matched = 0

    @rule()
    def take_events(self) -> None:
        for ticket, outcome, from_files in self.world.source.take_events():
            was = self.open[ticket]
            request = self.requests.get(was.request)
            is_mine = request is not None and request.loading == ticket
            if outcome is TierOutcome.OVERDUE:
                assert was.kind is TransferKind.LOAD
                assert not was.is_overdue
                was.is_overdue = True
            else:
                del self.open[ticket]
            if outcome is TierOutcome.DONE and was.kind is TransferKind.LOAD:
                assert all(self.world.holds(part, was.keys) for part in was.pages)
                assert from_files <= len({p for part in was.pages for p in range(part.first_page, 6)})
            if is_mine and request is not None:
                request.loading = None
                request.gave_up |= outcome is not TierOutcome.DONE

    # The worker, files and time.

    @rule()
    def send(self) -> None:
        self.world.send()

    @precondition(lambda self: self.world.todo)
    @rule(pick=PICK, fails=st.sampled_from([False, False, False, True]))
    def work(self, pick: int, fails: bool) -> None:
        transfer = self.world.todo[pick % len(self.world.todo)]
        open_blocks = {
            (part.group, block)
            for ticket in self.open.values()
            if ticket.kind is TransferKind.LOAD
            for part in ticket.pages
            for block in part.blocks
        }
        before = dict(self.world.device)
        self.world.work(transfer, fails=fails)
        written = {key for key, content in self.world.device.items() if before.get(key) != content}
        assert written <= open_blocks, "a copy wrote a block whose ticket is over"

    @precondition(lambda self: any(tier.work for tier in self.world.files.values()))
    @rule(pick=PICK, well=st.sampled_from([True, True, True, False]))
    def work_below(self, pick: int, well: bool) -> None:
        tiers = [tier for tier in self.world.files.values() if tier.work]
        tier = tiers[pick % len(tiers)]
        tier.end(pick % len(tier.work), well=well)

    @rule()
    def answer_probes(self) -> None:
        self.world.executor.run_all()

    @rule(seconds=st.sampled_from([0.5, DEADLINE_S]))
    def wait(self, seconds: float) -> None:
        self.world.now_s += seconds

    # What must be so.

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.source.assert_invariants()
            assert self.world.source.num_open == len(self.open)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        while self.world.todo or self.world.source.num_under_way:
            self.world.settle()
        self.take_events()
        assert not self.open, f"tickets {list(self.open)} never ended"
        for name in list(self.requests):
            self.world.source.forget(name)
        self.world.settle()
        assert self.world.source.take_events() == ()  # what ended below is seen here
        assert all(entry.references == 0 for m in self.world.managers.values() for entry in m.cpu.entries())


TestSource = SourceMachine.TestCase
