"""Whether a request can run at all, and with which prefix hit, if any, it may start now."""

from dataclasses import dataclass

from hisparse.cache import KVCacheManager, Verdict
from hisparse.config import TAIL_PAGES, CachePlan
from hisparse.engine.pages_underway import PagesUnderway
from hisparse.engine.request import Request
from hisparse.errors import CapacityError
from hisparse.geometry import NULL_BLOCK
from hisparse.residency import Demand, HiSparseCoordinator, PrefixHit, Supply, can_ever_run, may_start


@dataclass(frozen=True, slots=True)
class Follow:
    """The request does better to wait for a page of its prompt that a running request will have."""

    key: bytes


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a request did not start. `rooms`: the most room of each kind that was too little for it; with nobody else
    running (`was_alone`), just what there was. `leaving`: the page that it waited for instead, on its way to the host.
    """

    request: Request
    rooms: tuple[int, ...]
    was_alone: bool
    leaving: bytes | None = None


class AdmissionGate:
    """Answers for one scheduler. It remembers the last refusal: a look-up costs as much as the prompt is long."""

    def __init__(
        self, plan: CachePlan, kv: KVCacheManager, coordinator: HiSparseCoordinator, underway: PagesUnderway
    ) -> None:
        self._plan = plan
        self._kv = kv
        self._coordinator = coordinator
        self._underway = underway
        self._refusal: _Refusal | None = None

    def require_possible(self, request: Request) -> None:
        """Raises `CapacityError`, with both numbers, for a request that could not run even with all pools to itself."""
        limit = self._plan.config.max_tokens
        if request.max_length > limit:
            raise CapacityError(
                f"request {request.request_id} may grow to {request.max_length} tokens; the limit is {limit}"
            )
        verdict = can_ever_run(self._plan, Demand.of(self._plan, request.num_prompt, request.max_length))
        if verdict.verdict is Verdict.NEVER:
            raise CapacityError(f"request {request.request_id} of {request.num_prompt} tokens: {verdict.reason}")

    def reopen(self) -> None:
        """Other pages are found than before: what was refused says nothing any more."""
        self._refusal = None

    def find_start(self, request: Request, promised: int, is_alone: bool) -> PrefixHit | Follow | None:
        """The prefix hit with which the first waiting request may start now, or None while it has to wait.

        `promised`: the footprints of the running requests; `is_alone`: there are none. Nobody starts to compute pages
        that are underway. One that has left the device and is not yet found on the host is waited for: that takes a
        few steps, in which nobody passes.
        """
        supply = Supply.of(self._kv, self._coordinator, promised)
        rooms = supply.rooms()
        if self._is_refused_still(request, rooms, is_alone):
            return None
        if request.prefix_keys is None:
            request.prefix_keys = self._coordinator.prefix_keys(request.tokens)
        hit = self._coordinator.find_prefix(request.prefix_keys, look_beyond=request.asks_tiers)
        missing = request.prefix_keys[hit.num_pages :]
        if (key := self._underway.last_of(missing)) is not None:
            self._refusal = None
            return Follow(key)
        if missing and self._is_leaving(missing[0]):
            self._refusal = _Refusal(request, rooms, is_alone, leaving=missing[0])
            return None
        start = self._fit(request, hit, supply, is_alone)
        if start is None:
            self._refuse(request, rooms, is_alone)
        return start

    def demand(self, request: Request, hit: PrefixHit) -> Demand:
        """What the request wants of the pools when it starts with `hit`."""
        return Demand.of(self._plan, len(request.tokens), request.max_length, hit)

    def _fit(self, request: Request, hit: PrefixHit, supply: Supply, is_alone: bool) -> PrefixHit | None:
        """As much of a hit as the request may start with.

        A hit in free blocks of the slab takes them, and may leave too few for the first pages beside it. While others
        run, that passes; when nobody does, a shorter hit has to do. Index keys and host blocks, if those are short,
        it would need as many: what it does not find, it computes.
        """
        demand = self.demand(request, hit)
        answer = may_start(self._plan, demand, supply)
        if answer.granted:
            return hit
        if not is_alone or not answer.slab_short:
            return None
        # So many free blocks may be claimed beside the first pages, so the hit has to end before the next one. That
        # leaves `TAIL_PAGES` or more to compute: the hit at hand claims more than `spare` even if it leaves fewer.
        spare = supply.slab_free + supply.reclaimable - TAIL_PAGES
        leases = self._kv.slab.leases
        claimed = [page for page, block in enumerate(hit.resident) if block != NULL_BLOCK and not leases(block)]
        if not 0 <= spare < len(claimed):
            return None
        shorter = self._coordinator.find_prefix(hit.keys[: claimed[spare]], look_beyond=request.asks_tiers)
        return shorter if may_start(self._plan, self.demand(request, shorter), supply).granted else None

    def _is_leaving(self, key: bytes) -> bool:
        """Whether a page is found once a copy to the host that is under way has ended."""
        return self._kv.index_pool.lookup(key) is not None and self._coordinator.is_being_copied(key)

    def _is_refused_still(self, request: Request, rooms: tuple[int, ...], is_alone: bool) -> bool:
        refusal = self._refusal
        if refusal is None or refusal.request is not request:
            return False
        if refusal.leaving is not None:
            return self._is_leaving(refusal.leaving)
        if is_alone:
            # Only copies that end change anything now, the pages that are found included; whatever ends gives room.
            return refusal.was_alone and rooms == refusal.rooms
        return all(now <= then for now, then in zip(rooms, refusal.rooms, strict=True))

    def _refuse(self, request: Request, rooms: tuple[int, ...], is_alone: bool) -> None:
        known = self._refusal
        if known is not None and known.request is request and known.leaving is None and not is_alone:
            rooms = tuple(map(max, rooms, known.rooms))
        self._refusal = _Refusal(request, rooms, is_alone)
