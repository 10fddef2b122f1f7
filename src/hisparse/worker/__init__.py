"""The worker's side: memory, transfers, and what attention sees of a cache."""

from hisparse.worker.backend import Backend, CpuBackend
from hisparse.worker.device import IndexerStore, Slab
from hisparse.worker.handle import HiSparseCacheHandle
from hisparse.worker.host_pool import HostPool, host_pool_bytes
from hisparse.worker.runtime import FollowerRuntime, HiSparseRuntime, LeaderRuntime
from hisparse.worker.stream import CopyDelay, CopyEvent, CopyStream, CpuStream
from hisparse.worker.tables import WorkerTables
from hisparse.worker.transfers import TransferEngine
from hisparse.worker.views import Allocation, BlockCopies, PagedCacheView
from hisparse.worker.worker import HiSparseWorker

__all__ = [
    "Allocation",
    "Backend",
    "BlockCopies",
    "CopyDelay",
    "CopyEvent",
    "CopyStream",
    "CpuBackend",
    "CpuStream",
    "FollowerRuntime",
    "HiSparseCacheHandle",
    "HiSparseRuntime",
    "HiSparseWorker",
    "HostPool",
    "IndexerStore",
    "LeaderRuntime",
    "PagedCacheView",
    "Slab",
    "TransferEngine",
    "WorkerTables",
    "host_pool_bytes",
]
