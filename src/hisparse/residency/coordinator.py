"""HiSparseCoordinator: which page is where, and the transactions that move pages between device and host.

It owns the host block pool, the source tables (token → host block) and the prefix identity of host pages. Device
blocks belong to the KV cache manager; the coordinator asks it to punch and fill holes.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.prefix import extend_keys
from hisparse.cache.table_log import TableLog
from hisparse.config import WriteBack
from hisparse.errors import InvariantError
from hisparse.geometry import NULL_BLOCK
from hisparse.protocol import HostBlockId, SparseKVPageTransfer, Table
from hisparse.residency.arrivals import Arrival, Arrivals
from hisparse.residency.invariants import check_coordinator
from hisparse.residency.page_moves import PageMoves
from hisparse.residency.page_states import PageState, RequestPages
from hisparse.residency.prefix_hits import PrefixHit, find_prefix
from hisparse.residency.spill_order import SpillCosts, next_to_leave, num_worth_giving


class HiSparseCoordinator(PageMoves):
    """The scheduler's side of residency for one replica: which page is where, and which move.

    A request is known from `add`, after that of `kv`, to `remove`, which ends its leases in `kv` too. A step: `seal`
    what is computed, `reclaim` and `restore` as blocks are needed, hand out `take_transfers` with the command, and
    `apply` what the workers report. Sizes are blocks and pages, `kv.plan.config.block_size` tokens each.

    `kv` and `log` are the replica's. `root` is the prefix key before the first page, bytes (`cache.prefix.root_key`).
    `num_workers` reports are needed for every acknowledgement. Raises `InvariantError` naming the request for one that
    is not known, or is already, and for pages in a state that does not allow what is asked; `ProtocolError` for a
    report that is unknown, repeated or out of order.
    """

    def __init__(self, kv: KVCacheManager, log: TableLog, root: bytes, num_workers: int = 1) -> None:
        super().__init__(kv, log, num_workers)
        self.write_back = kv.plan.config.write_back
        self.block_size = kv.plan.config.block_size
        self.arrivals = Arrivals(kv, self.host_pool)
        self._root = root
        self._num_asked = 0
        """Blocks asked for since the last command, and those of the hot leases that what leaves makes needed."""

    # Requests.

    def add(self, request_id: str, slot: int, tokens: "array[int]", may_spill: bool = True) -> None:
        """Know a request. `tokens` (typecode "i") stays the caller's and may only be appended to.

        `slot` is the one that `kv` knows it by. Without `may_spill` its pages never leave the device. Raises
        `InvariantError` for a request that is known already and for a slot that is lent.
        """
        may_spill = may_spill and self.write_back is not WriteBack.NEVER
        self._know(RequestPages(request_id, slot, tokens, may_spill))

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
        pages = self.pages(request_id)
        self.kv.resident.adopt(request_id, hit.resident)
        self.kv.indexer.adopt(request_id, hit.indexer)
        for block in hit.host:
            if block != NULL_BLOCK:
                self.host_pool.lease(block)
        self._go_on(pages, hit.keys, hit.host)

    def commit_arrival(self, request_id: str, arrival: Arrival) -> None:
        """The bytes of an arrival are there: the request, all of whose pages are before it, has its pages now."""
        pages = self.pages(request_id)
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
        if arrival.publishes:
            self.kv.publish(request_id, first, arrival.keys)
        else:
            pages.num_forgotten = pages.num_sealed
        if self.write_back is WriteBack.EAGER:
            self._spill(pages.holder, arrival.num_pages)

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
            self._set_price(pages)
            self._log.write(Table.HOST, pages.slot, first, pages.host[first:])
        self._offer(pages, first)

    def _offer(self, pages: RequestPages, first: int) -> None:
        """Pages from `first` on are new, and may leave the device."""
        self.kv.slab.offer(pages.offered(self.kv.resident.blocks(pages.request_id), first), pages.holder)

    def seal(self, request_id: str, num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed: full pages get their key and may be found and spilled.

        Raises `InvariantError` for an unknown request, and for more tokens than it has, or than its pages hold.
        """
        pages = self.pages(request_id)
        num_full = num_tokens // self.block_size
        first = pages.num_sealed
        if num_full <= first:
            return
        num_pages = self.kv.resident.num_pages(request_id)
        if num_tokens > len(pages.tokens) or num_full > num_pages:
            raise InvariantError(
                f"request {request_id} seals {num_tokens} tokens, and has {len(pages.tokens)}, and {num_pages} pages"
            )
        pages.extend(num_full)
        extend_keys(pages.keys, pages.tokens, self.block_size, num_full, self._root)
        self.kv.publish(request_id, first, pages.keys[first:num_full])
        pages.num_sealed = num_full
        self._offer(pages, first)
        if self.write_back is WriteBack.EAGER:
            self._spill(pages.holder, num_full - first)

    def remove(self, request_id: str) -> None:
        """The request finished or was preempted: end its leases on both sides.

        Copies in flight keep theirs. Pages that were sealed stay findable; nothing else was ever published. Raises
        `InvariantError` for an unknown request.
        """
        pages = self._forget(request_id)
        self.arrivals.unclaim(request_id)
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
        for pages in self._requests.values():
            pages.num_forgotten = pages.num_sealed

    # Which pages move.

    def take_transfers(self) -> tuple[SparseKVPageTransfer, ...]:
        """Transfers begun since the last call, for the next command, whose table updates were taken already."""
        self._num_asked = 0
        return super().take_transfers()

    @property
    def blocks_on_their_way(self) -> int:
        """Device blocks that become free when the spills that were begun take effect."""
        return self.kv.slab.num_leaving

    def num_reclaimable(self) -> int:
        """Device blocks that become free when all pages leave for which that is worth it, as far as the host has room.

        A shared block is one block, and counts where all that lease it may spill. Hot leases that requests come to need
        are taken off.
        """
        return num_worth_giving(self.kv.slab.offers, self._costs()) + self.kv.slab.num_leaving

    def reclaim(self, num_blocks: int) -> int:
        """See to it that `num_blocks` device blocks become free soon, beside those asked for since the last command.

        Returns how many are on their way by now, whoever they are for: what was asked for in vain is asked for again in
        the next step.

        A request that does not read from the host yet will need a hot lease as soon as it decodes, so what leaves
        pays for that lease too; where nothing else comes free, with pages that it is yet to compute. Whose pages leave
        next, and when nobody's do, is said in `spill_order`.
        """
        slab = self.kv.slab
        self._num_asked += num_blocks
        while slab.num_leaving < self._num_asked and (offers := slab.free_offers or slab.priced_offers):
            costs = self._costs()
            choice = next_to_leave(offers, costs)
            if choice is None and not slab.num_leaving:
                choice = next_to_leave(offers, replace(costs, coming=self._coming()))
            if choice is None:
                break
            holders, num_hot = choice
            cost = num_hot * costs.hot_blocks
            if not self._spill(holders, self._num_asked + cost - slab.num_leaving):
                # The host has no room.
                break
            self._num_asked += cost
        return slab.num_leaving

    def _costs(self) -> SpillCosts:
        return SpillCosts(self.kv.slab.priced, self.kv.plan.hot_blocks, self.host_pool.num_free)

    def _coming(self) -> dict[int, int]:
        """By request, the blocks that it will be able to give beside those it can now.

        Of a prompt more pages are to come. And who is alone gives what there is: nobody else can.
        """
        if len(self._requests) == 1:
            return {pages.holder: self.kv.plan.hot_blocks for pages in self._requests.values()}
        size = self.block_size
        return {pages.holder: max(0, len(pages.tokens) // size - pages.num_sealed) for pages in self._requests.values()}

    def assert_invariants(self) -> None:
        """Leases add up on both sides and every page's state agrees with the tables. For tests and debug runs."""
        check_coordinator(self, tuple(self._requests.values()), self._transactions)
