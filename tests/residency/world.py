"""A coordinator with small pools, for the tests of this folder."""

from array import array
from collections.abc import Sequence

from hisparse.cache import KVCacheManager, TableLog
from hisparse.config import CacheConfig, ModelGeometry, WriteBack, plan_cache
from hisparse.geometry import RowFormat
from hisparse.protocol import SparseKVPageTransfer, SparseKVWorkerReport, Table, TransferId
from hisparse.residency import HiSparseCoordinator, PageState

BLOCK_SIZE = 4
BLOCK_BYTES = 2 * BLOCK_SIZE * 64
HOT_BLOCKS = 2
STAGING_BLOCKS = 2
ROOT = b"root".ljust(16, b"\0")


class World:
    """Coordinator, managers and a log, without workers: tests report what workers would."""

    def __init__(
        self,
        device_blocks: int = 13,
        host_blocks: int = 40,
        write_back: WriteBack = WriteBack.PRESSURE,
        num_workers: int = 1,
    ) -> None:
        model = ModelGeometry(RowFormat("test", 64), (0, 0), index_topk=8, index_row_bytes=32)
        config = CacheConfig(
            block_size=BLOCK_SIZE,
            slab_bytes=device_blocks * BLOCK_BYTES,
            host_pool_bytes=host_blocks * BLOCK_BYTES,
            hot_rows=HOT_BLOCKS * BLOCK_SIZE,
            staging_rows=STAGING_BLOCKS * BLOCK_SIZE,
            max_running=4,
            max_tokens=400,
            indexer_tokens=2000,
            write_back=write_back,
        )
        self.plan = plan_cache(config, model)
        self.log = TableLog()
        self.kv = KVCacheManager(self.plan, self.log)
        self.coordinator = HiSparseCoordinator(self.kv, self.log, ROOT, num_workers)

    def start(self, request_id: str, slot: int, num_pages: int, seed: int = 0, may_spill: bool = True) -> "array[int]":
        """A request with `num_pages` full, computed pages."""
        tokens = array("i", [seed * 1000 + at for at in range(num_pages * BLOCK_SIZE)])
        self.kv.add(request_id, slot)
        self.coordinator.add(request_id, slot, tokens, may_spill)
        assert self.kv.grow(request_id, num_pages).granted
        self.coordinator.seal(request_id, len(tokens))
        return tokens

    def take(self) -> tuple[SparseKVPageTransfer, ...]:
        return self.coordinator.take_transfers()

    def report(
        self,
        enqueued: Sequence[SparseKVPageTransfer] = (),
        completed: Sequence[SparseKVPageTransfer] = (),
        worker: int = 0,
    ) -> None:
        self.report_ids([t.transfer_id for t in enqueued], [t.transfer_id for t in completed], worker)

    def report_ids(self, enqueued: Sequence[TransferId], completed: Sequence[TransferId], worker: int = 0) -> None:
        self.coordinator.apply(SparseKVWorkerReport(worker, tuple(enqueued), tuple(completed)))
        self.coordinator.assert_invariants()

    def states(self, request_id: str) -> list[PageState]:
        return [PageState(state) for state in self.coordinator.pages(request_id).state]

    def would_leave(self, request_id: str) -> list[int]:
        """The pages of a request that it offers to give up."""
        offered = self.coordinator.pages(request_id).offered(table := self.kv.resident.blocks(request_id))
        return [page for page, block in enumerate(table) if block in offered]

    def spill(self, request_id: str, num_pages: int) -> tuple[SparseKVPageTransfer, ...]:
        """Bring pages of a lone request to the host, all the way."""
        self.coordinator._spill(self.coordinator.pages(request_id).holder, num_pages)
        transfers = self.take()
        self.report(transfers, transfers)
        return transfers

    def lose_device_copies(self) -> None:
        """Hand every free block of the slab to somebody else for a moment."""
        self.kv.slab.release(self.kv.slab.allocate(self.kv.slab.num_free))

    def table_writes(self, table: Table) -> list[tuple[int, int, tuple[int, ...]]]:
        _, updates = self.log.drain()
        return [(update.slot, update.first_page, update.blocks) for update in updates if update.table is table]
