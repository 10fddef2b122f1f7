"""How much of a prompt each group already holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import or_

from hisparse.cache.block_pool import BlockPool
from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.geometry import NULL_BLOCK
from hisparse.protocol import DeviceBlockId, HostBlockId


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Pages that need not be computed. For each, its block in the slab or, with 0 there, in the host pool.

    `num_free_adopted` are the free slab blocks that adopting the hit would claim. `host_beyond`: host blocks of the
    MLA pages that follow the hit, null where the page is on the device; the index keys of the first are missing.
    """

    keys: tuple[bytes, ...]
    resident: tuple[DeviceBlockId, ...]
    host: tuple[HostBlockId, ...]
    indexer: tuple[DeviceBlockId, ...]
    num_free_adopted: int
    num_free_indexer_adopted: int
    host_beyond: tuple[HostBlockId, ...] = ()

    @property
    def num_pages(self) -> int:
        """Pages that need not be computed."""
        return len(self.keys)


def pick_rows(
    device: list[DeviceBlockId], host: Callable[[int], Sequence[HostBlockId]]
) -> tuple[list[DeviceBlockId], list[HostBlockId]]:
    """Of the leading pages that lie in a slab block or in a host block: the block in one list, null in the other.

    `device` has null where no slab block is known; `host(page)` gives the host blocks from a page on, or null. The
    device goes first: what it still holds, leased or free, is adopted without a copy.
    """
    null = HostBlockId(NULL_BLOCK)
    if NULL_BLOCK not in device:
        return device, [null] * len(device)
    hole = device.index(DeviceBlockId(NULL_BLOCK))
    rest = device[hole:]
    on_host = [null if block else other for block, other in zip(rest, host(hole), strict=True)]
    if rest.count(DeviceBlockId(NULL_BLOCK)) + on_host.count(null) > len(rest):
        # Some page is null in both.
        num_pages = list(map(or_, rest, on_host)).index(NULL_BLOCK)
        rest, on_host = rest[:num_pages], on_host[:num_pages]
    return device[:hole] + rest, [null] * hole + on_host


def find_prefix(
    kv: KVCacheManager, host_pool: BlockPool[HostBlockId], keys: Sequence[bytes], look_beyond: bool = False
) -> PrefixHit:
    """The longest run of `keys` from the first on for which the indexer and either MLA tier hold a page.

    `look_beyond`: whether to find out which MLA pages follow it.
    """
    indexer = kv.index_pool.lookup_all(keys)
    if NULL_BLOCK in indexer:
        indexer = indexer[: indexer.index(DeviceBlockId(NULL_BLOCK))]
    wanted = keys if look_beyond else keys[: len(indexer)]
    resident, host = pick_rows(kv.slab.lookup_all(wanted), lambda page: host_pool.lookup_all(wanted[page:]))
    num_pages = min(len(resident), len(indexer))
    beyond = tuple(host[num_pages:])
    resident, host, indexer = resident[:num_pages], host[:num_pages], indexer[:num_pages]
    return PrefixHit(
        keys=tuple(keys[:num_pages]),
        resident=tuple(resident),
        host=tuple(host),
        indexer=tuple(indexer),
        num_free_adopted=kv.slab.count_free(resident),
        num_free_indexer_adopted=kv.index_pool.count_free(indexer),
        host_beyond=beyond,
    )
