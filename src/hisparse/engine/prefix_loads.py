"""Prompts whose next pages come from below the pools instead of being computed, and pages that go there.

To the scheduler a load is a kind of prefill. A request that was admitted and has computed nothing yet asks for its next
pages, piece by piece:

    match: wait ──► it is not scheduled, and asks again in the next step
    match: more ──► blocks are reserved, a ticket fills them ──► DONE: the pages are the request's, which asks for more
                                                             └─► FAILED, OVERDUE: it computes from where it is
    match: no more ──► it computes from where it is

Blocks of a load belong to no request's table until they are filled; those of a store get one lease more. Either way
they stay leased until the ticket's last event, whatever becomes of the request.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import cast

from hisparse.cache import GRANTED, Admission
from hisparse.cache.groups import GroupKind
from hisparse.connector.prefix_source import GroupPages, Match, PrefixSource, TicketId, TierEvent, TierOutcome
from hisparse.engine.request import Request
from hisparse.errors import InvariantError, ProtocolError
from hisparse.geometry import NULL_BLOCK
from hisparse.protocol import DeviceBlockId
from hisparse.residency import Arrival, HiSparseCoordinator, Pin, PrefixHit

MAX_PIECE_PAGES = 256
"""Of a load: its blocks cannot leave the device before it ends."""
NUM_LOOKED_AHEAD = 4
"""Waiting requests for which the source looks already, so that reads of files overlap."""


@dataclass(slots=True, eq=False)
class _Asking:
    """What a request that may get pages from below was told. `have`: leading pages of rows and of index keys that were
    at hand when it asked; `ahead`: whether that was before it ran; `waits`: whether it was told to ask again; `ticket`:
    of the load under way for it.
    """

    have: tuple[int, int]
    ahead: bool = False
    waits: bool = False
    ticket: TicketId | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """An open load. `request` is None once nobody waits for it."""

    request: Request | None
    arrival: Arrival


class PrefixLoads:
    """Loads and stores of one scheduler, and the leases that go with them.

    The scheduler calls `take_events` once a step, `advance` for each request with `asks_tiers` until there is nothing
    more for it, `offer` for pages that were computed and `forget` for requests that leave.
    """

    def __init__(self, source: PrefixSource, coordinator: HiSparseCoordinator, block_size: int) -> None:
        self.source = source
        self._coordinator = coordinator
        self._arrivals = coordinator.arrivals
        self._block_size = block_size
        self._asking: dict[str, _Asking] = {}
        self._loads: dict[TicketId, _Load] = {}
        self._stores: dict[TicketId, Pin] = {}
        self._overdue: set[TicketId] = set()
        self._not_kept: dict[str, list[tuple[int, int]]] = {}
        """Ranges of a request's pages that were offered and not copied in all groups."""

    # Pages that come up.

    def look_ahead(self, waiting: Iterable[Request]) -> None:
        """Have the source look for what the first waiting requests could use. Nothing is held for them."""
        for request in islice(waiting, NUM_LOOKED_AHEAD):
            asking = self._asking.get(request.request_id)
            if request.asks_tiers and (asking is None or asking.waits):
                if request.prefix_keys is None:
                    request.prefix_keys = self._coordinator.prefix_keys(request.tokens)
                if asking is None:
                    asking = self._asking[request.request_id] = _Asking(self._have(request), ahead=True)
                asking.waits = self._match(request, asking).wait

    def enter(self, request: Request, hit: PrefixHit) -> None:
        """A request was admitted with `hit`. What the host has beyond it must not go while its keys are loaded."""
        if request.asks_tiers and any(hit.host_beyond):
            self._arrivals.claim(request.request_id, hit.num_pages, hit.host_beyond)

    def advance(self, request: Request) -> Admission | None:
        """Get a running request its next pages without computing them, as far as that is possible now.

        GRANTED: they are coming, or may be; the request does nothing in this step. WAIT: not one more page fits, and
        what is missing. None: the request computes from where it is.
        """
        asking = self._asking.get(request.request_id)
        if asking is None or asking.ahead:
            # What it was told before it ran was no promise, and its hit may have been cut short since.
            asking = self._asking[request.request_id] = _Asking((0, 0))
        if asking.ticket is not None:
            return GRANTED
        for _ in range(2):
            # While it waits, what is at hand is not counted again: that costs as much as the prompt is long.
            if not asking.waits and (short := self._take_local(request, asking)) is not None:
                return short
            waited = asking.waits
            match = self._match(request, asking)
            asking.waits = match.wait
            if match.wait:
                return GRANTED
            if waited and self._have(request) != asking.have:
                continue
            if match.num_pages * self._block_size <= request.num_computed:
                break
            if (answer := self._begin(request, asking, match.num_pages)) is not None:
                return answer
        self._give_up(request)
        return None

    def _have(self, request: Request) -> tuple[int, int]:
        first = request.num_computed // self._block_size
        return self._arrivals.num_local(request.request_id, _keys(request), first, _may_be_on_host(request))

    def _match(self, request: Request, asking: _Asking) -> Match:
        resident, indexed = asking.have
        have = {GroupKind.RESIDENT: resident, GroupKind.INDEXER: indexed}
        return self.source.match(request.request_id, _keys(request), have, ahead=asking.ahead)

    def _take_local(self, request: Request, asking: _Asking) -> Admission | None:
        """Give the request the next pages that all groups have by now. Returns what is missing for that, if anything.

        Somebody else may have computed or loaded them since the request was admitted.
        """
        while True:
            asking.have = self._have(request)
            first, last = request.num_computed // self._block_size, min(asking.have)
            if last <= first:
                return None
            arrival = self._reserve(request, first, last)
            if isinstance(arrival, Admission):
                return arrival
            device = sum(block != NULL_BLOCK for block in arrival.resident)
            self._commit(request, arrival)
            tokens = request.prompt_tokens(first * self._block_size, request.num_computed)
            request.reused.device += min(tokens, device * self._block_size)
            request.reused.host += max(0, tokens - device * self._block_size)

    def _begin(self, request: Request, asking: _Asking, num_pages: int) -> Admission | None:
        """Begin the next piece of a load. None when the source cannot deliver it after all."""
        first = request.num_computed // self._block_size
        arrival = self._reserve(request, first, min(num_pages, first + MAX_PIECE_PAGES))
        if isinstance(arrival, Admission):
            return arrival
        ticket = self.source.begin_load(request.request_id, _keys(request), _to_load(arrival))
        if ticket is None:
            self._arrivals.release(arrival, has_come=False)
            return None
        self._check_new(ticket)
        self._loads[ticket] = _Load(request, arrival)
        asking.ticket = ticket
        return GRANTED

    def _reserve(self, request: Request, first: int, last: int) -> Arrival | Admission:
        on_host = _may_be_on_host(request)
        return self._arrivals.reserve(request.request_id, _keys(request)[first:last], first, on_host)

    def _commit(self, request: Request, arrival: Arrival) -> None:
        self._coordinator.commit_arrival(request.request_id, arrival)
        request.has_pages(arrival.first_page + arrival.num_pages, self._block_size)

    def _give_up(self, request: Request, has_failed: bool = False) -> None:
        """The request computes from where it is. One that a load failed for never asks again."""
        self._asking.pop(request.request_id, None)
        self._arrivals.unclaim(request.request_id)
        request.asks_tiers = False
        request.tiers_failed |= has_failed

    # Pages that go down.

    def offer(self, request: Request, first: int, last: int) -> None:
        """Pages `first` … `last`-1 of a running request are computed and on the device: they may be kept below.

        A chunk that began before `first` is offered with its last page, unless its beginning has left by then.
        """
        size = self.source.pages_per_chunk
        first, last = first - first % size, last - last % size
        table = self._coordinator.kv.resident.blocks(request.request_id)
        while first < last and NULL_BLOCK in table[first : first + size]:
            first += size
        if first == last:
            return
        if not self._offer(request, first, last):
            ranges = self._not_kept.setdefault(request.request_id, [])
            if ranges and ranges[-1][1] == first:
                first = ranges.pop()[0]
            ranges.append((first, last))

    def finish(self, request: Request) -> None:
        """A running request is about to end: offer once more what there was no room for, as far as it is here."""
        table = self._coordinator.kv.resident.blocks(request.request_id)
        for first, last in self._not_kept.pop(request.request_id, ()):
            if NULL_BLOCK not in table[first:last]:
                self._offer(request, first, last)

    def _offer(self, request: Request, first: int, last: int) -> bool:
        """Returns whether all that was offered is being copied."""
        if request.pages is None:
            raise InvariantError(f"request {request.request_id} offers pages and is not running")
        kv, groups = self._coordinator.kv, self.source.groups
        tables = {GroupKind.RESIDENT: kv.resident, GroupKind.INDEXER: kv.indexer}
        offered = []
        for group in groups:
            blocks = tuple(tables[group].blocks(request.request_id)[first:last])
            offered.append(GroupPages(group, first, cast("tuple[DeviceBlockId, ...]", blocks)))
        store = self.source.offer(request.request_id, request.pages.keys, offered)
        if store is None:
            return False
        self._check_new(store.ticket)
        pinned: dict[GroupKind, tuple[DeviceBlockId, ...]] = {}
        for pages in store.pages:
            pinned[pages.group] = pinned.get(pages.group, ()) + pages.blocks
        slab, indexer = pinned.get(GroupKind.RESIDENT, ()), pinned.get(GroupKind.INDEXER, ())
        self._stores[store.ticket] = self._arrivals.pin(slab, indexer)
        return len(slab) + len(indexer) == len(groups) * (last - first)

    # What becomes of them.

    def take_events(self) -> None:
        """Draw the consequences of what happened to loads and stores since the last call."""
        for event in self.source.take_events():
            if event.ticket in self._loads:
                self._see_load(event)
            elif event.ticket in self._stores:
                if event.is_last:
                    self._arrivals.unpin(self._stores.pop(event.ticket))
            else:
                raise ProtocolError(f"ticket {event.ticket} is {event.outcome.value}, and is not open")
            if event.is_last:
                self._overdue.discard(event.ticket)
            else:
                self._overdue.add(event.ticket)

    def _see_load(self, event: TierEvent) -> None:
        load = self._loads[event.ticket]
        request, arrival = load.request, load.arrival
        if event.is_last:
            del self._loads[event.ticket]
        if request is None:
            if event.is_last:
                self._arrivals.release(arrival, has_come=event.outcome is TierOutcome.DONE)
        elif event.outcome is TierOutcome.DONE:
            self._asking.pop(request.request_id)
            start = request.num_computed
            self._commit(request, arrival)
            tokens = request.prompt_tokens(start, request.num_computed)
            from_files = min(tokens, event.num_pages_from_files * self._block_size)
            request.reused.files += from_files
            request.reused.cpu_tier += tokens - from_files
        else:
            if event.is_last:
                self._arrivals.release(arrival, has_come=False)
            else:
                self._arrivals.detach(arrival)
                load.request = None
            self._give_up(request, has_failed=True)

    def forget(self, request: Request) -> None:
        """The request ended or was preempted. What is under way for it goes on to its end."""
        asking = self._asking.pop(request.request_id, None)
        if asking is not None and asking.ticket is not None:
            load = self._loads[asking.ticket]
            load.request = None
            self._arrivals.detach(load.arrival)
        self._arrivals.unclaim(request.request_id)
        self._not_kept.pop(request.request_id, None)
        self.source.forget(request.request_id)

    @property
    def num_open(self) -> int:
        """Tickets whose last event has not been seen."""
        return len(self._loads) + len(self._stores)

    def gives_back(self, slab: bool, indexer: bool) -> bool:
        """Whether a block of the slab, or of the indexer's pool, can be had once a ticket ends that is not overdue.

        What comes for a request that waits for it may leave the slab afterwards; its index keys stay.
        """
        kv = self._coordinator.kv
        for ticket, load in self._loads.items():
            if ticket not in self._overdue and (slab or (indexer and load.request is None)):
                return True
        for ticket, pin in self._stores.items():
            if ticket in self._overdue:
                continue
            if slab and any(kv.slab.num_kept(block) == 1 for block in pin.slab):
                return True
            if indexer and any(kv.index_pool.leases(block) == 1 for block in pin.indexer):
                return True
        return False

    def _check_new(self, ticket: TicketId) -> None:
        if ticket in self._loads or ticket in self._stores:
            raise ProtocolError(f"ticket {ticket} was given out twice")

    def assert_invariants(self, running: dict[str, Request]) -> None:
        """Open tickets and leases belong together, and who waits for a load runs and has computed up to it."""
        if self.num_open != self._arrivals.num_open or self.num_open != self.source.num_open:
            raise InvariantError(
                f"{self.num_open} tickets are open, {self._arrivals.num_open} hold leases, "
                f"the source knows {self.source.num_open}"
            )
        if not self._overdue <= self._loads.keys() | self._stores.keys():
            raise InvariantError(f"tickets {sorted(self._overdue)} are overdue and not all of them open")
        for ticket, load in self._loads.items():
            request = load.request
            if request is None:
                continue
            at = load.arrival.first_page * self._block_size
            if running.get(request.request_id) is not request or not at == request.num_computed == request.capacity:
                raise InvariantError(
                    f"ticket {ticket} loads position {at} of request {request.request_id}, which is "
                    f"{request.status.name}, has computed {request.num_computed} and has room for {request.capacity}"
                )


def _keys(request: Request) -> list[bytes]:
    if request.prefix_keys is None:
        raise InvariantError(f"request {request.request_id} asks for pages and its prompt has no keys")
    return request.prefix_keys


def _may_be_on_host(request: Request) -> bool:
    """Whether the request can have pages on the host that it did not claim when its footprint was promised."""
    return request.pages is None or request.pages.may_spill


def _to_load(arrival: Arrival) -> list[GroupPages]:
    """Where the bytes that are missing shall go, group by group."""
    wanted = []
    for group, blocks, at in (
        (GroupKind.RESIDENT, arrival.resident, arrival.num_resident),
        (GroupKind.INDEXER, arrival.indexer, arrival.num_indexed),
    ):
        if at < arrival.num_pages:
            wanted.append(GroupPages(group, arrival.first_page + at, tuple(blocks[at:])))
    return wanted
