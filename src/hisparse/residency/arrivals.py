"""Pages that are brought in from below the pools, and every lease that no request holds for them yet.

A prefix of which the host has more rows than the indexer has keys, or which the pools know nothing of, comes in pieces:

    claim ──────────────────────────────────────────────────► unclaim      rows on the host, until they are adopted
    reserve ──► commit    the bytes came: a request takes the leases over
            ├─► release   they did not
            └─► detach ──► release    nobody waits any more, but a copy may still write the blocks
    pin ──► unpin         blocks that a copy to below reads

What is reserved belongs to no request's table, so it cannot be spilled; it is bounded by a piece, and a piece ends when
its copies end.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hisparse.cache.admission import Admission, Verdict
from hisparse.cache.block_pool import BlockPool
from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.errors import InvariantError
from hisparse.geometry import NULL_BLOCK
from hisparse.protocol import DeviceBlockId, HostBlockId
from hisparse.residency.prefix_hits import pick_rows


@dataclass(slots=True, eq=False)
class Arrival:
    """A piece of a prompt and one lease on every block of it.

    Page `first_page + i` has `keys[i]`, `indexer[i]` and either `resident[i]` or, with null there, `host[i]`. The bytes
    of the first `num_resident` and `num_indexed` of them are there; the others are yet to come. `publishes`: whether
    what comes may be found; not after the pools were told to forget.
    """

    first_page: int
    keys: tuple[bytes, ...]
    resident: list[DeviceBlockId]
    host: list[HostBlockId]
    indexer: list[DeviceBlockId]
    num_resident: int
    num_indexed: int
    publishes: bool = True

    @property
    def num_pages(self) -> int:
        """Pages of the piece."""
        return len(self.keys)


@dataclass(slots=True, eq=False)
class Pin:
    """One more lease on each of these blocks, for a copy that reads them."""

    slab: tuple[DeviceBlockId, ...] = ()
    indexer: tuple[DeviceBlockId, ...] = ()


@dataclass(slots=True)
class _Claim:
    """Host blocks, leased, of pages `first_page` …; null where there is none."""

    first_page: int
    blocks: list[HostBlockId]


class Arrivals:
    """All claims, arrivals and pins of one replica."""

    def __init__(self, kv: KVCacheManager, host_pool: BlockPool[HostBlockId]) -> None:
        self._kv = kv
        self._host_pool = host_pool
        self._claims: dict[str, _Claim] = {}
        self._open: dict[Arrival, None] = {}
        self._pins: dict[Pin, None] = {}

    # Rows on the host that wait for their index keys.

    def claim(self, request_id: str, first_page: int, blocks: Sequence[HostBlockId]) -> None:
        """Lease host blocks for pages `first_page` … of a request, null where the host has none."""
        if request_id in self._claims:
            raise InvariantError(f"request {request_id} has claimed host pages already")
        for block in blocks:
            if block != NULL_BLOCK:
                self._host_pool.lease(block)
        self._claims[request_id] = _Claim(first_page, list(blocks))

    def unclaim(self, request_id: str) -> None:
        """Give back what is left of a request's claim, if it has one."""
        claim = self._claims.pop(request_id, None)
        if claim is not None:
            self._host_pool.release([block for block in claim.blocks if block != NULL_BLOCK])

    # Pieces.

    def num_local(self, request_id: str, keys: Sequence[bytes], first_page: int, on_host: bool) -> tuple[int, int]:
        """Leading pages of a prompt with page keys `keys` of which rows and index keys are at hand.

        The request has the first `first_page` itself. `on_host`: whether it may adopt host pages that it has not
        claimed.
        """
        rest = keys[first_page:]
        resident, _ = self._rows(request_id, rest, first_page, on_host)
        return first_page + len(resident), first_page + self._kv.index_pool.longest_prefix(rest)

    def _rows(
        self, request_id: str, rest: Sequence[bytes], first_page: int, on_host: bool
    ) -> tuple[list[DeviceBlockId], list[HostBlockId]]:
        """Blocks of the leading pages of `rest`, which begins with page `first_page`, in the slab or on the host."""

        def on_the_host(page: int) -> list[HostBlockId]:
            claimed = self._claimed(request_id, first_page + page, len(rest) - page)
            if not on_host:
                return claimed
            found = self._host_pool.lookup_all(rest[page:])
            return [block or known for block, known in zip(claimed, found, strict=True)]

        return pick_rows(self._kv.slab.lookup_all(rest), on_the_host)

    def _claimed(self, request_id: str, first_page: int, num_pages: int) -> list[HostBlockId]:
        """The claim as it falls on pages `first_page` …: it may begin before them, or behind the first."""
        null = HostBlockId(NULL_BLOCK)
        claim = self._claims.get(request_id)
        if claim is None:
            return [null] * num_pages
        before = claim.first_page - first_page
        blocks = [null] * before + claim.blocks if before > 0 else claim.blocks[-before:]
        return blocks[:num_pages] + [null] * (num_pages - len(blocks))

    def reserve(self, request_id: str, keys: Sequence[bytes], first_page: int, on_host: bool) -> "Arrival | Admission":
        """Lease blocks for as many pages from `first_page` on, whose keys these are, as there is room for.

        At least one, or an answer that says what is missing. Blocks that hold the bytes already are taken as they are;
        for other pages, free ones.
        """
        slab, index_pool = self._kv.slab, self._kv.index_pool
        resident, host = self._rows(request_id, keys, first_page, on_host)
        index_blocks = index_pool.lookup_all(keys)
        num_resident, num_indexed = len(resident), index_pool.longest_prefix(keys)
        free, index_free = slab.num_free, index_pool.num_free
        count = 0
        for page in range(len(keys)):
            device = resident[page] if page < num_resident else None
            free -= device is None or (device != NULL_BLOCK and not slab.leases(device))
            index_free -= page >= num_indexed or not index_pool.leases(index_blocks[page])
            if free < 0 or index_free < 0:
                break
            count += 1
        if not count:
            return Admission(Verdict.WAIT, slab_short=int(free < 0), indexer_short=int(index_free < 0))
        arrival = Arrival(
            first_page=first_page,
            keys=tuple(keys[:count]),
            resident=resident[:count],
            host=host[:count],
            indexer=index_blocks[: min(count, num_indexed)],
            num_resident=min(count, num_resident),
            num_indexed=min(count, num_indexed),
        )
        self._lease(request_id, arrival)
        return arrival

    def _lease(self, request_id: str, arrival: Arrival) -> None:
        """First what is found, so that nothing of it is evicted for the rest."""
        slab, index_pool = self._kv.slab, self._kv.index_pool
        self._lease_host(request_id, arrival)
        for found in arrival.resident:
            if found != NULL_BLOCK:
                slab.lease(found)
        for found in arrival.indexer:
            index_pool.lease(found)
        more = arrival.num_pages - arrival.num_resident
        arrival.resident += slab.allocate(more)
        arrival.host += [HostBlockId(NULL_BLOCK)] * more
        arrival.indexer += index_pool.allocate(arrival.num_pages - arrival.num_indexed)
        self._open[arrival] = None

    def _lease_host(self, request_id: str, arrival: Arrival) -> None:
        """Lease the host blocks of an arrival; what was claimed of its pages is claimed no more."""
        for block in arrival.host:
            if block != NULL_BLOCK:
                self._host_pool.lease(block)
        claim = self._claims.get(request_id)
        if claim is None:
            return
        past = max(0, arrival.first_page + arrival.num_pages - claim.first_page)
        self._host_pool.release([block for block in claim.blocks[:past] if block != NULL_BLOCK])
        claim.first_page, claim.blocks = claim.first_page + past, claim.blocks[past:]

    def hand_over(self, arrival: Arrival) -> None:
        """The caller takes over all leases of an arrival."""
        self._close(arrival)

    def release(self, arrival: Arrival, has_come: bool) -> None:
        """No copy writes the blocks any more and no request wants them: end the leases.

        `has_come`: whether the bytes did. Then they are left where a prefix hit finds them.
        """
        self._close(arrival)
        if has_come and arrival.publishes:
            for key, block, index_block in zip(arrival.keys, arrival.resident, arrival.indexer, strict=True):
                if block != NULL_BLOCK:
                    self._kv.slab.publish(block, key)
                if index_block != NULL_BLOCK:
                    self._kv.index_pool.publish(index_block, key)
        self._end_leases(arrival.resident, arrival.indexer, arrival.host)

    def detach(self, arrival: Arrival) -> None:
        """Nobody waits for the arrival any more. Keep only the blocks that a copy may still write."""
        if arrival not in self._open:
            raise InvariantError(f"an arrival of {arrival.num_pages} pages from {arrival.first_page} on is not open")
        resident, indexer = arrival.resident[: arrival.num_resident], arrival.indexer[: arrival.num_indexed]
        self._end_leases(resident, indexer, arrival.host)
        null = DeviceBlockId(NULL_BLOCK)
        arrival.resident[: arrival.num_resident] = [null] * arrival.num_resident
        arrival.indexer[: arrival.num_indexed] = [null] * arrival.num_indexed
        arrival.host = [HostBlockId(NULL_BLOCK)] * arrival.num_pages

    def _close(self, arrival: Arrival) -> None:
        if arrival not in self._open:
            raise InvariantError(f"an arrival of {arrival.num_pages} pages from {arrival.first_page} on is not open")
        del self._open[arrival]

    def _end_leases(
        self, resident: Sequence[DeviceBlockId], indexer: Sequence[DeviceBlockId], host: Sequence[HostBlockId]
    ) -> None:
        self._kv.slab.release([block for block in resident if block != NULL_BLOCK])
        self._kv.index_pool.release([block for block in indexer if block != NULL_BLOCK])
        self._host_pool.release([block for block in host if block != NULL_BLOCK])

    # Copies to below.

    def pin(self, slab: tuple[DeviceBlockId, ...], indexer: tuple[DeviceBlockId, ...]) -> Pin:
        """Lease blocks, which are leased, once more: they are not lent anew before `unpin`."""
        pin = Pin(slab, indexer)
        for pool, blocks in ((self._kv.slab, slab), (self._kv.index_pool, indexer)):
            for block in blocks:
                if not pool.leases(block):
                    raise InvariantError(f"{pool.name} block {block} is free: a copy out of it would read anything")
                pool.lease(block)
        self._pins[pin] = None
        return pin

    def unpin(self, pin: Pin) -> None:
        """The copy has ended."""
        if pin not in self._pins:
            raise InvariantError(f"slab blocks {pin.slab} and indexer blocks {pin.indexer} are not pinned")
        del self._pins[pin]
        self._end_leases(pin.slab, pin.indexer, ())

    # What all of it adds up to.

    def forget_content(self) -> None:
        """The pools forgot: what is under way is for those who wait for it, and for nobody else."""
        for arrival in self._open:
            arrival.publishes = False

    @property
    def num_open(self) -> int:
        """Arrivals and pins whose leases have not ended."""
        return len(self._open) + len(self._pins)

    def claimants(self) -> tuple[str, ...]:
        """Requests with a claim."""
        return tuple(self._claims)

    def count_leases(self, slab: Counter[int], indexer: Counter[int], host: Counter[int]) -> None:
        """Add every lease that is held here to the counts by block. For invariants."""
        for arrival in self._open:
            slab.update(block for block in arrival.resident if block != NULL_BLOCK)
            indexer.update(block for block in arrival.indexer if block != NULL_BLOCK)
            host.update(block for block in arrival.host if block != NULL_BLOCK)
        for pin in self._pins:
            slab.update(pin.slab)
            indexer.update(pin.indexer)
        for claim in self._claims.values():
            host.update(block for block in claim.blocks if block != NULL_BLOCK)
