"""Which running request will have which page: what is being computed for one need not be computed for another.

From its admission on, the pages that a prompt lacks are *underway*: its request will compute them or get them from
below. A waiting request that lacks one of them too is parked until it is there. It then takes an ordinary prefix hit,
or, if the owner left before, is admitted like any other and owns what is missing from then on.

Nobody waits in a circle: owners run, who is parked does not, and who runs waits for nobody's pages. A key says what the
page's whole prefix is, so the owner of a page has, or will have, all pages before it.
"""

from collections.abc import Iterable, Sequence

from hisparse.engine.request import Request
from hisparse.engine.waiting_queue import WaitingQueue
from hisparse.errors import InvariantError


class PagesUnderway:
    """The index from page keys to owners, and whoever of `waiting` is parked under one of its keys.

    A prompt's pages cost one entry each when it is admitted and one removal each when they are there; no call looks at
    more of them.
    """

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._owner: dict[bytes, Request] = {}
        self._next: dict[Request, int] = {}
        """Of each owner, the first page that it does not have yet."""

    def enter(self, request: Request) -> None:
        """A request was admitted: all pages of its prompt that it lacks are underway now. Who owned one keeps it."""
        keys, first = _keys(request), _num_sealed(request)
        if first < len(keys):
            self._next[request] = first
            for key in keys[first:]:
                self._owner.setdefault(key, request)

    def advance(self, request: Request) -> None:
        """A running request may have more of its pages now: those are not underway any more."""
        first = self._next.get(request)
        if first is None or (last := _num_sealed(request)) <= first:
            return
        keys = _keys(request)
        if last < len(keys):
            self._next[request] = last
        else:
            del self._next[request]
        self._remove(request, keys[first:last])

    def leave(self, request: Request) -> None:
        """A running request is about to end or to be preempted: what it lacks is underway no more."""
        first = self._next.pop(request, None)
        if first is not None:
            self._remove(request, _keys(request)[first:])

    def clear(self) -> None:
        """Nobody shall wait for what is being computed now: its beginning was forgotten."""
        keys = tuple(self._owner)
        self._owner.clear()
        self._next.clear()
        self._waiting.release(keys)

    def _remove(self, request: Request, keys: Iterable[bytes]) -> None:
        owner = self._owner
        owned = [key for key in keys if owner.get(key) is request]
        for key in owned:
            del owner[key]
        self._waiting.release(owned)

    def last_of(self, keys: Sequence[bytes]) -> bytes | None:
        """The last of `keys`, in the order of a prompt, that is underway."""
        owner = self._owner
        if not owner or owner.keys().isdisjoint(keys):
            return None
        return next(key for key in reversed(keys) if key in owner)

    def assert_invariants(self, running: dict[str, Request]) -> None:
        """Owners run and lack what they own, and who is parked waits for a page that is underway."""
        owned: set[bytes] = set()
        for request, first in self._next.items():
            if running.get(request.request_id) is not request or first != _num_sealed(request):
                raise InvariantError(
                    f"request {request.request_id}, which is {request.status.name}, is to have pages from {first} on"
                )
            owned.update(key for key in _keys(request)[first:] if self._owner.get(key) is request)
        if owned != self._owner.keys():
            raise InvariantError(f"{len(self._owner)} pages are underway, running requests lack {len(owned)} of them")
        if forgotten := self._waiting.awaited - owned:
            raise InvariantError(f"requests wait for {len(forgotten)} pages that nobody computes")


def _keys(request: Request) -> list[bytes]:
    if request.prefix_keys is None:
        raise InvariantError(f"request {request.request_id} was admitted and its prompt has no keys")
    return request.prefix_keys


def _num_sealed(request: Request) -> int:
    if request.pages is None:
        raise InvariantError(f"request {request.request_id} owns pages and is not running")
    return request.pages.num_sealed
