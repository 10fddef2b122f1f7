"""Requests that wait to be admitted: first come, first served, except that nobody waits for a parked one.

A request that somebody else computes pages for is parked under the key of a page. It keeps its place in the queue, and
those behind it may pass; once that page is released, it goes before all of them again.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

from hisparse.engine.request import Request, RequestStatus
from hisparse.errors import InvariantError


class WaitingQueue:
    """Every request has a place, smaller is earlier. No call but iteration looks at the parked ones."""

    def __init__(self) -> None:
        self._place: dict[Request, int] = {}
        self._first_place = self._last_place = 0
        self._ready: list[Request] = []
        """The requests that are not parked, by place."""
        self._parked: dict[bytes, list[Request]] = {}
        self._parked_under: dict[Request, bytes] = {}

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, request: object) -> bool:
        return request in self._place

    def __iter__(self) -> Iterator[Request]:
        """All requests in the order of their places."""
        return iter(sorted(self._place, key=self._place.__getitem__))

    @property
    def ready(self) -> Sequence[Request]:
        """The requests that are not parked, the first one first. Read it; only the queue changes it."""
        return self._ready

    @property
    def first(self) -> Request | None:
        """The request that is next."""
        return self._ready[0] if self._ready else None

    def append(self, request: Request) -> None:
        """Queue a request behind all others."""
        self._last_place += 1
        self._enter(request, self._last_place)

    def appendleft(self, request: Request) -> None:
        """Queue a request before all others."""
        self._first_place -= 1
        self._enter(request, self._first_place)

    def _enter(self, request: Request, place: int) -> None:
        if request in self._place:
            raise InvariantError(f"request {request.request_id} waits already")
        self._place[request] = place
        self._insert(request)

    def remove(self, request: Request) -> None:
        """The request, parked or not, waits no more."""
        if request not in self._place:
            raise InvariantError(f"request {request.request_id} does not wait")
        key = self._parked_under.pop(request, None)
        if key is None:
            self._take_out(request)
        else:
            self._parked[key].remove(request)
            if not self._parked[key]:
                del self._parked[key]
        del self._place[request]

    def park(self, request: Request, key: bytes) -> None:
        """Let others pass a request that is ready, until `key` is released."""
        if request not in self._place or request in self._parked_under:
            raise InvariantError(f"request {request.request_id} is parked already, or does not wait")
        self._take_out(request)
        self._parked.setdefault(key, []).append(request)
        self._parked_under[request] = key

    def release(self, keys: Iterable[bytes]) -> None:
        """Whoever is parked under one of `keys` is ready again, in its old place."""
        if not self._parked:
            return
        for key in keys:
            for request in self._parked.pop(key, ()):
                del self._parked_under[request]
                self._insert(request)

    @property
    def awaited(self) -> frozenset[bytes]:
        """The keys under which requests are parked."""
        return frozenset(self._parked)

    def _insert(self, request: Request) -> None:
        insort(self._ready, request, key=self._place.__getitem__)

    def _take_out(self, request: Request) -> None:
        at = bisect_left(self._ready, self._place[request], key=self._place.__getitem__)
        del self._ready[at]

    def assert_invariants(self) -> None:
        """Every request is WAITING and is ready or parked, once, and those that are ready are in order."""
        if any(request.status is not RequestStatus.WAITING for request in self._place):
            raise InvariantError("a request that waits is not WAITING")
        parked = {request: key for key, requests in self._parked.items() for request in requests}
        if parked != self._parked_under or not all(self._parked.values()):
            raise InvariantError("the keys that requests are parked under contradict each other")
        if sorted([*map(id, self._ready), *map(id, parked)]) != sorted(map(id, self._place)):
            raise InvariantError(f"{len(self._ready)} ready and {len(parked)} parked are not the {len(self)} that wait")
        places = [self._place[request] for request in self._ready]
        if places != sorted(places):
            raise InvariantError(f"requests are ready in the order of places {places}")
