"""HiSparseCoordinator: which page is where, and the transactions that move pages between device and host.

It owns the host block pool, the source tables (token → host block) and the prefix identity of host pages. Device
blocks belong to the KV cache manager; the coordinator asks it to punch and fill holes.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from hisparse.cache.block_pool import BlockPool
from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.prefix import extend_keys
from hisparse.cache.table_log import TableLog
from hisparse.config import WriteBack
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
from hisparse.residency.arrivals import Arrival, Arrivals
from hisparse.residency.invariants import check_coordinator
from hisparse.residency.page_states import PageState, RequestPages
from hisparse.residency.prefix_hits import PrefixHit, find_prefix
from hisparse.residency.spill_order import SpillOrder
from hisparse.residency.transactions import Transaction, TransactionLog


@dataclass(slots=True)
class ResidencyTotals:
    """Pages moved since the start. `spills` counts pages that left the device, `shared_spills` those of them whose
    bytes were on the host already, `restores` pages that came back, `adopted_restores` those of them whose bytes
    were on the device still."""

    spills: int = 0
    shared_spills: int = 0
    restores: int = 0
    adopted_restores: int = 0


class HiSparseCoordinator:
    """The scheduler's side of residency for one replica.

    `root` is the prefix key before the first page (`cache.prefix.root_key`). `num_workers` reports are needed for
    every acknowledgement.
    """

    def __init__(self, kv: KVCacheManager, log: TableLog, root: bytes, num_workers: int = 1) -> None:
        plan = kv.plan
        self.kv = kv
        self.write_back = plan.config.write_back
        self.block_size = plan.config.block_size
        self.host_pool: BlockPool[HostBlockId] = BlockPool(plan.num_host_blocks, "host")
        self.arrivals = Arrivals(kv, self.host_pool)
        self.totals = ResidencyTotals()
        self._log = log
        self._root = root
        self._requests: dict[str, RequestPages] = {}
        self._transactions = TransactionLog(num_workers)
        self._outbox: list[SparseKVPageTransfer] = []
        self._order = SpillOrder()
        self._blocks_on_their_way = 0
        self._newly_backed: list[str] = []
        self._leaving: list[tuple[RequestPages, int]] = []

    # Requests.

    def add(self, request_id: str, slot: int, tokens: "array[int]", may_spill: bool = True) -> None:
        """Know a request. `tokens` (typecode "i") stays the caller's and may only be appended to."""
        if request_id in self._requests:
            raise InvariantError(f"request {request_id} is already known")
        may_spill = may_spill and self.write_back is not WriteBack.NEVER
        self._requests[request_id] = RequestPages(request_id, slot, tokens, may_spill)

    def pages(self, request_id: str) -> RequestPages:
        """The request's page records. Read them; only the coordinator changes them."""
        return self._requests[request_id]

    def prefix_keys(self, tokens: "array[int]") -> list[bytes]:
        """Keys of the full pages of a prompt. At least one token is left out: the last one's logits are wanted."""
        keys: list[bytes] = []
        extend_keys(keys, tokens, self.block_size, max(0, len(tokens) - 1) // self.block_size, self._root)
        return keys

    def find_prefix(self, keys: Sequence[bytes], look_beyond: bool = False) -> PrefixHit:
        """The longest prefix of a prompt that every group can serve, and where each page of it is.

        `look_beyond`: whether the hit shall also say which MLA pages follow it on the host.
        """
        return find_prefix(self.kv, self.host_pool, keys, look_beyond)

    def adopt_prefix(self, request_id: str, hit: PrefixHit) -> None:
        """Start a request that has no pages yet with the pages of a hit, which no one changed since it was found."""
        pages = self._requests[request_id]
        self.kv.resident.adopt(request_id, hit.resident)
        self.kv.indexer.adopt(request_id, hit.indexer)
        for block in hit.host:
            if block != NULL_BLOCK:
                self.host_pool.lease(block)
        self._go_on(pages, hit.keys, hit.host)

    def commit_arrival(self, request_id: str, arrival: Arrival) -> None:
        """The bytes of an arrival are there: the request, all of whose pages are before it, has its pages now."""
        pages = self._requests[request_id]
        first = pages.num_sealed
        if not first == arrival.first_page == self.kv.resident.num_pages(request_id):
            raise InvariantError(
                f"request {request_id} has {self.kv.resident.num_pages(request_id)} pages, {first} of them computed; "
                f"page {arrival.first_page} does not follow"
            )
        self.arrivals.hand_over(arrival)
        self.kv.resident.append(request_id, arrival.resident)
        self.kv.indexer.append(request_id, arrival.indexer)
        self._go_on(pages, arrival.keys, arrival.host)
        self.kv.publish(request_id, first, arrival.keys)
        if self.write_back is WriteBack.EAGER and pages.may_spill:
            self._spill(pages, arrival.num_pages)

    def _go_on(self, pages: RequestPages, keys: Sequence[bytes], host: Sequence[HostBlockId]) -> None:
        """Records for pages that follow the last one; where `host` names a block, the request now holds a lease."""
        first = pages.num_sealed
        pages.extend(first + len(keys))
        pages.keys.extend(keys)
        pages.num_sealed = first + len(keys)
        num_backed = 0
        for page, block in enumerate(host, first):
            if block != NULL_BLOCK:
                pages.host[page] = block
                pages.state[page] = PageState.HOST
                num_backed += 1
        if num_backed:
            pages.num_host_backed += num_backed
            self._log.write(Table.HOST, pages.slot, first, pages.host[first:])
        self._order.refresh(pages)

    def seal(self, request_id: str, num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed: full pages get their key and may be found and spilled."""
        pages = self._requests[request_id]
        num_full = num_tokens // self.block_size
        first = pages.num_sealed
        if num_full <= first:
            return
        pages.extend(num_full)
        extend_keys(pages.keys, pages.tokens, self.block_size, num_full, self._root)
        self.kv.publish(request_id, first, pages.keys[first:num_full])
        pages.num_sealed = num_full
        self._order.refresh(pages)
        if self.write_back is WriteBack.EAGER and pages.may_spill:
            self._spill(pages, num_full - first)

    def remove(self, request_id: str) -> None:
        """The request finished or was preempted: end its leases on both sides.

        Copies in flight keep theirs. Pages that were sealed stay findable; nothing else was ever published.
        """
        pages = self._requests.pop(request_id)
        self.arrivals.unclaim(request_id)
        self._order.forget(pages)
        for transaction in self._transactions.open():
            if transaction.owner is pages:
                transaction.owner = None
        staying = [(owner, page) for owner, page in self._leaving if owner is not pages]
        self._blocks_on_their_way -= len(self._leaving) - len(staying)
        self._leaving = staying
        self.host_pool.release(cast("list[HostBlockId]", [block for block in pages.host if block != NULL_BLOCK]))
        self.kv.remove(request_id)
        self._log.reset(pages.slot)

    def forget_content(self, root: bytes | None = None) -> None:
        """No page that any pool holds now is found again, nor is one that is on its way to the host.

        With a new `root`, as after a change of weights, keys mean something else from now on; no request may be known
        then, because its pages would be taken for what they are not.
        """
        if root is not None:
            if self._requests:
                raise InvariantError(f"the prefix root changes under requests {', '.join(self._requests)}")
            self._root = root
        self.kv.forget_content()
        self.host_pool.forget_all()
        self.arrivals.forget_content()
        for transaction in self._transactions.open():
            transaction.publishes = False

    # Moving pages.

    @property
    def blocks_on_their_way(self) -> int:
        """Device blocks that become free when the spills that were begun take effect."""
        return self._blocks_on_their_way

    def num_reclaimable(self) -> int:
        """Device blocks that spilling every page that may leave would free, as far as the host pool has room."""
        return min(self._order.num_spillable(), self.host_pool.num_free) + self._blocks_on_their_way

    def reclaim(self, num_blocks: int) -> int:
        """See to it that `num_blocks` device blocks become free soon. Returns how many do, spills in flight included.

        Requests that read from the host already give their pages first. One that does not will need a hot lease as
        soon as it decodes, so its pages pay for that lease too.
        """
        wanted, given = num_blocks, self._blocks_on_their_way
        while given < wanted and (pages := self._order.next_victim()) is not None:
            if not pages.num_host_backed and not self.kv.hot.holds(pages.request_id):
                wanted += self.kv.plan.hot_blocks
            more = self._spill(pages, wanted - given)
            if not more:
                break
            given += more
        return given

    def take_newly_backed(self) -> list[str]:
        """Requests that got their first host page since the last call; some may be gone. They need a hot lease."""
        newly, self._newly_backed = self._newly_backed, []
        return newly

    def restore(self, request_id: str, max_pages: int) -> int:
        """Bring up to `max_pages` HOST pages back into free device blocks, the last ones first. Returns how many.

        A page whose bytes some device block still holds, whoever leases it, is there at once and needs no copy.
        """
        pages = self._requests[request_id]
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
            self._begin(pages, rest, copies, Direction.HOST_TO_DEVICE)
        self._order.refresh(pages)
        return len(chosen)

    def _adopt_device_copy(self, pages: RequestPages, page: int) -> bool:
        """Make a HOST page resident in the block that is published under its key, if there is one."""
        block = self.kv.slab.lookup(pages.keys[page])
        if block is None:
            return False
        self.kv.slab.lease(block)
        self._come_back(pages, page, block)
        self.totals.adopted_restores += 1
        return True

    def _come_back(self, pages: RequestPages, page: int, block: DeviceBlockId) -> None:
        """A HOST page is read from a device block from now on, a lease on which passes to its table."""
        pages.move(page, PageState.RESIDENT)
        self.kv.resident.fill_hole(pages.request_id, page, block)
        self._log.write(Table.HOST, pages.slot, page, (NULL_BLOCK,))
        self.host_pool.release((HostBlockId(pages.host[page]),))
        pages.host[page] = NULL_BLOCK
        self.totals.restores += 1

    def _spill(self, pages: RequestPages, limit: int) -> int:
        """Begin to spill up to `limit` pages, fewer when the host pool is full. Returns how many."""
        chosen = pages.spillable(limit)
        was_whole = not pages.num_host_backed
        num_leaving = len(self._leaving)
        copied: list[int] = []
        copies: list[PageCopy] = []
        resident = self.kv.resident.blocks(pages.request_id)
        for page in chosen:
            twin = self.host_pool.lookup(pages.keys[page])
            if twin is None and not self.host_pool.num_free:
                break
            pages.move(page, PageState.SPILLING)
            device_block = DeviceBlockId(resident[page])
            self._blocks_on_their_way += 1
            if twin is not None:
                # The host holds these bytes already, valid and published: share them.
                self.host_pool.lease(twin)
                pages.host[page] = twin
                self._leaving.append((pages, page))
                self.totals.shared_spills += 1
                continue
            (host_block,) = self.host_pool.allocate(1)
            self.host_pool.lease(host_block)
            self.kv.slab.lease(device_block)
            pages.host[page] = host_block
            copied.append(page)
            copies.append(PageCopy(device_block, host_block))
        if copies:
            self._begin(pages, copied, copies, Direction.DEVICE_TO_HOST)
        self._order.refresh(pages)
        if was_whole and pages.num_host_backed:
            self._newly_backed.append(pages.request_id)
        return len(copies) + len(self._leaving) - num_leaving

    def _begin(self, pages: RequestPages, chosen: Iterable[int], copies: list[PageCopy], direction: Direction) -> None:
        numbers = tuple(chosen)
        transfer = SparseKVPageTransfer(self._transactions.next_id(), direction, tuple(copies))
        keys = tuple(pages.keys[page] for page in numbers)
        self._transactions.begin(Transaction(transfer, pages, numbers, keys))
        for page in numbers:
            pages.in_flight[page] = transfer.transfer_id
        self._outbox.append(transfer)

    def _leave_device(self, pages: RequestPages, page: int) -> None:
        """A SPILLING page's bytes are, or in stream order will be, on the host: read it from there."""
        pages.move(page, PageState.HOST)
        self.kv.resident.punch_hole(pages.request_id, page)
        self._log.write(Table.HOST, pages.slot, page, (pages.host[page],))
        self._blocks_on_their_way -= 1
        self.totals.spills += 1

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
        owner = transaction.owner
        for page, copy in zip(transaction.pages, transaction.transfer.copies, strict=True):
            if owner is not None:
                self._leave_device(owner, page)
            else:
                self._blocks_on_their_way -= 1
            self.kv.slab.release((copy.device_block,))

    def _restore_enqueued(self, transaction: Transaction) -> None:
        owner = transaction.owner
        if owner is None:
            self.kv.slab.release(copy.device_block for copy in transaction.transfer.copies)
            return
        for page, copy in zip(transaction.pages, transaction.transfer.copies, strict=True):
            self._come_back(owner, page, copy.device_block)
            owner.num_returning += 1
        if transaction.publishes:
            self.kv.resident.publish(owner.request_id, zip(transaction.pages, transaction.keys, strict=True))
        self._order.refresh(owner)

    def _completed(self, transaction: Transaction) -> None:
        owner = transaction.owner
        if owner is not None:
            for page in transaction.pages:
                del owner.in_flight[page]
            if transaction.transfer.direction is Direction.HOST_TO_DEVICE:
                owner.num_returning -= len(transaction.pages)
                self._order.refresh(owner)
        copies = transaction.transfer.copies
        if transaction.transfer.direction is Direction.DEVICE_TO_HOST and transaction.publishes:
            for copy, key in zip(copies, transaction.keys, strict=True):
                self.host_pool.publish(copy.host_block, key)
        self.host_pool.release(copy.host_block for copy in copies)

    def assert_invariants(self) -> None:
        """Leases add up on both sides and every page's state agrees with the tables. For tests and debug runs."""
        check_coordinator(self, tuple(self._requests.values()), self._transactions)
