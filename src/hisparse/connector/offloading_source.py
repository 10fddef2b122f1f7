"""The prefix source over the offload managers: one manager a group, and tickets that span what is copied for both.

Pages are the scheduler's unit, chunks of `pages_per_chunk` pages the managers'. A chunk's key is that of its last page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from secrets import token_bytes
from time import monotonic
from typing import NamedTuple

import xxhash

from hisparse.cache.groups import GroupKind
from hisparse.connector.offloading_messages import NOT_WANTED, RegionCopies
from hisparse.connector.prefix_source import GroupPages, Match, StoreTicket, TicketId, TierEvent, TierOutcome
from hisparse.errors import InvariantError, ProtocolError
from hisparse.geometry import NULL_BLOCK, ceil_div
from hisparse.offload.manager import OffloadManager
from hisparse.offload.messages import (
    LookupStatus,
    OffloadReport,
    RegionTransfer,
    TransferEvent,
    TransferKind,
    TransferOutcome,
)
from hisparse.offload.stats import OffloadStats
from hisparse.protocol import DeviceBlockId, TransferId


class _Reach(NamedTuple):
    """How far a group's prefix goes, in pages: now, and with what is coming as far as that is known. `waits`: whether
    there may be more than there is now.
    """

    now: int
    at_most: int
    waits: bool = False


@dataclass(slots=True, eq=False)
class _Ticket:
    """One load or store. `open`: its transfers that are not over. `request` becomes None when it is forgotten."""

    ticket: TicketId
    kind: TransferKind
    request: str | None
    num_pages_from_files: int = 0
    open: set[tuple[GroupKind, TransferId]] = field(default_factory=set)
    has_failed: bool = False
    is_overdue: bool = False


@dataclass(slots=True)
class _Matched:
    """A request that was matched and not forgotten. `first_chunk[group]`: where the last look-up began.

    `keys`: of its pages, as they were given last. `chunk_keys[group]`: those of its chunks from `first_chunk` to the
    last whole one, made once. `load`: its open load. `gave_up`: a load of it failed or is overdue; nothing is looked
    for any more.
    """

    first_chunk: dict[GroupKind, int] = field(default_factory=dict)
    keys: Sequence[bytes] = ()
    chunk_keys: dict[GroupKind, list[bytes]] = field(default_factory=dict)
    load: _Ticket | None = None
    gave_up: bool = False


class OffloadingSource:
    """`PrefixSource` over `managers`, in the order in which groups are asked: what the first lacks, no other loads."""

    def __init__(self, managers: Mapping[GroupKind, OffloadManager], pages_per_chunk: int = 1) -> None:
        if not managers or pages_per_chunk < 1:
            raise InvariantError(f"{len(managers)} groups in chunks of {pages_per_chunk} pages keep nothing")
        self.groups = tuple(managers)
        self.pages_per_chunk = pages_per_chunk
        """Pages are stored in aligned runs of so many, and only where one offer has a whole run."""
        self._managers = dict(managers)
        self._salt = b""
        """Behind it, what was stored before the last reset has other keys. Nothing before the first."""
        self._requests: dict[str, _Matched] = {}
        self._tickets: dict[TicketId, _Ticket] = {}
        self._ticket_of: dict[tuple[GroupKind, TransferId], _Ticket] = {}
        self._given_up: set[tuple[GroupKind, TransferId]] = set()
        """Transfers of stores that are overdue: their tickets are over, the workers are not."""
        self._last_ticket = 0
        self._outbox: list[RegionCopies] = []
        self._events: list[TierEvent] = []

    # Loading

    def match(
        self, request_id: str, keys: Sequence[bytes], have: Mapping[GroupKind, int], *, ahead: bool = False
    ) -> Match:
        """See `PrefixSource`. Raises `InvariantError` while the request loads."""
        state = self._requests.setdefault(request_id, _Matched())
        if state.gave_up:
            return Match(min(have.values()), False)
        if state.load is not None:
            raise InvariantError(f"request {request_id} matches while ticket {state.load.ticket} loads for it")
        if state.keys is not keys:
            state.keys = keys
            state.chunk_keys.clear()
        # The next group loads no more than those before it come to have, as far as that is known.
        limit = min([len(keys), *(pages for group, pages in have.items() if group not in self._managers)])
        num_pages, is_waiting = len(keys), False
        for group in self.groups:
            num_pages = min(num_pages, limit)
            reach = self._look_up(request_id, state, group, (have[group], limit), ahead)
            num_pages = min(num_pages, reach.now)
            is_waiting |= reach.waits
            limit = min(limit, reach.at_most)
        return Match(num_pages, is_waiting)

    def begin_load(self, request_id: str, keys: Sequence[bytes], pages: Sequence[GroupPages]) -> TicketId | None:
        """See `PrefixSource`. Raises `InvariantError` for pages that no match of the request was about."""
        state = self._requests.get(request_id)
        if state is None or state.load is not None or state.gave_up:
            raise InvariantError(f"request {request_id} loads, but no match of it promised anything")
        wanted = [part for part in pages if part.blocks]
        if not wanted or len({part.group for part in wanted}) < len(wanted):
            raise InvariantError(f"request {request_id} loads {len(wanted)} ranges of pages: one a group at most")
        counts = [self._num_chunks(request_id, state, part) for part in wanted]
        if not all(
            self._manager(part.group).is_loadable(request_id, count) for part, count in zip(wanted, counts, strict=True)
        ):
            return None
        ticket = self._open(TransferKind.LOAD, request_id)
        from_files: set[int] = set()
        for part, count in zip(wanted, counts, strict=True):
            manager, first = self._manager(part.group), state.first_chunk[part.group]
            below, chunks = manager.came_from_below(request_id), range(first, first + count)
            for chunk, key in zip(chunks, islice(state.chunk_keys[part.group], count), strict=True):
                if key in below:
                    from_files.update(self._pages_of(chunk, part))
            transfer = manager.prepare_load(request_id, count)
            if transfer is None:
                raise InvariantError(f"request {request_id}: {count} chunks could be loaded a moment ago")
            self._send(ticket, part.group, transfer, [self._blocks_of(chunk, part) for chunk in chunks])
        ticket.num_pages_from_files = len(from_files)
        state.load = ticket
        return ticket.ticket

    # Storing

    def offer(self, request_id: str, keys: Sequence[bytes], pages: Sequence[GroupPages]) -> StoreTicket | None:
        """See `PrefixSource`. What does not fill a chunk is not kept."""
        ticket: _Ticket | None = None
        stored: list[GroupPages] = []
        for part in pages:
            if min(part.blocks, default=1) <= NULL_BLOCK:
                raise InvariantError(f"request {request_id} offers pages {part.first_page}… that are not on the device")
            end = part.first_page + len(part.blocks)
            chunks = range(ceil_div(part.first_page, self.pages_per_chunk), end // self.pages_per_chunk)
            if not chunks:
                continue
            transfer = self._manager(part.group).prepare_store(request_id, self._chunk_keys(keys, chunks)).transfer
            if transfer is None:
                continue
            self._requests.setdefault(request_id, _Matched())
            ticket = ticket or self._open(TransferKind.STORE, request_id)
            copied = [chunks[copy.position] for copy in transfer.chunks]
            self._send(ticket, part.group, transfer, [self._blocks_of(chunk, part) for chunk in copied])
            stored += self._ranges(copied, part)
        return None if ticket is None else StoreTicket(ticket.ticket, tuple(stored))

    # The rest

    def take_events(self) -> tuple[TierEvent, ...]:
        """See `PrefixSource`."""
        self._hear_all()
        events = tuple(self._events)
        self._events.clear()
        return events

    def forget(self, request_id: str) -> None:
        """See `PrefixSource`. Unknown requests are none."""
        self._requests.pop(request_id, None)
        for manager in self._managers.values():
            manager.finish(request_id)
        for ticket in self._tickets.values():
            ticket.request = None if ticket.request == request_id else ticket.request

    def reset(self) -> None:
        """See `PrefixSource`. Files that were written before stay where they are, under keys that nobody asks for."""
        self._salt = token_bytes(16)
        for state in self._requests.values():
            state.chunk_keys.clear()
        for manager in self._managers.values():
            manager.reset()

    @property
    def num_under_way(self) -> int:
        """Transfers that some worker has not ended, as far as reports say; late stores included."""
        return sum(manager.num_open for manager in self._managers.values())

    @property
    def num_open(self) -> int:
        """See `PrefixSource`."""
        return len(self._tickets) + sum(event.is_last for event in self._events)

    def take_copies(self) -> tuple[RegionCopies, ...]:
        """What was planned since the last call, for the workers. Call it once a step: deadlines begin here."""
        for manager in self._managers.values():
            manager.hand_out()
        copies = tuple(self._outbox)
        self._outbox.clear()
        return copies

    def report(self, group: GroupKind, report: OffloadReport) -> None:
        """Take what one worker saw of a group. Raises `ProtocolError` for a report that cannot be true."""
        manager = self._managers.get(group)
        if manager is None:
            raise ProtocolError(f"worker {report.worker} reported on the {group.value} group, which is not offloaded")
        manager.report(report)
        self._hear_all()

    def stats(self) -> dict[GroupKind, OffloadStats]:
        """What each group's manager counts, in chunks."""
        return {group: manager.stats for group, manager in self._managers.items()}

    def rebind(self, managers: Mapping[GroupKind, OffloadManager]) -> None:
        """Go on with other managers, for other weights, on the same region. The caller has closed the former ones.

        Events of tickets that are over stay to be taken. Raises `InvariantError` while a transfer is under way, or for
        other groups.
        """
        self._hear_all()
        if self._tickets or self._given_up or tuple(managers) != self.groups:
            raise InvariantError(f"{len(self._tickets)} tickets and {len(self._given_up)} late stores are not over")
        self._managers = dict(managers)
        self._requests.clear()
        self._salt = b""

    def close(self, deadline_s: float) -> int:
        """Close the managers, all within `deadline_s`. Returns what is not over even then."""
        end_s = monotonic() + deadline_s
        return sum(manager.close(max(0.0, end_s - monotonic())) for manager in self._managers.values())

    # How it is done

    def _look_up(
        self, request_id: str, state: _Matched, group: GroupKind, wanted: tuple[int, int], ahead: bool
    ) -> _Reach:
        """Look for the pages `wanted[0]` … `wanted[1]`-1 of a group."""
        size, manager, (have, limit) = self.pages_per_chunk, self._managers[group], wanted
        first = have // size
        if state.first_chunk.get(group) != first or group not in state.chunk_keys:
            state.first_chunk[group] = first
            state.chunk_keys[group] = self._chunk_keys(state.keys, range(first, max(first, len(state.keys) // size)))
        num_chunks = ceil_div(limit, size) - first if have < limit else 0
        if num_chunks <= 0 and not manager.num_claimed(request_id):
            return _Reach(have, have)
        status, num_ready = manager.lookup(request_id, state.chunk_keys[group], max(0, num_chunks), ahead=ahead)

        def pages(num_chunks: int) -> int:
            return max(have, min((first + num_chunks) * size, limit)) if num_chunks else have

        waits = status in (LookupStatus.PENDING, LookupStatus.RETRY)
        return _Reach(pages(num_ready), pages(manager.num_claimed(request_id)), waits)

    def _num_chunks(self, request_id: str, state: _Matched, part: GroupPages) -> int:
        """Chunks to load from where the look-up began: the first of them may be of no use any more."""
        first = state.first_chunk.get(part.group)
        if first is None or part.first_page < first * self.pages_per_chunk:
            raise InvariantError(f"request {request_id} loads page {part.first_page}, which no match looked for")
        return ceil_div(part.first_page + len(part.blocks), self.pages_per_chunk) - first

    def _chunk_keys(self, keys: Sequence[bytes], chunks: range) -> list[bytes]:
        size = self.pages_per_chunk
        chosen = list(keys[(chunks.start + 1) * size - 1 : chunks.stop * size : size])
        return [xxhash.xxh3_128_digest(self._salt + key) for key in chosen] if self._salt else chosen

    def _pages_of(self, chunk: int, part: GroupPages) -> range:
        """Pages of the chunk that are in the range."""
        size, end = self.pages_per_chunk, part.first_page + len(part.blocks)
        return range(max(chunk * size, part.first_page), min((chunk + 1) * size, end))

    def _blocks_of(self, chunk: int, part: GroupPages) -> tuple[int, ...]:
        wanted, size = self._pages_of(chunk, part), self.pages_per_chunk
        pages = range(chunk * size, (chunk + 1) * size)
        return tuple(part.blocks[page - part.first_page] if page in wanted else NOT_WANTED for page in pages)

    def _ranges(self, chunks: Sequence[int], part: GroupPages) -> list[GroupPages]:
        """The pages of ascending chunks, as few ranges as there are."""
        found: list[tuple[int, list[DeviceBlockId]]] = []
        for chunk in chunks:
            pages = self._pages_of(chunk, part)
            blocks = part.blocks[pages.start - part.first_page : pages.stop - part.first_page]
            if found and found[-1][0] + len(found[-1][1]) == pages.start:
                found[-1][1].extend(blocks)
            else:
                found.append((pages.start, list(blocks)))
        return [GroupPages(part.group, first, tuple(blocks)) for first, blocks in found]

    def _hear_all(self) -> None:
        for group, manager in self._managers.items():
            for event in manager.take_events():
                self._hear(group, event)

    def _open(self, kind: TransferKind, request_id: str) -> _Ticket:
        self._last_ticket += 1
        ticket = _Ticket(TicketId(self._last_ticket), kind, request_id)
        self._tickets[ticket.ticket] = ticket
        return ticket

    def _send(
        self, ticket: _Ticket, group: GroupKind, transfer: RegionTransfer, blocks: Sequence[tuple[int, ...]]
    ) -> None:
        key = (group, transfer.transfer_id)
        ticket.open.add(key)
        self._ticket_of[key] = ticket
        rows = tuple(int(copy.block) for copy in transfer.chunks)
        self._outbox.append(RegionCopies(group, transfer.transfer_id, transfer.kind, rows, tuple(blocks)))

    def _hear(self, group: GroupKind, event: TransferEvent) -> None:
        key, outcome = (group, event.transfer_id), event.outcome
        if outcome is TransferOutcome.ENQUEUED:
            return
        if key in self._given_up:
            self._given_up.discard(key)
            return
        ticket = self._ticket_of.get(key)
        if ticket is None:
            raise InvariantError(f"transfer {event.transfer_id} of the {group.value} group belongs to no ticket")
        if outcome is TransferOutcome.OVERDUE and ticket.kind is TransferKind.LOAD:
            if not ticket.is_overdue:
                ticket.is_overdue = True
                self._give_up(ticket)
                self._events.append(TierEvent(ticket.ticket, TierOutcome.OVERDUE))
            return
        if outcome is TransferOutcome.OVERDUE:
            # The chunk is withdrawn, so it does not matter what a late copy reads: the store ends here.
            self._given_up.add(key)
        ticket.has_failed |= outcome is not TransferOutcome.DONE
        ticket.open.remove(key)
        del self._ticket_of[key]
        if not ticket.open:
            self._end(ticket)

    def _end(self, ticket: _Ticket) -> None:
        del self._tickets[ticket.ticket]
        if ticket.has_failed:
            self._give_up(ticket)
        state = self._requests.get(ticket.request) if ticket.request is not None else None
        if state is not None and state.load is ticket:
            state.load = None
        if ticket.has_failed:
            self._events.append(TierEvent(ticket.ticket, TierOutcome.FAILED))
        else:
            self._events.append(TierEvent(ticket.ticket, TierOutcome.DONE, ticket.num_pages_from_files))

    def _give_up(self, ticket: _Ticket) -> None:
        """The request of a load computes from now on."""
        state = self._requests.get(ticket.request) if ticket.request is not None else None
        if state is not None and state.load is ticket:
            state.gave_up, state.load = True, None

    def _manager(self, group: GroupKind) -> OffloadManager:
        manager = self._managers.get(group)
        if manager is None:
            raise InvariantError(f"the {group.value} group is not offloaded")
        return manager

    def assert_invariants(self) -> None:
        """Raises `InvariantError` unless managers are consistent and every open transfer is one ticket's."""
        for group, manager in self._managers.items():
            manager.assert_invariants()
            known = sum(key[0] is group for key in (*self._ticket_of, *self._given_up))
            if manager.num_open != known:
                raise InvariantError(f"{manager.num_open} transfers of the {group.value} group are open, {known} known")
        for ticket in self._tickets.values():
            if not ticket.open or any(self._ticket_of.get(key) is not ticket for key in ticket.open):
                raise InvariantError(f"ticket {ticket.ticket} is open, its transfers {ticket.open} say otherwise")
        if sum(len(ticket.open) for ticket in self._tickets.values()) != len(self._ticket_of):
            raise InvariantError(f"{len(self._ticket_of)} transfers have a ticket that is over")
        for request_id, state in self._requests.items():
            if state.load is not None and state.load.ticket not in self._tickets:
                raise InvariantError(f"request {request_id} loads by ticket {state.load.ticket}, which is over")
