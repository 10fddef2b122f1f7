"""Where the truth of a page is, and how that may change.

    RESIDENT ──spill begins──► SPILLING ──copy enqueued──► HOST
        ▲                                                   │
        └──────────────── restore enqueued ─────────────────┘

A page is RESIDENT from the moment it gets a device block. SPILLING pages still read from the device. A HOST page
whose copy is enqueued but not completed may be read by work ordered behind the copy; only its completion makes the
bytes fit to be published. A page whose bytes the host holds already needs no copy: it is SPILLING until the command at
hand is built, so that no command reads a page from the host that was resident when its work was chosen.

Requests that share a device block have a record each, for the same page number; they spill it together.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import compress
from typing import cast

from hisparse.errors import InvariantError
from hisparse.protocol import DeviceBlockId, TransferId


class PageState(IntEnum):
    """Which copy of a page counts. Integers, because a request keeps one byte per page."""

    RESIDENT = 0
    SPILLING = 1
    HOST = 2


TRANSITIONS = frozenset(
    {
        (PageState.RESIDENT, PageState.SPILLING),
        (PageState.SPILLING, PageState.HOST),
        (PageState.HOST, PageState.RESIDENT),
    }
)

_IS_RESIDENT = bytes(state == PageState.RESIDENT for state in range(256))
_IS_SPILLING = bytes(state == PageState.SPILLING for state in range(256))


@dataclass(slots=True, eq=False)
class RequestPages:
    """The page records of one request, one column per field, one entry per page. The coordinator changes them.

    `state[i]`: the page's `PageState`. `host[i]`: its host block, with one lease, or 0; set while SPILLING or HOST.
    `in_flight[i]`: the transfer that moves the page now. `tokens`: the request's tokens, shared with the engine,
    which only appends. `may_spill`: whether pages may leave the device at all; a request that is smaller than a hot
    lease stays whole. `keys`: prefix keys of pages 0 … len-1. `num_sealed`: pages that are full and computed; only
    these may leave the device, and only these have entries in `state` and `host`; the pages after them are resident.
    `first_resident`: no page below it is RESIDENT. `num_host_backed`: pages that are SPILLING or HOST.
    `num_forgotten`: of the pages below it no copy is published, because the pools were told to forget them.
    """

    request_id: str
    slot: int
    tokens: "array[int]"
    may_spill: bool = True
    state: bytearray = field(default_factory=bytearray)
    host: "array[int]" = field(default_factory=lambda: array("i"))
    in_flight: dict[int, TransferId] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    num_sealed: int = 0
    first_resident: int = 0
    num_host_backed: int = 0
    num_forgotten: int = 0

    def move(self, page: int, to: PageState) -> None:
        """Take one page along one edge of the diagram. Raises `InvariantError` for any other move."""
        state = self.state[page]
        if (state, to) not in TRANSITIONS:
            raise InvariantError(
                f"page {page} of request {self.request_id} cannot go from {PageState(state).name} to {to.name}"
            )
        self.state[page] = to
        if to is PageState.SPILLING:
            self.num_host_backed += 1
        elif to is PageState.RESIDENT:
            self.num_host_backed -= 1
            self.first_resident = min(self.first_resident, page)

    def extend(self, num_pages: int) -> None:
        """Records for new pages, which start RESIDENT."""
        more = num_pages - len(self.state)
        if more > 0:
            self.state.extend(bytes(more))
            self.host.extend(array("i", bytes(4 * more)))

    @property
    def holder(self) -> int:
        """The request as a holder of blocks of the slab: one bit."""
        return 1 << self.slot

    def seek_resident(self) -> int:
        """The first RESIDENT page; the number of pages where there is none."""
        page = self.state.find(PageState.RESIDENT, self.first_resident)
        self.first_resident = page if page >= 0 else self.num_sealed
        return self.first_resident

    def offered(self, table: Sequence[int], first_page: int = 0) -> list[DeviceBlockId]:
        """Of the request's device blocks from page `first_page` on, those that it would give up.

        They hold sealed RESIDENT pages that no copy is still bringing back.
        """
        if not self.may_spill:
            return []
        chosen = self.state[first_page:].translate(_IS_RESIDENT)
        for page in self.in_flight:
            if page >= first_page:
                chosen[page - first_page] = 0
        return cast("list[DeviceBlockId]", list(compress(table[first_page:], chosen)))

    def spilling(self, table: Sequence[int]) -> list[DeviceBlockId]:
        """The device blocks of its SPILLING pages."""
        return cast("list[DeviceBlockId]", list(compress(table, self.state.translate(_IS_SPILLING))))
