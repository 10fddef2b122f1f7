"""Which blocks of a device pool each request has, one manager per group.

A manager owns its group's tables and the leases behind them; it knows nothing of the host. Tables are keyed by
request id; the slot, under which workers know the request, is only passed on to the log.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import cast

from hisparse.cache.block_pool import BlockPool
from hisparse.cache.groups import DevicePools, KVCacheGroup
from hisparse.cache.table_log import TableLog
from hisparse.errors import InvariantError
from hisparse.geometry import NULL_BLOCK
from hisparse.protocol import DeviceBlockId, Table


class SingleTypeKVCacheManager:
    """Tables without holes: page `i` of a request is block `table[i]`, each with one lease."""

    table: Table

    def __init__(self, group: KVCacheGroup, pools: DevicePools, log: TableLog, table: Table) -> None:
        self.group = group
        self.pool: BlockPool[DeviceBlockId] = pools.of(group)
        self.table = table
        self._log = log
        self._tables: dict[str, array[int]] = {}
        self._slots: dict[str, int] = {}

    def add(self, request_id: str, slot: int) -> None:
        """Know a request, with an empty table. Raises `InvariantError` for one that is known already."""
        if request_id in self._tables:
            raise InvariantError(f"group {self.group.kind.value}: request {request_id} is already known")
        self._tables[request_id] = array("i")
        self._slots[request_id] = slot

    def blocks(self, request_id: str) -> Sequence[int]:
        """The request's table. Read it; only the manager changes it."""
        return self._tables[request_id]

    def num_pages(self, request_id: str) -> int:
        """Pages that the request's table covers, holes included."""
        return len(self._tables[request_id])

    def grow(self, request_id: str, num_pages: int) -> None:
        """Lease blocks until the table covers `num_pages` pages. The caller has checked that they are free."""
        table = self._tables[request_id]
        first = len(table)
        if num_pages <= first:
            return
        blocks = self.pool.allocate(num_pages - first)
        table.extend(blocks)
        self._log.write(self.table, self._slots[request_id], first, blocks)

    def adopt(self, request_id: str, blocks: Sequence[DeviceBlockId]) -> None:
        """Start an empty table with published blocks that a prefix hit found."""
        if self._tables[request_id]:
            raise InvariantError(f"group {self.group.kind.value}: request {request_id} already has pages")
        self.pool.lease_all([block for block in blocks if block != NULL_BLOCK])
        self.append(request_id, blocks)

    def append(self, request_id: str, blocks: Sequence[DeviceBlockId]) -> None:
        """Let a table go on with `blocks`, null for holes: it takes over a lease on each from the caller."""
        table = self._tables[request_id]
        first = len(table)
        table.extend(blocks)
        if blocks:
            self._log.write(self.table, self._slots[request_id], first, blocks)

    def publish(self, request_id: str, pages: Iterable[tuple[int, bytes]]) -> None:
        """Let prefix lookups find pages, which are full and computed, under their keys. Holes are passed over."""
        table, publish = self._tables[request_id], self.pool.publish
        for page, key in pages:
            block = cast(DeviceBlockId, table[page])
            if block != NULL_BLOCK:
                publish(block, key)

    def remove(self, request_id: str) -> None:
        """End all leases of a request and forget it."""
        table = self._tables.pop(request_id)
        del self._slots[request_id]
        self.pool.release(cast("list[DeviceBlockId]", [block for block in table if block != NULL_BLOCK]))

    def leases_by_block(self) -> dict[int, int]:
        """How many leases this manager holds on each block. For invariants."""
        held: dict[int, int] = {}
        for table in self._tables.values():
            for block in table:
                if block != NULL_BLOCK:
                    held[block] = held.get(block, 0) + 1
        return held


class HiSparseResidentManager(SingleTypeKVCacheManager):
    """Tables with holes: a null entry is a page whose truth is on the host."""

    def punch_hole(self, request_id: str, page: int) -> DeviceBlockId:
        """The page left for the host: replace its entry by the null block and end its lease."""
        table = self._tables[request_id]
        block = cast(DeviceBlockId, table[page])
        if block == NULL_BLOCK:
            raise InvariantError(f"page {page} of request {request_id} is a hole already")
        table[page] = NULL_BLOCK
        self._log.write(self.table, self._slots[request_id], page, (NULL_BLOCK,))
        self.pool.release((block,))
        return block

    def fill_hole(self, request_id: str, page: int, block: DeviceBlockId) -> None:
        """The page came back: its entry takes over a lease on `block` from the caller."""
        table = self._tables[request_id]
        if table[page] != NULL_BLOCK:
            raise InvariantError(f"page {page} of request {request_id} is resident in block {table[page]} already")
        table[page] = block
        self._log.write(self.table, self._slots[request_id], page, (block,))

    def num_holes(self, request_id: str) -> int:
        """Pages of the request whose truth is on the host."""
        return self._tables[request_id].count(NULL_BLOCK)


class HotManager(SingleTypeKVCacheManager):
    """Hot leases: all or nothing, of a fixed size, private to one request."""

    def __init__(
        self, group: KVCacheGroup, pools: DevicePools, log: TableLog, table: Table, blocks_per_lease: int
    ) -> None:
        super().__init__(group, pools, log, table)
        self.blocks_per_lease = blocks_per_lease

    def holds(self, request_id: str) -> bool:
        """Whether the request has a hot lease."""
        return bool(self._tables[request_id])

    def take(self, request_id: str) -> None:
        """Lease the request's hot blocks. The caller has checked that they are free."""
        if self.holds(request_id):
            raise InvariantError(f"request {request_id} holds a hot lease already")
        self.grow(request_id, self.blocks_per_lease)
