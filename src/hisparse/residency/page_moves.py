"""Moves of pages between device and host: the transactions that carry them, and what both sides know meanwhile.

Who shall move, and when, is the coordinator's to say.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hisparse.cache.block_pool import BlockPool
from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.table_log import TableLog
from hisparse.errors import InvariantError
from hisparse.geometry import NULL_BLOCK
from hisparse.protocol import (
    DeviceBlockId,
    Direction,
    HostBlockId,
    PageCopy,
    SparseKVPageTransfer,
    SparseKVWorkerReport,
    Table,
)
from hisparse.residency.page_states import PageState, RequestPages
from hisparse.residency.transactions import Transaction, TransactionLog


@dataclass(slots=True)
class ResidencyTotals:
    """Pages moved since the start, those of a shared block once for each request that shares it. `spills` counts pages
    that left the device, `shared_spills` those of them that needed no copy of their own, `restores` pages that came
    back, `adopted_restores` those of them whose bytes were on the device still."""

    spills: int = 0
    shared_spills: int = 0
    restores: int = 0
    adopted_restores: int = 0


class PageMoves:
    """Every request's page records, and the transactions in flight. `num_workers` report each of them."""

    def __init__(self, kv: KVCacheManager, log: TableLog, num_workers: int) -> None:
        self.kv = kv
        self.host_pool: BlockPool[HostBlockId] = BlockPool(kv.plan.num_host_blocks, "host")
        self.totals = ResidencyTotals()
        self._log = log
        self._requests: dict[str, RequestPages] = {}
        self._by_holder: dict[int, RequestPages] = {}
        self._transactions = TransactionLog(num_workers)
        self._outbox: list[SparseKVPageTransfer] = []
        self._newly_backed: list[str] = []
        self._leaving: list[tuple[RequestPages, int]] = []

    def _know(self, pages: RequestPages) -> None:
        """A request has come, without pages."""
        if pages.request_id in self._requests:
            raise InvariantError(f"request {pages.request_id} is already known")
        if (other := self._by_holder.get(pages.holder)) is not None:
            raise InvariantError(f"slot {pages.slot} of request {pages.request_id} is lent to {other.request_id}")
        self._requests[pages.request_id] = self._by_holder[pages.holder] = pages
        self._set_price(pages)

    def _set_price(self, pages: RequestPages) -> None:
        """Whoever reads from the host needs a hot lease anyway; others would need one once a page of theirs leaves."""
        if pages.num_host_backed or self.kv.hot.holds(pages.request_id):
            self.kv.slab.settle(pages.holder)
        else:
            self.kv.slab.price(pages.holder)

    def pages(self, request_id: str) -> RequestPages:
        """The request's page records. Read them; only the coordinator changes them.

        Raises `InvariantError` for a request that is not known.
        """
        pages = self._requests.get(request_id)
        if pages is None:
            raise InvariantError(f"request {request_id} is not known: it was never added, or was removed")
        return pages

    def _forget(self, request_id: str) -> RequestPages:
        """A request goes, and keeps its leases, which are unmarked; no transaction moves its pages any more."""
        pages = self.pages(request_id)
        del self._requests[request_id]
        del self._by_holder[pages.holder]
        table = self.kv.resident.blocks(request_id)
        self.kv.slab.withdraw(pages.offered(table), pages.holder)
        for block in pages.spilling(table):
            self.kv.slab.unmark_leaving(block)
        for transaction in self._transactions.open():
            if pages in transaction.owners:
                transaction.owners.remove(pages)
        self._leaving = [(owner, page) for owner, page in self._leaving if owner is not pages]
        self.kv.slab.settle(pages.holder)
        return pages

    # To the host.

    def _spill(self, holders: int, limit: int) -> int:
        """Begin to spill up to `limit` blocks that exactly `holders` share and offer. Returns how many.

        The lowest pages first, fewer when the host pool is full. A shared block is copied once, and all sharers have
        the one host block from then on.
        """
        owners = self._owners(holders)
        whole = [owner for owner in owners if not owner.num_host_backed]
        copied: list[int] = []
        copies: list[PageCopy] = []
        num_spilled = 0
        for page, block in self._shared_pages(owners[0], holders, limit):
            twin = self.host_pool.lookup(owners[0].keys[page])
            if twin is None and not self.host_pool.num_free:
                break
            self.kv.slab.give_up(block)
            if twin is None:
                # The copy has a lease of its own on either side.
                (host_block,) = self.host_pool.allocate(1)
                self.kv.slab.lease(block)
                self.kv.slab.mark_leaving(block)
                copied.append(page)
                copies.append(PageCopy(block, host_block))
            else:
                # The host holds these bytes already, valid and published.
                host_block = twin
                self._leaving += [(owner, page) for owner in owners]
            for owner in owners:
                owner.move(page, PageState.SPILLING)
                self.host_pool.lease(host_block)
                owner.host[page] = host_block
            num_spilled += 1
        if copies:
            self._begin(owners, copied, copies, Direction.DEVICE_TO_HOST)
        if num_spilled:
            self._newly_backed += [owner.request_id for owner in whole]
            for owner in whole:
                self._set_price(owner)
        return num_spilled

    def _owners(self, holders: int) -> list[RequestPages]:
        """The requests of a set of holders."""
        owners = []
        while holders:
            lowest = holders & -holders
            owners.append(self._by_holder[lowest])
            holders ^= lowest
        return owners

    def _shared_pages(self, pages: RequestPages, holders: int, limit: int) -> list[tuple[int, DeviceBlockId]]:
        """Up to `limit` pages of a request that exactly `holders` share and offer, the lowest first."""
        first = pages.seek_resident()
        blocks = self.kv.resident.blocks(pages.request_id)[first : pages.num_sealed]
        places = self.kv.slab.find_offers(blocks, holders, limit)
        return [(first + place, DeviceBlockId(blocks[place])) for place in places]

    def _begin(
        self, owners: Iterable[RequestPages], chosen: Iterable[int], copies: list[PageCopy], direction: Direction
    ) -> None:
        """Begin to copy pages `chosen`, which are the same ones of all owners."""
        members, numbers = list(owners), tuple(chosen)
        transfer = SparseKVPageTransfer(self._transactions.next_id(), direction, tuple(copies))
        # What one of the sharers found or computed after the pools had to forget may be found.
        forgotten = min(owner.num_forgotten for owner in members)
        keys = tuple(members[0].keys[page] if page >= forgotten else None for page in numbers)
        self._transactions.begin(Transaction(transfer, members, numbers, keys))
        for owner in members:
            owner.in_flight.update(dict.fromkeys(numbers, transfer.transfer_id))
        self._outbox.append(transfer)

    def _leave_device(self, pages: RequestPages, page: int, is_copied: bool = False) -> None:
        """A SPILLING page's bytes are, or in stream order will be, on the host: read it from there."""
        pages.move(page, PageState.HOST)
        self.kv.slab.unmark_leaving(DeviceBlockId(self.kv.resident.blocks(pages.request_id)[page]))
        self.kv.resident.punch_hole(pages.request_id, page)
        self._log.write(Table.HOST, pages.slot, page, (pages.host[page],))
        self.totals.spills += 1
        self.totals.shared_spills += not is_copied

    def take_newly_backed(self) -> list[str]:
        """Requests that got their first host page since the last call; some may be gone. They need a hot lease."""
        newly, self._newly_backed = self._newly_backed, []
        return newly

    # Back to the device.

    def restore(self, request_id: str, max_pages: int) -> int:
        """Bring up to `max_pages` HOST pages back into free device blocks, the last ones first. Returns how many.

        A page whose bytes some device block still holds, whoever leases it, is there at once and needs no copy.
        """
        pages = self.pages(request_id)
        slab = self.kv.slab
        limit = min(max_pages, slab.num_free)
        chosen = [
            page
            for page in range(pages.num_sealed - 1, -1, -1)
            if pages.state[page] == PageState.HOST and page not in pages.in_flight
        ][:limit]
        if not chosen:
            return 0
        # Adopt all that can be adopted before a block is allocated: that could be the very block.
        rest = [page for page in chosen if not self._adopt_device_copy(pages, page)]
        copies = []
        for page, block in zip(rest, slab.allocate(len(rest)), strict=True):
            source = HostBlockId(pages.host[page])
            self.host_pool.lease(source)
            copies.append(PageCopy(block, source))
        if copies:
            self._begin([pages], rest, copies, Direction.HOST_TO_DEVICE)
        return len(chosen)

    def _adopt_device_copy(self, pages: RequestPages, page: int) -> bool:
        """Make a HOST page resident in the block that is published under its key, if there is one."""
        block = self.kv.slab.lookup(pages.keys[page])
        if block is None:
            return False
        self.kv.slab.lease(block)
        self._come_back(pages, page, block)
        self.kv.slab.offer((block,), pages.holder)
        self.totals.adopted_restores += 1
        return True

    def _come_back(self, pages: RequestPages, page: int, block: DeviceBlockId) -> None:
        """A HOST page is read from a device block from now on, a lease on which passes to its table."""
        pages.move(page, PageState.RESIDENT)
        self.kv.resident.fill_hole(pages.request_id, page, block)
        self._log.write(Table.HOST, pages.slot, page, (NULL_BLOCK,))
        self.host_pool.release((HostBlockId(pages.host[page]),))
        pages.host[page] = NULL_BLOCK
        self._set_price(pages)
        self.totals.restores += 1

    # The worker's side of the conversation.

    def take_transfers(self) -> tuple[SparseKVPageTransfer, ...]:
        """Transfers begun since the last call, for the next command, whose table updates were taken already.

        Pages that leave without a copy leave here. Like those that are copied, they are still on the device in the
        command at hand: it may decode requests that will take a hot lease only for the next one.
        """
        transfers = tuple(self._outbox)
        self._outbox.clear()
        for pages, page in self._leaving:
            self._leave_device(pages, page)
        self._leaving.clear()
        return transfers

    @property
    def leaving(self) -> frozenset[tuple[RequestPages, int]]:
        """Pages that are SPILLING without a copy, because the host holds their bytes already."""
        return frozenset(self._leaving)

    @property
    def num_in_flight(self) -> int:
        """Transfers begun and not yet completed by every worker."""
        return len(self._transactions)

    def is_being_copied(self, key: bytes) -> bool:
        """Whether a copy under way will have the page with this key found, where it was not found before."""
        return any(key in transaction.keys for transaction in self._transactions.open() if transaction.publishes)

    def apply(self, report: SparseKVWorkerReport) -> None:
        """Take a worker's report. Raises `ProtocolError` for one that cannot be true."""
        enqueued, completed = self._transactions.acknowledge(report)
        for transaction in enqueued:
            if transaction.transfer.direction is Direction.DEVICE_TO_HOST:
                self._spill_enqueued(transaction)
            else:
                self._restore_enqueued(transaction)
        for transaction in completed:
            self._completed(transaction)

    def _spill_enqueued(self, transaction: Transaction) -> None:
        for page, copy in zip(transaction.pages, transaction.transfer.copies, strict=True):
            for number, owner in enumerate(transaction.owners):
                self._leave_device(owner, page, is_copied=not number)
            self.kv.slab.unmark_leaving(copy.device_block)
            self.kv.slab.release((copy.device_block,))

    def _restore_enqueued(self, transaction: Transaction) -> None:
        if not transaction.owners:
            self.kv.slab.release(copy.device_block for copy in transaction.transfer.copies)
            return
        (owner,) = transaction.owners
        for page, copy in zip(transaction.pages, transaction.transfer.copies, strict=True):
            self._come_back(owner, page, copy.device_block)
        self.kv.resident.publish(owner.request_id, [(page, key) for page, _, key in transaction.published()])

    def _completed(self, transaction: Transaction) -> None:
        is_spill = transaction.transfer.direction is Direction.DEVICE_TO_HOST
        copies = transaction.transfer.copies
        for owner in transaction.owners:
            for page in transaction.pages:
                del owner.in_flight[page]
            if not is_spill and owner.may_spill:
                self.kv.slab.offer([copy.device_block for copy in copies], owner.holder)
        if is_spill:
            for _, copy, key in transaction.published():
                self.host_pool.publish(copy.host_block, key)
        self.host_pool.release(copy.host_block for copy in copies)
