"""The slab's pool: beside who leases a block, whether it would come free, and at whose hands.

A lease is kept until its holder says otherwise:

    offer ──► withdraw                       the holder would give it up if it were asked
      └─────► give_up ──► unmark_leaving     it was asked: the lease is *leaving*, and soon ends by itself
    mark_leaving ───────► unmark_leaving     the same for a lease that was never offered

Requests with the same beginning share blocks, and a block comes free when its last lease ends. So it is blocks that are
counted, by the holders without whom they stay, and never leases. A lease ends unmarked.

A holder is *priced* while giving a block up would have it need a hot lease that it has not. Blocks with such a holder
are counted apart, so that those that come at no price are at hand however many requests there are.
"""

from array import array
from collections.abc import Iterable, Sequence

from hisparse.cache.block_pool import BlockPool
from hisparse.errors import InvariantError
from hisparse.protocol import DeviceBlockId

_SCAN = 512
"""Blocks that a search looks at together."""


class SlabPool(BlockPool[DeviceBlockId]):
    """A block pool with marks on leases. A *holder* is an int with one bit set, holders together are their union."""

    def __init__(self, num_blocks: int, name: str) -> None:
        super().__init__(num_blocks, name)
        self.free_offers: dict[int, int] = {}
        """By holders, none of whom is priced: the number of blocks that all of them lease, nobody else does, and all of
        them offer. Sets of which that is true for longest come first. Read it; only this class changes it."""
        self.priced_offers: dict[int, int] = {}
        """The same by holders of whom some are priced."""
        self.priced = 0
        """The holders that are priced. `price` and `settle` change it."""
        self.num_leaving = 0
        """Blocks all of whose leases are leaving. Only this class changes it."""
        self._offered: list[int] = [0] * num_blocks
        self._leaving = array("i", bytes(4 * num_blocks))

    # Prices.

    @property
    def offers(self) -> dict[int, int]:
        """All offers in one, those at no price first."""
        return self.free_offers | self.priced_offers

    def price(self, holder: int) -> None:
        """Giving blocks up would have `holder` need a hot lease. Idempotent."""
        if not self.priced & holder:
            self.priced |= holder
            self._move(holder, self.free_offers, self.priced_offers)

    def settle(self, holder: int) -> None:
        """`holder` has its hot lease, or needs one whatever it gives, or is gone. Idempotent."""
        if self.priced & holder:
            self.priced ^= holder
            self._move(holder, self.priced_offers, self.free_offers)

    def _move(self, holder: int, source: dict[int, int], target: dict[int, int]) -> None:
        """Sets with `holder`, whose price has changed, that no longer belong to `source`."""
        for holders in [holders for holders in source if holders & holder]:
            if self._offers_of(holders) is target:
                target[holders] = source.pop(holders)

    def _offers_of(self, holders: int) -> dict[int, int]:
        return self.priced_offers if holders & self.priced else self.free_offers

    # Marks.

    def offer(self, blocks: Iterable[DeviceBlockId], holder: int) -> None:
        """`holder` would give up its lease on each block."""
        offered, leases, leaving = self._offered, self._leases, self._leaving
        # Blocks that follow each other mostly have the same holders: they are counted together.
        run, length = 0, 0
        for block in blocks:
            before, num_leases = offered[block], leases[block]
            if before & holder or before.bit_count() + leaving[block] >= num_leases:
                raise InvariantError(f"pool {self.name}: no lease of block {block} is left for {holder:#x} to offer")
            offered[block] = now = before | holder
            if now.bit_count() == num_leases:
                if now != run:
                    self._count(run, length)
                    run, length = now, 0
                length += 1
        self._count(run, length)

    def withdraw(self, blocks: Iterable[DeviceBlockId], holder: int) -> None:
        """`holder` keeps its lease on each block, or is about to end it."""
        offered, leases = self._offered, self._leases
        run, length = 0, 0
        for block in blocks:
            before = offered[block]
            if not before & holder:
                raise InvariantError(f"pool {self.name}: {holder:#x} has not offered block {block}")
            offered[block] = before ^ holder
            if before.bit_count() == leases[block]:
                if before != run:
                    self._count(run, -length)
                    run, length = before, 0
                length += 1
        self._count(run, -length)

    def give_up(self, block: DeviceBlockId) -> None:
        """All leases of a block are offered: they are leaving now."""
        holders, leases = self._offered[block], self._leases[block]
        if not holders or holders.bit_count() != leases:
            raise InvariantError(f"pool {self.name}: block {block} has {leases} leases, {holders:#x} offer theirs")
        self._count(holders, -1)
        self._offered[block] = 0
        self._leaving[block] = leases
        self.num_leaving += 1

    def mark_leaving(self, block: DeviceBlockId) -> None:
        """One more lease of a block, which is not offered, is leaving."""
        leaving, leases = self._leaving[block] + 1, self._leases[block]
        if self._offered[block].bit_count() + leaving > leases:
            raise InvariantError(f"pool {self.name}: block {block} has {leases} leases, {leaving} of them leaving")
        self._leaving[block] = leaving
        self.num_leaving += leaving == leases

    def unmark_leaving(self, block: DeviceBlockId) -> None:
        """One lease of a block that was leaving is about to end."""
        leaving = self._leaving[block]
        if not leaving:
            raise InvariantError(f"pool {self.name}: no lease of block {block} is leaving")
        self.num_leaving -= leaving == self._leases[block]
        self._leaving[block] = leaving - 1

    def find_offers(self, blocks: Sequence[int], holders: int, limit: int) -> list[int]:
        """Places in `blocks` of up to `limit` that `offers` counts for `holders`, from the first on."""
        num_leases, found = holders.bit_count(), []
        for start in range(0, len(blocks), _SCAN):
            # Most requests hold long runs of blocks that do not matter; `index` runs past them without Python.
            part = blocks[start : start + _SCAN]
            offered = list(map(self._offered.__getitem__, part))
            at = -1
            for _ in range(offered.count(holders)):
                at = offered.index(holders, at + 1)
                if self._leases[part[at]] == num_leases:
                    found.append(start + at)
                    if len(found) == limit:
                        return found
        return found

    def marks(self, block: DeviceBlockId) -> tuple[int, int]:
        """Who offers a lease of the block, and how many of its leases are leaving."""
        return self._offered[block], self._leaving[block]

    def num_kept(self, block: DeviceBlockId) -> int:
        """Leases of the block that are neither offered nor leaving."""
        return self._leases[block] - self._offered[block].bit_count() - self._leaving[block]

    # Leases, and what they do to blocks that would come free.

    def lease(self, block: DeviceBlockId) -> None:
        """Add a lease, which is kept: a block that would have come free does no more."""
        self.lease_all((block,))

    def lease_all(self, blocks: Iterable[DeviceBlockId]) -> None:
        """`lease` each block."""
        offered, leases, leaving, claim = self._offered, self._leases, self._leaving, super().lease
        run, length = 0, 0
        for block in blocks:
            num_leases = leases[block]
            if not num_leases:
                claim(block)
                continue
            leases[block] = num_leases + 1
            before = offered[block]
            if before.bit_count() == num_leases:
                if before != run:
                    self._count(run, -length)
                    run, length = before, 0
                length += 1
            elif leaving[block] == num_leases:
                self.num_leaving -= 1
        self._count(run, -length)

    def release(self, blocks: Iterable[DeviceBlockId]) -> None:
        """End one unmarked lease of each block: what is left of its leases may all be offered, or leaving."""
        ended = tuple(blocks)
        super().release(ended)
        leases, offered, leaving = self._leases, self._offered, self._leaving
        run, length = 0, 0
        # A block that is given twice had no reason to be counted before, and has one at most now.
        for block in dict.fromkeys([block for block in ended if offered[block] or leaving[block]]):
            holders, going, left = offered[block], leaving[block], leases[block]
            if holders.bit_count() + going > left:
                raise InvariantError(
                    f"pool {self.name}: block {block} lost a lease and has {left}; {holders:#x} offer theirs and "
                    f"{going} are leaving"
                )
            if holders.bit_count() == left:
                if holders != run:
                    self._count(run, length)
                    run, length = holders, 0
                length += 1
            self.num_leaving += going == left
        self._count(run, length)

    def _count(self, holders: int, by: int) -> None:
        if not by:
            return
        offers = self._offers_of(holders)
        left = offers.get(holders, 0) + by
        if left:
            offers[holders] = left
        else:
            del offers[holders]

    def assert_invariants(self) -> None:
        """The laws of every pool; and marks are on leases, each on one, and add up to the counts. O(num_blocks)."""
        super().assert_invariants()
        offers: dict[int, int] = {}
        num_leaving = 0
        for block in range(self.num_blocks):
            holders, leaving, leases = self._offered[block], self._leaving[block], self._leases[block]
            if holders.bit_count() + leaving > leases or leaving < 0:
                raise InvariantError(
                    f"pool {self.name}: block {block} has {leases} leases; {holders:#x} offer theirs, {leaving} leave"
                )
            if holders and holders.bit_count() == leases:
                offers[holders] = offers.get(holders, 0) + 1
            num_leaving += 0 < leaving == leases
        if any(self._offers_of(holders).get(holders) != number for holders, number in self.offers.items()):
            raise InvariantError(f"pool {self.name}: offers of priced holders {self.priced:#x} are among the others")
        if offers != self.offers or num_leaving != self.num_leaving:
            raise InvariantError(
                f"pool {self.name}: counts {self.offers} offered and {self.num_leaving} leaving blocks, "
                f"there are {offers} and {num_leaving}"
            )
