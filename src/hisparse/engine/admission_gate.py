"""With which prefix hit, if any, the first waiting request may start."""

import math

from hisparse.cache import KVCacheManager
from hisparse.config import CachePlan
from hisparse.engine.request import Request
from hisparse.residency import Demand, HiSparseCoordinator, PrefixHit, Supply, may_start


class AdmissionGate:
    """Answers for one scheduler, and remembers a refusal, because a look-up costs as much as the prompt is long."""

    def __init__(self, plan: CachePlan, kv: KVCacheManager, coordinator: HiSparseCoordinator) -> None:
        self._plan = plan
        self._kv = kv
        self._coordinator = coordinator
        self._refused: tuple[float, ...] | None = None
        """The most room of each kind that was too little for the first waiting request."""

    def reopen(self) -> None:
        """Another request is the first, or other pages are found: what was refused says nothing any more."""
        self._refused = None

    def find_start(self, request: Request, promised: int, is_alone: bool) -> PrefixHit | None:
        """The prefix hit with which a waiting request may start now, or None while it has to wait.

        `promised`: the footprints of the running requests; `is_alone`: there are none. A hit in free blocks of the
        slab takes them, and may leave too few for the first pages beside it. While others run, that passes; when
        nobody does, a shorter hit has to do.
        """
        supply = Supply.of(self._kv, self._coordinator, promised)
        rooms = supply.rooms()
        refused = self._refused or (-math.inf,) * len(rooms)
        if not is_alone and all(now <= then for now, then in zip(rooms, refused, strict=True)):
            return None
        if request.prefix_keys is None:
            request.prefix_keys = self._coordinator.prefix_keys(request.tokens)
        keys = request.prefix_keys
        while True:
            hit = self._coordinator.find_prefix(keys, look_beyond=request.asks_tiers)
            if may_start(self._plan, self.demand(request, hit), supply).granted:
                return hit
            if not is_alone or not hit.num_pages:
                self._refused = tuple(map(max, rooms, self._refused or rooms))
                return None
            keys = keys[: hit.num_pages - 1]

    def demand(self, request: Request, hit: PrefixHit) -> Demand:
        """What the request wants of the pools when it starts with `hit`."""
        return Demand.of(self._plan, len(request.tokens), request.max_length, hit)
