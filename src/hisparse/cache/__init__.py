"""The normal KV cache system: block pools, groups, managers and prefix keys. It knows nothing of the host tier."""

from hisparse.cache.admission import GRANTED, Admission, Verdict
from hisparse.cache.block_pool import BlockPool
from hisparse.cache.kv_cache_manager import DeviceUse, KVCacheManager
from hisparse.cache.managers import HiSparseResidentManager, HotManager, SingleTypeKVCacheManager
from hisparse.cache.slab_pool import SlabPool
from hisparse.cache.table_log import TableLog

__all__ = [
    "GRANTED",
    "Admission",
    "BlockPool",
    "DeviceUse",
    "HiSparseResidentManager",
    "HotManager",
    "KVCacheManager",
    "SingleTypeKVCacheManager",
    "SlabPool",
    "TableLog",
    "Verdict",
]
