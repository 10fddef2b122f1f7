"""Groups: layers whose pages share one block id, and the device pool that serves each of them.

source    host blocks; no device pool, so nothing that indexes device pools accepts it
resident  pages on the device                        } one slab,
hot       copies of host rows, by request            } one pool
indexer   index keys of the leader layers              a pool of its own
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType

from hisparse.cache.block_pool import BlockPool
from hisparse.errors import InvariantError
from hisparse.protocol import DeviceBlockId

DevicePoolId = NewType("DevicePoolId", int)
"""Numbers a device pool. A type of its own: a `DevicePoolId | None` must be narrowed before it indexes anything."""

SLAB_POOL = DevicePoolId(0)
INDEXER_POOL = DevicePoolId(1)


class GroupKind(Enum):
    """The four groups. RESIDENT and HOT lease blocks of the same slab."""

    SOURCE = "source"
    RESIDENT = "resident"
    HOT = "hot"
    INDEXER = "indexer"


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """What a manager needs to know of its group. `block_pool_id` is None where blocks are not device blocks."""

    kind: GroupKind
    block_pool_id: DevicePoolId | None
    block_size: int


def cache_groups(block_size: int) -> tuple[KVCacheGroup, ...]:
    """The four groups of a replica."""
    return (
        KVCacheGroup(GroupKind.SOURCE, None, block_size),
        KVCacheGroup(GroupKind.RESIDENT, SLAB_POOL, block_size),
        KVCacheGroup(GroupKind.HOT, SLAB_POOL, block_size),
        KVCacheGroup(GroupKind.INDEXER, INDEXER_POOL, block_size),
    )


def device_pool_id(group: KVCacheGroup) -> DevicePoolId:
    """Narrow a group to its device pool. Raises `InvariantError` for a group that has none."""
    if group.block_pool_id is None:
        raise InvariantError(f"group {group.kind.value} holds host blocks; it has no device pool")
    return group.block_pool_id


class DevicePools:
    """The device pools of a replica. Indexed by `DevicePoolId` only."""

    def __init__(self, slab: BlockPool[DeviceBlockId], indexer: BlockPool[DeviceBlockId]) -> None:
        self._pools = (slab, indexer)

    def __getitem__(self, pool: DevicePoolId) -> BlockPool[DeviceBlockId]:
        return self._pools[pool]

    def of(self, group: KVCacheGroup) -> BlockPool[DeviceBlockId]:
        """The pool that a group leases from. Raises `InvariantError` for a group of host blocks."""
        return self[device_pool_id(group)]
