"""What the offload manager remembers of one request from its first lookup or store until it is finished."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hisparse.offload.cpu_tier import CpuTier, Entry, EntryState
from hisparse.offload.tier_probes import Probe
from hisparse.offload.transfer_log import OpenTransfer


@dataclass(slots=True, eq=False)
class Search:
    """How far a request's look-ups have come. Every look-up goes on from there; only `Lookups` changes it.

    `keys`: the chain that is looked for, of which the first `limit` chunks are wanted. `run`: its first chunks in the
    CPU tier, ready or coming, without a gap; the first `num_ready` are ready. While the request runs it holds one
    reference to each of them; before that, while it is looked for `ahead`, none. `num_dropped`: the CPU tier's count
    when `run` was last looked through for chunks that were withdrawn. `key_set`: the keys as a set, once they were
    wanted as one. Set anew in each look-up: `fills_itself`, no chunk of others can make room for this chain any more;
    `has_begun`, a chunk was begun to be brought up.

    `probe`: the open question to the tier below, of whose answer `num_taken` keys are in `found`. `found`: keys that
    the tier below has as far as is known; `missing`: those that it was asked about and has not. `awaited`: chunks that
    were coming from there when they entered `run`.

    `progress_s`: when anything that it waits for was last seen to get further; None before it waits. `num_waits`: how
    often it was told to ask again since then. `waited_s`: for how long it was all in all, up to its look-up at
    `asked_s`. `is_waiting`: whether that one told it so.
    """

    keys: Sequence[bytes] = ()
    limit: int = 0
    run: list[Entry] = field(default_factory=list)
    num_ready: int = 0
    ahead: bool = False
    num_dropped: int = 0
    key_set: frozenset[bytes] | None = None
    fills_itself: bool = False
    has_begun: bool = False
    probe: Probe | None = None
    num_taken: int = 0
    found: set[bytes] = field(default_factory=set)
    missing: set[bytes] = field(default_factory=set)
    awaited: set[bytes] = field(default_factory=set)
    progress_s: float | None = None
    num_waits: int = 0
    waited_s: float = 0.0
    asked_s: float = 0.0
    is_waiting: bool = False

    def add(self, cpu: CpuTier, entry: Entry) -> None:
        """The next chunk of the chain is there, ready or coming."""
        if not self.ahead:
            cpu.pin(entry)
            cpu.end_ahead(entry)
        if entry.state is EntryState.COMING and entry.came_from_below:
            self.awaited.add(entry.key)
        self.run.append(entry)

    def advance(self) -> None:
        """Move `num_ready` on. What was evicted under a request that does not run yet counts as ready: it was."""
        run, num_ready = self.run, self.num_ready
        while num_ready < len(run) and run[num_ready].state is not EntryState.COMING:
            num_ready += 1
        self.num_ready = num_ready

    def cut(self, cpu: CpuTier, length: int) -> None:
        """Keep the first `length` chunks of `run` only."""
        rest = self.run[length:]
        del self.run[length:]
        self.num_ready = min(self.num_ready, length)
        self._give_back(cpu, rest)

    def start(self, cpu: CpuTier, keys: Sequence[bytes], limit: int, ahead: bool) -> None:
        """Look for another chain, or for the same one now that the request runs."""
        former, was_ahead = self.run, self.ahead
        if was_ahead and not ahead:
            # It may be a long time since it was asked.
            self.missing.clear()
            self.progress_s, self.num_waits, self.is_waiting = None, 0, False
        self.keys, self.limit, self.key_set = keys, limit, None
        self.run, self.num_ready = [], 0
        self.ahead = ahead
        for key in keys[:limit]:
            entry = cpu.get(key)
            if entry is None:
                break
            self.add(cpu, entry)
        self.advance()
        # Only now: what is in both chains must not be free in between.
        self._give_back(cpu, former, was_ahead)
        self.num_dropped = cpu.num_dropped

    def _give_back(self, cpu: CpuTier, entries: Sequence[Entry], ahead: bool | None = None) -> None:
        if self.ahead if ahead is None else ahead:
            return
        for entry in entries:
            cpu.unpin(entry)

    def finish(self, cpu: CpuTier) -> None:
        """Nobody looks any more."""
        if self.probe is not None:
            self.probe.cancel()
        if self.ahead:
            for entry in self.run:
                cpu.end_ahead(entry)
        self.cut(cpu, 0)


@dataclass(slots=True, eq=False)
class RequestState:
    """One request. Only the manager changes it.

    `search`: where its look-ups are. `chain`: keys of its prompt that were loaded or accepted for storing, in order;
    its own stores never evict them. `gave_up`: a load of it failed, so it computes from now on. `load`, `transfers`:
    what is open of it.
    """

    search: Search = field(default_factory=Search)
    chain: dict[bytes, None] = field(default_factory=dict)
    gave_up: bool = False
    load: OpenTransfer | None = None
    transfers: set[OpenTransfer] = field(default_factory=set)
