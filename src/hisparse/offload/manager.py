"""The scheduler's side of the offload path: which chunks a request can load, and which of its own are kept.

No call waits: not for workers, not for a disk. Whatever goes wrong, at any step, ends as a miss; a request is told to
ask again for a bounded time, has at most one load fail, and then computes.

The order of calls for one request: `lookup` until it says HIT or MISS; after a HIT `prepare_load`, whose transfer
every worker carries out; `prepare_store` as chunks are computed; `finish`. `hand_out` says that the workers are given
what was begun, `report` takes what they saw, `take_events` gives what came of it. One thread makes all calls.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from itertools import islice

from hisparse.errors import InvariantError
from hisparse.offload.config import OffloadConfig
from hisparse.offload.cpu_tier import CpuTier, Entry, EntryState
from hisparse.offload.lookups import Lookups
from hisparse.offload.messages import (
    ChunkCopy,
    Lookup,
    LookupStatus,
    OffloadReport,
    RegionTransfer,
    StorePlan,
    TransferEvent,
    TransferKind,
    TransferOutcome,
)
from hisparse.offload.policies import make_policy
from hisparse.offload.request_state import RequestState, Search
from hisparse.offload.stats import OffloadStats
from hisparse.offload.tier import Below
from hisparse.offload.tier_traffic import TierTraffic
from hisparse.offload.transfer_log import OpenTransfer, TransferLog

OWN_TAIL = 16
"""How many of a request's newest chunks are tried when its own store finds no other place."""


class OffloadManager:
    """Keeps the books of one node's CPU region of `num_blocks` chunks, which `num_workers` workers fill and read.

    `below` is the tier under it, if any: stored chunks are written through to it as fast as it takes them, and lookups
    bring them back.
    """

    def __init__(
        self,
        config: OffloadConfig,
        num_blocks: int,
        num_workers: int,
        below: Below | None = None,
        clock: Callable[[], float] = time.monotonic,
        last_transfer_id: int = 0,
    ) -> None:
        """`last_transfer_id`: that of the manager whose place it takes before the same workers."""
        self.config = config
        self.stats = OffloadStats()
        self.cpu = CpuTier(num_blocks, make_policy(config.policy, num_blocks))
        self._below = below
        self._clock = clock
        self._traffic = None if below is None else TierTraffic(self.cpu, below, config, self.stats, clock)
        self._lookups = Lookups(self.cpu, self._traffic, config, self.stats, clock, self._is_wanted)
        self._log = TransferLog(num_workers, last_transfer_id)
        self._requests: dict[str, RequestState] = {}
        self._events: list[TransferEvent] = []
        self._num_storing = 0
        """Chunks of open stores. Only `prepare_store` and `_end` change it."""

    # Loading

    def lookup(self, request: str, keys: Sequence[bytes], limit: int | None = None, *, ahead: bool = False) -> Lookup:
        """How much of the chain `keys`, or of its first `limit` chunks, can be loaded, from its first chunk on.

        A HIT stays true until the request loads, asks again or is finished. PENDING and RETRY come while what it waits
        for gets further, or others get further in whose line it stands: for `lookup_deadline_s` without that, and for
        `lookup_limit_s` all in all. After a load that succeeded it may ask for more: a prefix larger than the CPU tier
        comes up in pieces. Raises `InvariantError` while a load is open.

        The next look-up with the same keys costs what has happened since. Best it is given the same object, which
        nobody changes.

        `ahead`: the request does not run yet. What it could use is brought up as far as that takes nothing from those
        that run, and no more than half of the tier; nothing is held for it and nothing promised. Its first look-up
        without `ahead` begins its time.
        """
        state = self._requests.setdefault(request, RequestState())
        if state.load is not None:
            raise InvariantError(f"request {request} looks up while transfer {state.load.transfer_id} loads for it")
        if state.gave_up:
            state.search.cut(self.cpu, 0)
            return Lookup(LookupStatus.MISS, 0)
        if self._traffic is not None:
            self._traffic.collect()
        limit = len(keys) if limit is None else min(limit, len(keys))
        return self._lookups.look(state.search, keys, limit, ahead=ahead)

    def num_claimed(self, request: str) -> int:
        """How many chunks the last lookup found in the CPU tier or on their way into it: what waiting may come to."""
        state = self._requests.get(request)
        return len(state.search.run) if state is not None else 0

    def is_loadable(self, request: str, num_chunks: int) -> bool:
        """Whether `prepare_load` of so many chunks would begin a transfer now."""
        state = self._requests.get(request)
        if state is None or state.load is not None or num_chunks > _num_promised(state.search):
            return False
        return all(entry.state is EntryState.READY for entry in islice(state.search.run, num_chunks))

    def came_from_below(self, request: str) -> Set[bytes]:
        """The chunks that this request waited for while they came up from the tier below, whoever asked for them."""
        state = self._requests.get(request)
        return state.search.awaited if state is not None else frozenset()

    def prepare_load(self, request: str, num_chunks: int) -> RegionTransfer | None:
        """Begin to load the first `num_chunks` that the last lookup gave, and give back the rest of them.

        None when a chunk was withdrawn since: look up again. Raises `InvariantError` for more than the lookup gave.
        """
        state = self._requests.get(request)
        if state is None or state.load is not None or not 0 < num_chunks <= _num_promised(state.search):
            raise InvariantError(f"request {request} loads {num_chunks} chunks that no lookup has promised")
        search = state.search
        entries = tuple(search.run[:num_chunks])
        states = {entry.state for entry in entries}
        if EntryState.COMING in states:
            raise InvariantError(f"request {request} loads chunks that are still coming")
        is_withdrawn = EntryState.WITHDRAWN in states
        if not is_withdrawn:
            for entry in entries:
                self.cpu.pin(entry)
        search.start(self.cpu, (), 0, ahead=False)
        if is_withdrawn:
            return None
        # From the last to the first: of one prefix the end goes before the beginning.
        for entry in reversed(entries):
            self.cpu.policy.use(entry.key)
        state.chain.update((entry.key, None) for entry in entries)
        self.stats.loads += num_chunks
        transfer = self._begin(TransferKind.LOAD, request, state, entries)
        state.load = transfer
        return _to_workers(transfer, range(num_chunks))

    # Storing

    def prepare_store(self, request: str, keys: Sequence[bytes]) -> StorePlan:
        """Begin to store computed chunks, given in the order of the prompt. What finds no place is dropped.

        The request's own earlier chunks are never evicted for later ones, unless the tier below has them: of a prompt
        larger than the tier, the beginning stays.
        """
        state = self._requests.setdefault(request, RequestState())
        if self._traffic is not None:
            self._traffic.collect()
        entries: list[Entry] = []
        positions: list[int] = []
        accepted = 0
        for position, key in enumerate(keys):
            if self.cpu.get(key) is None:
                if self._num_storing + len(entries) >= self.config.max_stores:
                    break
                entry = self._reserve(state, key, keys)
                if entry is None:
                    break
                entries.append(entry)
                positions.append(position)
            state.chain[key] = None
            accepted = position + 1
        self.stats.dropped_stores += len(keys) - accepted
        if not entries:
            return StorePlan(accepted, None)
        self._num_storing += len(entries)
        self.stats.stores += len(entries)
        transfer = self._begin(TransferKind.STORE, request, state, tuple(entries))
        return StorePlan(accepted, _to_workers(transfer, positions))

    # The rest of a request's life

    def report(self, report: OffloadReport) -> None:
        """Take what one worker saw. Raises `ProtocolError` naming the transfer for a report that cannot be true."""
        for transfer, outcome in self._log.acknowledge(report):
            if outcome is not TransferOutcome.ENQUEUED:
                self._end(transfer, outcome is TransferOutcome.DONE)
            self._tell(transfer, outcome)

    def take_events(self) -> tuple[TransferEvent, ...]:
        """What has happened to transfers since the last call. Call it every step: it is what notices overdue ones.

        Overdue is what was due when `hand_out` was last called, and still is not over: whoever had something to say
        of it had a step's time for that. Between two steps no time passes.
        """
        if self._traffic is not None:
            self._traffic.collect()
        for transfer in self._log.overdue():
            # The blocks stay theirs until every worker is done with them; nobody finds the chunks any more.
            self.stats.overdue_transfers += 1
            for entry in transfer.entries:
                self.cpu.drop(entry)
            self._give_up_load(transfer)
            self._tell(transfer, TransferOutcome.OVERDUE)
        events = tuple(self._events)
        self._events.clear()
        return events

    def hand_out(self) -> None:
        """The workers are given what was begun since the last call: call it once a step. Deadlines begin here."""
        now_s = self._clock()
        self._log.hand_out(now_s, now_s + self.config.transfer_deadline_s)

    def finish(self, request: str) -> None:
        """Forget a request that ended or was preempted. Its open transfers go on; unknown requests are none.

        What it has used of its prompt becomes young here and in the tier below, the beginning youngest.
        """
        state = self._requests.pop(request, None)
        if state is None:
            return
        state.search.finish(self.cpu)
        self.cpu.policy.refresh(reversed(state.chain))
        if self._traffic is not None:
            self._traffic.touch(tuple(state.chain))
        for transfer in state.transfers:
            transfer.request = None

    def reset(self) -> None:
        """Make every lookup of the CPU tier a miss from now on, as after a change of weights."""
        for entry in list(self.cpu.entries()):
            self.cpu.drop(entry)

    def close(self, deadline_s: float) -> int:
        """Have the tier below keep all that the CPU tier does, as far as that goes in half of `deadline_s`, then wait
        for what goes to or comes from there and close it, all within `deadline_s`.

        Returns how many transfers and tier accesses are not over even then; their blocks may still be written.
        """
        if self._traffic is None or self._below is None:
            return len(self._log)
        started_s = time.monotonic()
        self._flush(self._traffic, started_s + deadline_s / 2)
        unfinished = self._traffic.drain(max(0.0, deadline_s - (time.monotonic() - started_s)))
        self._below.tier.close(max(0.0, deadline_s - (time.monotonic() - started_s)))
        return unfinished + len(self._log)

    # How it is done

    def _is_wanted(self, key: bytes) -> bool:
        """Whether a request that runs has loaded or stored a chunk."""
        return any(key in state.chain for state in self._requests.values())

    def _reserve(self, state: RequestState, key: bytes, offered: Sequence[bytes]) -> Entry | None:
        entry = self.cpu.reserve(key, lambda entry: entry.key not in state.chain)
        if entry is None and self._traffic is not None:
            for own in islice(reversed(state.chain), OWN_TAIL):
                tail = self.cpu.get(own)
                if tail is None or tail.state is not EntryState.READY or tail.references:
                    continue
                # What was accepted a moment ago stays.
                if tail.is_below and own not in offered:
                    self.cpu.evict(tail)
                    return self.cpu.reserve(key, lambda entry: False)
        return entry

    def _begin(self, kind: TransferKind, request: str, state: RequestState, entries: tuple[Entry, ...]) -> OpenTransfer:
        transfer = self._log.begin(kind, request, entries)
        state.transfers.add(transfer)
        return transfer

    def _end(self, transfer: OpenTransfer, succeeded: bool) -> None:
        """Every worker has said its last word on a transfer."""
        is_store = transfer.kind is TransferKind.STORE
        if not succeeded:
            self._give_up_load(transfer)
            for entry in transfer.entries:
                self.cpu.drop(entry)
        # From the last to the first, so that the first is the youngest.
        for entry in reversed(transfer.entries):
            if is_store:
                self.cpu.commit(entry)
            else:
                self.cpu.unpin(entry)
        if is_store:
            self._num_storing -= len(transfer.entries)
            self.stats.failed_stores += 0 if succeeded else len(transfer.entries)
        else:
            self.stats.failed_loads += 0 if succeeded else len(transfer.entries)
        if succeeded:
            self._write_through(transfer)
        state = self._requests.get(transfer.request) if transfer.request is not None else None
        if state is not None:
            state.transfers.discard(transfer)
            if state.load is transfer:
                state.load = None
                state.search.progress_s, state.search.is_waiting = None, False

    def _write_through(self, transfer: OpenTransfer) -> None:
        """Keep its chunks below too. After a load as well, so that what was once dropped there gets there with use."""
        if self._traffic is not None:
            for entry in transfer.entries:
                if entry.state is EntryState.READY:
                    self._traffic.write(entry)

    def _flush(self, traffic: TierTraffic, until_s: float) -> None:
        """Write what the tier below lacks: what waits for its turn, then what it gave up while it kept what is older.

        What it refuses once is left.
        """
        traffic.stop_writing()
        order = [entry for key in self.cpu.policy if (entry := self.cpu.get(key)) is not None]
        written = [entry for entry in order if entry.is_below]
        self._write_all(traffic, [entry for entry in order if not entry.is_below], until_s)
        self._write_all(traffic, traffic.find_lost(written, until_s - time.monotonic()), until_s)

    def _write_all(self, traffic: TierTraffic, entries: Sequence[Entry], until_s: float) -> None:
        for entry in entries:
            while not traffic.can_write() and traffic.wait_for_one(until_s - time.monotonic()):
                pass
            if time.monotonic() >= until_s:
                return
            if entry.state is EntryState.READY:
                traffic.write_now(entry)

    def _give_up_load(self, transfer: OpenTransfer) -> None:
        """The request of a load that failed or is overdue computes from now on."""
        if transfer.kind is not TransferKind.LOAD:
            return
        state = self._requests.get(transfer.request) if transfer.request is not None else None
        if state is not None and state.load is transfer:
            state.gave_up = True
            state.load = None

    def _tell(self, transfer: OpenTransfer, outcome: TransferOutcome) -> None:
        self._events.append(TransferEvent(transfer.transfer_id, transfer.kind, transfer.request, outcome))

    @property
    def last_transfer_id(self) -> int:
        """The largest id of a transfer that was begun."""
        return self._log.last_id

    @property
    def num_open(self) -> int:
        """Transfers that some worker has not ended."""
        return len(self._log)

    def assert_invariants(self) -> None:
        """Raises `InvariantError` unless every reference has a holder and every block an owner."""
        self.cpu.assert_invariants()
        held: Counter[Entry] = Counter()
        for state in self._requests.values():
            held.update(() if state.search.ahead else state.search.run)
        for transfer in self._log:
            held.update(transfer.entries)
        if self._traffic is not None:
            held.update(self._traffic.held())
        for entry in self.cpu.entries():
            if entry.references != held.pop(entry, 0):
                raise InvariantError(
                    f"chunk {entry.key.hex()} has {entry.references} references that holders do not explain"
                )
        if held:
            raise InvariantError(f"{len(held)} chunks are held that have no block")
        if self._traffic is not None and any(entry.state is not EntryState.READY for entry in self._traffic.dirty()):
            raise InvariantError("a chunk that is not ready waits to be written below")
        storing = sum(len(transfer.entries) for transfer in self._log if transfer.kind is TransferKind.STORE)
        if storing != self._num_storing:
            raise InvariantError(f"{storing} chunks are being stored, {self._num_storing} were counted")


def _num_promised(search: Search) -> int:
    return 0 if search.ahead else len(search.run)


def _to_workers(transfer: OpenTransfer, positions: Sequence[int]) -> RegionTransfer:
    chunks = (ChunkCopy(position, entry.block) for position, entry in zip(positions, transfer.entries, strict=True))
    return RegionTransfer(transfer.transfer_id, transfer.kind, tuple(chunks))
