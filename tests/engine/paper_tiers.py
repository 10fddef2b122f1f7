"""A prefix source on paper: it keeps copies of what paper workers hold, loses some, and is late, wrong or overdue.

It trusts nobody. A load scribbles over its blocks when it begins and looks for its scribble when it ends; a store reads
its blocks when it begins and once more when it ends. So a block that changes hands under a copy is seen, whoever does
it. What is loaded is checked by those who read it: a row's content names all tokens up to it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hisparse.cache.groups import GroupKind
from hisparse.connector.prefix_source import GroupPages, Match, StoreTicket, TicketId, TierEvent, TierOutcome

if TYPE_CHECKING:
    from tests.engine.paper_worker import PaperWorker

Rows = dict[int, int]
Place = tuple[GroupKind, bytes]
BOTH = (GroupKind.RESIDENT, GroupKind.INDEXER)


@dataclass(frozen=True)
class Weather:
    """How bad things are. Probabilities of a transfer, of a promise, or of a stored page; delays in steps."""

    max_delay: int = 2
    min_delay: int = 0
    fails: float = 0.0
    overdue: float = 0.0
    withdrawn: float = 0.0
    dropped: float = 0.0
    patience: int = 6
    """Times that a request may be told to ask again."""


@dataclass(eq=False)
class _Copy:
    """An open ticket. `keys[i]` are those of `pages[i]`; `contents` what a load brings or a store took, by worker."""

    ticket: TicketId
    is_load: bool
    pages: tuple[GroupPages, ...]
    keys: list[list[bytes]]
    due: int
    outcome: TierOutcome
    num_from_files: int = 0
    overdue_at: int | None = None
    begun: bool = False
    contents: list[list[list[Rows]]] = field(default_factory=list)


class PaperTiers:
    """`PrefixSource` with a CPU tier of `num_rows` pages a group over files that forget nothing, or over none."""

    def __init__(
        self,
        rng: random.Random,
        num_rows: int = 1000,
        has_files: bool = True,
        groups: tuple[GroupKind, ...] = BOTH,
        weather: Weather | None = None,
    ) -> None:
        self.groups = groups
        self.pages_per_chunk = 1
        self.num_rows = num_rows
        self.has_files = has_files
        self.weather = weather or Weather()
        self.workers: list[PaperWorker] = []
        self.cpu: dict[Place, list[Rows]] = {}
        """For each page a copy by worker, least recently used first."""
        self.files: dict[Place, list[Rows]] = {}
        self.loaded: list[tuple[GroupPages, ...]] = []
        self.offered: list[tuple[str, int, int]] = []
        """Requests, first and last pages + 1."""
        self.counts = dict.fromkeys(("loads", "stores", "failed", "overdue", "files", "withdrawn"), 0)
        self._rng = rng
        self._step = 0
        self._last = 0
        self._open: list[_Copy] = []
        self._events: list[TierEvent] = []
        self._claims: dict[str, set[Place]] = {}
        self._promised: dict[str, tuple[dict[GroupKind, int], int]] = {}
        self._coming: dict[str, dict[Place, int]] = {}
        self._patience: dict[str, int] = {}
        self._from_files: dict[str, set[bytes]] = {}

    # PrefixSource.

    def match(
        self, request_id: str, keys: Sequence[bytes], have: Mapping[GroupKind, int], *, ahead: bool = False
    ) -> Match:
        num_pages, waits = len(keys), False
        claims: set[Place] = set()
        for group in BOTH:
            if group not in self.groups:
                num_pages = min(num_pages, have[group])
        for group in self.groups:
            self._claims[request_id] = claims
            end = self._claim(request_id, keys, group, have[group])
            if end < num_pages and (group, keys[end]) in self.files:
                waits |= self._fetch(request_id, [(group, key) for key in keys[end:num_pages]])
                end = self._claim(request_id, keys, group, end)
            num_pages = min(num_pages, end)
        if ahead:
            self._claims.pop(request_id, None)
            self._promised.pop(request_id, None)
            return Match(num_pages, waits)
        patience = self._patience.setdefault(request_id, self.weather.patience)
        waits = waits and patience > 0
        self._patience[request_id] = patience - waits
        self._promised[request_id] = (dict(have), num_pages)
        return Match(num_pages, waits)

    def _claim(self, request_id: str, keys: Sequence[bytes], group: GroupKind, first: int) -> int:
        """Keep what the CPU tier has from page `first` on. Returns where it ends."""
        while first < len(keys) and (group, keys[first]) in self.cpu:
            self._claims[request_id].add((group, keys[first]))
            first += 1
        return first

    def _fetch(self, request_id: str, places: list[Place]) -> bool:
        """Read pages from files, a few steps long. Returns whether any can still come."""
        coming = self._coming.setdefault(request_id, {})
        for place in places:
            if place in self.cpu:
                continue
            if place not in self.files:
                break
            if place not in coming:
                coming[place] = self._step + self._delay()
            elif coming[place] <= self._step:
                if not self._put(place, self.files[place]):
                    return False
                del coming[place]
                self._claims[request_id].add(place)
                self._from_files.setdefault(request_id, set()).add(place[1])
        return True

    def begin_load(self, request_id: str, keys: Sequence[bytes], pages: Sequence[GroupPages]) -> TicketId | None:
        have, num_pages = self._promised.pop(request_id)
        if self._rng.random() < self.weather.withdrawn:
            self.counts["withdrawn"] += 1
            return None
        assert pages, f"{request_id} loads nothing"
        assert len({part.group for part in pages}) == len(pages), f"{request_id} loads a group in two ranges"
        chosen = []
        for part in pages:
            end = part.first_page + len(part.blocks)
            assert part.first_page == have[part.group], f"{request_id} loads pages that it has, or leaves a gap"
            assert end <= num_pages, f"{request_id} loads up to {end}; {num_pages} were promised"
            assert 0 not in part.blocks
            chosen.append(list(keys[part.first_page : end]))
        copy = self._begin(True, tuple(pages), chosen)
        copy.contents = [[self.cpu[part.group, key] for key in some] for part, some in zip(pages, chosen, strict=True)]
        copy.num_from_files = len(self._from_files.get(request_id, set()) & {key for some in chosen for key in some})
        self.counts["files"] += copy.num_from_files
        self._claims.pop(request_id, None)
        self._patience.pop(request_id, None)
        self.loaded.append(copy.pages)
        return copy.ticket

    def offer(self, request_id: str, keys: Sequence[bytes], pages: Sequence[GroupPages]) -> StoreTicket | None:
        assert {part.group for part in pages} == set(self.groups)
        assert len({(part.first_page, len(part.blocks)) for part in pages}) == 1, "all of one range"
        self.offered.append((request_id, pages[0].first_page, pages[0].first_page + len(pages[0].blocks)))
        wanted, chosen = [], []
        for part in pages:
            assert 0 not in part.blocks, f"{request_id} offers pages that are not on the device"
            for page, block in enumerate(part.blocks, part.first_page):
                is_new = (part.group, keys[page]) not in self.cpu and (part.group, keys[page]) not in self.files
                if is_new and self._rng.random() >= self.weather.dropped:
                    wanted.append(GroupPages(part.group, page, (block,)))
                    chosen.append([keys[page]])
        if not wanted:
            return None
        return StoreTicket(self._begin(False, tuple(wanted), chosen).ticket, tuple(wanted))

    def take_events(self) -> tuple[TierEvent, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events

    def forget(self, request_id: str) -> None:
        for known in (self._claims, self._promised, self._coming, self._patience, self._from_files):
            known.pop(request_id, None)

    def reset(self) -> None:
        self.cpu.clear()
        self.files.clear()
        for known in (self._claims, self._promised, self._coming, self._from_files):
            known.clear()

    @property
    def num_open(self) -> int:
        return len(self._open) + sum(event.is_last for event in self._events)

    # Time.

    def tick(self) -> None:
        """A step's copies: workers call this after the transfers of the step and before its computing."""
        self._step += 1
        for copy in list(self._open):
            if not copy.begun:
                self._touch_first(copy)
            if copy.overdue_at is not None and copy.overdue_at <= self._step:
                copy.overdue_at = None
                self.counts["overdue"] += 1
                self._events.append(TierEvent(copy.ticket, TierOutcome.OVERDUE))
            elif copy.due <= self._step:
                self._open.remove(copy)
                self._touch_last(copy)
                self._events.append(TierEvent(copy.ticket, copy.outcome, copy.num_from_files))

    def _begin(self, is_load: bool, pages: tuple[GroupPages, ...], keys: list[list[bytes]]) -> _Copy:
        self._last += 1
        rng, weather = self._rng, self.weather
        outcome = TierOutcome.FAILED if rng.random() < weather.fails else TierOutcome.DONE
        copy = _Copy(TicketId(self._last), is_load, pages, keys, 0, outcome)
        copy.due = self._step + 1 + self._delay()
        if rng.random() < weather.overdue:
            copy.overdue_at = copy.due
            copy.due += rng.randint(1, 12)
        self.counts["loads" if is_load else "stores"] += 1
        self.counts["failed"] += outcome is TierOutcome.FAILED
        self._open.append(copy)
        return copy

    def _delay(self) -> int:
        return self._rng.randint(self.weather.min_delay, max(self.weather.min_delay, self.weather.max_delay))

    def _blocks(self, copy: _Copy) -> list[tuple[GroupKind, bytes, int]]:
        return [
            (part.group, key, block)
            for part, some in zip(copy.pages, copy.keys, strict=True)
            for key, block in zip(some, part.blocks, strict=True)
        ]

    def _touch_first(self, copy: _Copy) -> None:
        copy.begun = True
        if copy.is_load:
            for rank, worker in enumerate(self.workers):
                for group, _, block in self._blocks(copy):
                    worker.store_of(group)[block] = {-1: copy.ticket, -2: rank}
        else:
            copy.contents = [
                [[dict(worker.store_of(group)[block]) for worker in self.workers]]
                for group, _, block in self._blocks(copy)
            ]

    def _touch_last(self, copy: _Copy) -> None:
        contents = [rows for part in copy.contents for rows in part]
        for (group, key, block), by_worker in zip(self._blocks(copy), contents, strict=True):
            for rank, worker in enumerate(self.workers):
                store = worker.store_of(group)
                if copy.is_load:
                    assert store[block] == {-1: copy.ticket, -2: rank}, f"{group.value} block {block} changed hands"
                    if copy.outcome is TierOutcome.DONE:
                        store[block] = dict(by_worker[rank])
                else:
                    assert store[block] == by_worker[rank], f"{group.value} block {block} changed under a store"
            if not copy.is_load and copy.outcome is TierOutcome.DONE:
                self._put((group, key), by_worker)

    def _put(self, place: Place, contents: list[Rows]) -> bool:
        rivals = [known for known in self.cpu if known[0] is place[0]]
        if place not in self.cpu and len(rivals) >= self.num_rows:
            claimed = set().union(*self._claims.values()) if self._claims else set()
            victim = next((known for known in rivals if known not in claimed), None)
            if victim is None:
                return False
            del self.cpu[victim]
        self.cpu[place] = contents
        if self.has_files:
            self.files[place] = contents
        return True
