"""Laws that hold for a coordinator after every call. Used by tests after every step, and by debug runs."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hisparse.errors import InvariantError
from hisparse.geometry import NULL_BLOCK
from hisparse.protocol import DeviceBlockId, Direction, HostBlockId
from hisparse.residency.page_states import PageState, RequestPages
from hisparse.residency.transactions import TransactionLog

if TYPE_CHECKING:
    from hisparse.residency.coordinator import HiSparseCoordinator


def check_coordinator(
    coordinator: "HiSparseCoordinator", requests: tuple[RequestPages, ...], log: TransactionLog
) -> None:
    """Raise `InvariantError` naming the ids and states that contradict each other."""
    pins: Counter[int] = Counter()
    index_pins: Counter[int] = Counter()
    host: Counter[int] = Counter()
    coordinator.arrivals.count_leases(pins, index_pins, host)
    strangers = set(coordinator.arrivals.claimants()) - {pages.request_id for pages in requests}
    if strangers:
        raise InvariantError(f"host pages are claimed for requests that are unknown: {sorted(strangers)}")
    marks: dict[int, tuple[int, int]] = {}
    leaving = coordinator.leaving
    for pages in requests:
        table = coordinator.kv.resident.blocks(pages.request_id)
        _check_pages(pages, table, leaving)
        _count_marks(pages, table, marks)
        host.update(block for block in pages.host if block != NULL_BLOCK)
    for transaction in log.open():
        enqueued = log.is_enqueued(transaction)
        is_spill = transaction.transfer.direction is Direction.DEVICE_TO_HOST
        for copy in transaction.transfer.copies:
            host[copy.host_block] += 1
            if not enqueued:
                pins[copy.device_block] += 1
                by, num_leaving = marks.get(copy.device_block, (0, 0))
                marks[copy.device_block] = by, num_leaving + is_spill
        for owner in transaction.owners:
            _check_owner(owner, transaction.pages, transaction.transfer.transfer_id)
    coordinator.kv.assert_invariants(pins, index_pins)
    slab = coordinator.kv.slab
    hot = coordinator.kv.hot
    priced = sum(pages.holder for pages in requests if not pages.num_host_backed and not hot.holds(pages.request_id))
    if priced != slab.priced:
        raise InvariantError(f"requests {slab.priced:#x} are said to need hot leases if they spill; {priced:#x} would")
    for number in range(1, slab.num_blocks):
        marked, expected = slab.marks(DeviceBlockId(number)), marks.get(number, (0, 0))
        if marked != expected:
            raise InvariantError(
                f"slab block {number}: {marked[0]:#x} offer leases and {marked[1]} are leaving; pages and transfers "
                f"say {expected[0]:#x} and {expected[1]}"
            )
    coordinator.host_pool.assert_invariants()
    for block in range(1, coordinator.host_pool.num_blocks):
        leases = coordinator.host_pool.leases(HostBlockId(block))
        if leases != host[block]:
            raise InvariantError(f"host block {block} has {leases} leases, its users account for {host[block]}")


def _check_pages(pages: RequestPages, table: Sequence[int], leaving: frozenset[tuple[RequestPages, int]]) -> None:
    for page, state in enumerate(pages.state):
        on_device = table[page] != NULL_BLOCK
        on_host = pages.host[page] != NULL_BLOCK
        expected = {
            PageState.RESIDENT: (True, False),
            PageState.SPILLING: (True, True),
            PageState.HOST: (False, True),
        }[PageState(state)]
        if (on_device, on_host) != expected:
            raise InvariantError(
                f"page {page} of request {pages.request_id} is {PageState(state).name} with device block "
                f"{table[page]} and host block {pages.host[page]}"
            )
        if state == PageState.SPILLING and (page in pages.in_flight) == ((pages, page) in leaving):
            raise InvariantError(
                f"page {page} of request {pages.request_id} is SPILLING in no transfer, or in two ways"
            )
        if state != PageState.RESIDENT and page >= pages.num_sealed:
            raise InvariantError(f"page {page} of request {pages.request_id} left the device before it was sealed")
    backed = len(pages.state) - pages.state.count(PageState.RESIDENT)
    if backed != pages.num_host_backed:
        raise InvariantError(f"request {pages.request_id} counts {pages.num_host_backed} host pages, has {backed}")
    if any(state == PageState.RESIDENT for state in pages.state[: pages.first_resident]):
        raise InvariantError(f"request {pages.request_id} has a resident page below {pages.first_resident}")


def _count_marks(pages: RequestPages, table: Sequence[int], marks: dict[int, tuple[int, int]]) -> None:
    """Add, by block, who would give it up and how many of its leases are leaving."""
    for page, state in enumerate(pages.state):
        holders, num_leaving = marks.get(table[page], (0, 0))
        if state == PageState.SPILLING:
            marks[table[page]] = holders, num_leaving + 1
        elif state == PageState.RESIDENT and pages.may_spill and page not in pages.in_flight:
            marks[table[page]] = holders | pages.holder, num_leaving


def _check_owner(owner: RequestPages, pages: tuple[int, ...], transfer_id: int) -> None:
    for page in pages:
        if owner.in_flight.get(page) != transfer_id:
            raise InvariantError(f"page {page} of request {owner.request_id} does not know its transfer {transfer_id}")
