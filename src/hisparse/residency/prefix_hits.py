"""How much of a prompt every group already holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from hisparse.cache.block_pool import BlockPool
from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.geometry import NULL_BLOCK
from hisparse.protocol import DeviceBlockId, HostBlockId


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Pages that need not be computed. For each, its block in the slab or, with 0 there, in the host pool.

    `num_free_adopted` are the free slab blocks that adopting the hit would claim.
    """

    keys: tuple[bytes, ...]
    resident: tuple[DeviceBlockId, ...]
    host: tuple[HostBlockId, ...]
    indexer: tuple[DeviceBlockId, ...]
    num_free_adopted: int
    num_free_indexer_adopted: int

    @property
    def num_pages(self) -> int:
        """Pages that need not be computed."""
        return len(self.keys)


def find_prefix(kv: KVCacheManager, host_pool: BlockPool[HostBlockId], keys: Sequence[bytes]) -> PrefixHit:
    """The longest run of `keys` from the first on for which the indexer and either MLA tier hold a page."""
    resident: list[DeviceBlockId] = []
    host: list[HostBlockId] = []
    indexer: list[DeviceBlockId] = []
    for key in keys:
        index_block = kv.index_pool.lookup(key)
        if index_block is None:
            break
        device_block = kv.slab.lookup(key)
        host_block = host_pool.lookup(key) if device_block is None else None
        if device_block is None and host_block is None:
            break
        indexer.append(index_block)
        resident.append(device_block if device_block is not None else DeviceBlockId(NULL_BLOCK))
        host.append(host_block if host_block is not None else HostBlockId(NULL_BLOCK))
    return PrefixHit(
        keys=tuple(keys[: len(indexer)]),
        resident=tuple(resident),
        host=tuple(host),
        indexer=tuple(indexer),
        num_free_adopted=sum(block != NULL_BLOCK and not kv.slab.leases(block) for block in resident),
        num_free_indexer_adopted=sum(not kv.index_pool.leases(block) for block in indexer),
    )
