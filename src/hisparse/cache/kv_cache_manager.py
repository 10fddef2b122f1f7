"""The device caches of a replica: pools, groups and their managers behind one face."""

from collections.abc import Sequence
from dataclasses import dataclass

from hisparse.cache.admission import GRANTED, Admission, Verdict
from hisparse.cache.block_pool import BlockPool
from hisparse.cache.groups import DevicePools, GroupKind, cache_groups
from hisparse.cache.managers import HiSparseResidentManager, HotManager, SingleTypeKVCacheManager
from hisparse.cache.slab_pool import SlabPool
from hisparse.cache.table_log import TableLog
from hisparse.config import CachePlan
from hisparse.errors import InputError, InvariantError
from hisparse.protocol import DeviceBlockId, Table


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Blocks of the slab by what they are leased for. They add up to the pool, null block aside."""

    resident: int
    hot: int
    staging: int
    free: int


class KVCacheManager:
    """Which device blocks each request of a replica has. Books only: no torch, no bytes.

    A request is known from `add` to `remove`. Its pages (`plan.config.block_size` tokens each) grow in the resident and
    the indexer group together, and it may hold one hot lease of `plan.hot_blocks` blocks. What changes is written to
    `log`, for the workers. The staging lease is taken once, here, and kept: it is the bounded buffer of prefills over
    host pages.

    Running out of blocks is no error but an `Admission` that says how many are missing. Raises `InputError` for a slot
    or a number of pages that there cannot be, `InvariantError` naming the request for one that is not known, or is
    already.
    """

    def __init__(self, plan: CachePlan, log: TableLog) -> None:
        """Make the pools of `plan`, all blocks free. Raises `MemoryError` where there is no memory for the books."""
        self.plan = plan
        self._slots: dict[str, int] = {}
        self.slab = SlabPool(plan.num_device_blocks, "slab")
        self.index_pool: BlockPool[DeviceBlockId] = BlockPool(plan.num_indexer_blocks, "indexer")
        pools = DevicePools(self.slab, self.index_pool)
        groups = {group.kind: group for group in cache_groups(plan.config.block_size)}
        self.resident = HiSparseResidentManager(groups[GroupKind.RESIDENT], pools, log, Table.RESIDENT)
        self.hot = HotManager(groups[GroupKind.HOT], pools, log, Table.HOT, plan.hot_blocks)
        self.indexer = SingleTypeKVCacheManager(groups[GroupKind.INDEXER], pools, log, Table.INDEXER)
        self.staging: tuple[DeviceBlockId, ...] = tuple(self.slab.allocate(plan.staging_blocks))

    def add(self, request_id: str, slot: int) -> None:
        """Know a request, with no pages yet, under the `slot` that workers know it by: 0 … `max_running`-1, one each.

        Raises `InputError` for another slot, `InvariantError` for a request that is known or a slot that is lent.
        """
        num_slots = self.plan.config.max_running
        if not 0 <= slot < num_slots:
            raise InputError(f"request {request_id} cannot have slot {slot}: slots are 0 to {num_slots - 1}")
        if request_id in self._slots:
            raise InvariantError(f"request {request_id} is already known, in slot {self._slots[request_id]}")
        if slot in self._slots.values():
            owner = next(other for other, lent in self._slots.items() if lent == slot)
            raise InvariantError(f"slot {slot} is lent to request {owner}: request {request_id} cannot have it too")
        self._slots[request_id] = slot
        for manager in (self.resident, self.hot, self.indexer):
            manager.add(request_id, slot)

    def remove(self, request_id: str) -> None:
        """End all device leases of a request and forget it. Raises `InvariantError` for an unknown one."""
        self._require(request_id)
        del self._slots[request_id]
        for manager in (self.hot, self.resident, self.indexer):
            manager.remove(request_id)

    def grow(self, request_id: str, num_pages: int) -> Admission:
        """Have the request cover `num_pages` pages in both paged groups, or say what is missing. All or nothing.

        Fewer pages than it has are granted, and change nothing. Raises `InputError` for a negative number,
        `InvariantError` for an unknown request.
        """
        self._require(request_id)
        if num_pages < 0:
            raise InputError(f"request {request_id} cannot have {num_pages} pages: it must be 0 or more")
        more = num_pages - self.resident.num_pages(request_id)
        if more <= 0:
            return GRANTED
        slab_short = max(0, more - self.slab.num_free)
        indexer_short = max(0, more - self.index_pool.num_free)
        if slab_short or indexer_short:
            return Admission(Verdict.WAIT, slab_short, indexer_short)
        self.resident.grow(request_id, num_pages)
        self.indexer.grow(request_id, num_pages)
        return GRANTED

    def take_hot(self, request_id: str) -> Admission:
        """Have the request hold a hot lease, or say what is missing. Raises `InvariantError` for an unknown request."""
        self._require(request_id)
        if self.hot.holds(request_id):
            return GRANTED
        short = self.plan.hot_blocks - self.slab.num_free
        if short > 0:
            return Admission(Verdict.WAIT, slab_short=short)
        self.hot.take(request_id)
        self.slab.settle(1 << self._slots[request_id])
        return GRANTED

    def publish(self, request_id: str, first_page: int, keys: Sequence[bytes]) -> None:
        """Let prefix lookups find full, computed pages of both paged groups: `keys[i]` is page `first_page + i`.

        Raises `InvariantError` for an unknown request and for pages that it does not have.
        """
        self._require(request_id)
        if first_page < 0 or first_page + len(keys) > self.resident.num_pages(request_id):
            raise InvariantError(
                f"request {request_id} publishes {len(keys)} pages from page {first_page} on, and has "
                f"{self.resident.num_pages(request_id)}"
            )
        pages = list(enumerate(keys, first_page))
        self.resident.publish(request_id, pages)
        self.indexer.publish(request_id, pages)

    def _require(self, request_id: str) -> None:
        if request_id not in self._slots:
            raise InvariantError(f"request {request_id} is not known: it was never added, or was removed")

    def use(self) -> DeviceUse:
        """Where the slab's blocks are. O(leased blocks); for reports, not for a step."""
        resident, hot = len(self.resident.leases_by_block()), len(self.hot.leases_by_block())
        return DeviceUse(resident, hot, len(self.staging), self.slab.num_free)

    def forget_content(self) -> None:
        """No page of either paged group is found from now on. Leases stay."""
        self.slab.forget_all()
        self.index_pool.forget_all()

    def assert_invariants(self, pins: dict[int, int], index_pins: dict[int, int] | None = None) -> None:
        """Every lease of a device block is a table entry, the staging lease or one of `pins` (copies in flight).

        `pins` are leases of slab blocks, `index_pins` of blocks of the indexer's pool.
        """
        self.slab.assert_invariants()
        self.index_pool.assert_invariants()
        expected = dict(pins)
        for staging in self.staging:
            expected[staging] = expected.get(staging, 0) + 1
        for manager in (self.resident, self.hot):
            for block, count in manager.leases_by_block().items():
                expected[block] = expected.get(block, 0) + count
        _compare("slab", self.slab, expected)
        indexed = dict(index_pins or {})
        for block, count in self.indexer.leases_by_block().items():
            indexed[block] = indexed.get(block, 0) + count
        _compare("indexer", self.index_pool, indexed)
        private = list(self.hot.leases_by_block().items())
        if any(count != 1 or self.slab.leases(DeviceBlockId(block)) != 1 for block, count in private):
            raise InvariantError(f"a hot block is shared: {private}")


def _compare(name: str, pool: BlockPool[DeviceBlockId], expected: dict[int, int]) -> None:
    for block in range(1, pool.num_blocks):
        leases, known = pool.leases(DeviceBlockId(block)), expected.get(block, 0)
        if leases != known:
            raise InvariantError(f"{name} block {block} has {leases} leases, its users account for {known}")
