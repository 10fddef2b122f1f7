"""Tables, holes and admission of the device groups."""

import pytest

from hisparse.cache import KVCacheManager, TableLog, Verdict
from hisparse.cache.groups import GroupKind, cache_groups, device_pool_id
from hisparse.config import CacheConfig, CachePlan, ModelGeometry, plan_cache
from hisparse.errors import InvariantError
from hisparse.geometry import RowFormat
from hisparse.protocol import Table, TableUpdate

BLOCK = 2 * 4 * 64


def make_plan(device_blocks: int = 12, host_blocks: int = 20, indexer_blocks: int = 16) -> CachePlan:
    model = ModelGeometry(RowFormat("test", 64), (0, 0), index_topk=8, index_row_bytes=32)
    config = CacheConfig(
        block_size=4,
        slab_bytes=device_blocks * BLOCK,
        host_pool_bytes=host_blocks * BLOCK,
        hot_rows=8,
        staging_rows=8,
        max_running=4,
        max_tokens=256,
        indexer_tokens=4 * indexer_blocks,
    )
    return plan_cache(config, model)


@pytest.fixture
def log() -> TableLog:
    return TableLog()


@pytest.fixture
def kv(log: TableLog) -> KVCacheManager:
    return KVCacheManager(make_plan(), log)


def test_host_blocks_have_no_device_pool() -> None:
    groups = {group.kind: group for group in cache_groups(4)}
    assert groups[GroupKind.SOURCE].block_pool_id is None
    with pytest.raises(InvariantError, match="no device pool"):
        device_pool_id(groups[GroupKind.SOURCE])
    assert device_pool_id(groups[GroupKind.RESIDENT]) == device_pool_id(groups[GroupKind.HOT])
    assert device_pool_id(groups[GroupKind.INDEXER]) != device_pool_id(groups[GroupKind.HOT])


def test_growth_is_logged_for_the_workers(kv: KVCacheManager, log: TableLog) -> None:
    kv.add("a", 3)
    assert kv.grow("a", 2).granted
    assert kv.grow("a", 3).granted
    _, updates = log.drain()
    resident = [update for update in updates if update.table is Table.RESIDENT]
    assert [(u.slot, u.first_page, len(u.blocks)) for u in resident] == [(3, 0, 2), (3, 2, 1)]
    assert log.drain() == ((), ())


def test_growth_is_all_or_nothing_and_says_what_is_missing(kv: KVCacheManager) -> None:
    kv.add("a", 0)
    free = kv.slab.num_free
    answer = kv.grow("a", free + 3)
    assert answer.verdict is Verdict.WAIT
    assert answer.slab_short == 3
    assert kv.slab.num_free == free
    assert kv.resident.num_pages("a") == 0


def test_the_indexer_pool_can_be_what_is_missing(log: TableLog) -> None:
    kv = KVCacheManager(make_plan(device_blocks=40, indexer_blocks=5), log)
    kv.add("a", 0)
    answer = kv.grow("a", 7)
    assert (answer.slab_short, answer.indexer_short) == (0, 2)


def test_a_hot_lease_is_all_or_nothing(kv: KVCacheManager) -> None:
    kv.add("a", 0)
    kv.add("b", 1)
    kv.grow("a", kv.slab.num_free - 1)
    answer = kv.take_hot("b")
    assert not answer.granted
    assert answer.slab_short == 1
    assert not kv.hot.holds("b")
    kv.resident.punch_hole("a", 0)
    assert kv.take_hot("b").granted
    assert kv.take_hot("b").granted, "asking again changes nothing"
    kv.assert_invariants({})


def test_a_hole_gives_its_block_back_and_can_be_filled_again(kv: KVCacheManager, log: TableLog) -> None:
    kv.add("a", 1)
    kv.grow("a", 3)
    log.drain()
    block = kv.resident.punch_hole("a", 1)
    assert kv.slab.leases(block) == 0
    assert log.drain()[1] == (TableUpdate(Table.RESIDENT, 1, 1, (0,)),)
    with pytest.raises(InvariantError, match="hole already"):
        kv.resident.punch_hole("a", 1)
    (other,) = kv.slab.allocate(1)
    kv.resident.fill_hole("a", 1, other)
    assert log.drain()[1] == (TableUpdate(Table.RESIDENT, 1, 1, (other,)),)
    with pytest.raises(InvariantError, match="resident"):
        kv.resident.fill_hole("a", 1, other)


def test_removing_a_request_ends_every_lease(kv: KVCacheManager) -> None:
    free = kv.slab.num_free, kv.index_pool.num_free
    kv.add("a", 0)
    kv.grow("a", 4)
    kv.take_hot("a")
    kv.resident.punch_hole("a", 2)
    kv.remove("a")
    assert (kv.slab.num_free, kv.index_pool.num_free) == free
    kv.assert_invariants({})


def test_a_shared_hot_block_is_found_by_the_invariants(kv: KVCacheManager) -> None:
    kv.add("a", 0)
    kv.take_hot("a")
    kv.slab.lease(kv.hot.blocks("a")[0])
    with pytest.raises(InvariantError):
        kv.assert_invariants({})


def test_a_reset_slot_drops_what_was_logged_for_its_former_request(log: TableLog) -> None:
    log.write(Table.RESIDENT, 0, 0, (5,))
    log.write(Table.RESIDENT, 1, 0, (6,))
    log.reset(0)
    log.write(Table.RESIDENT, 0, 0, (7,))
    resets, updates = log.drain()
    assert resets == (0,)
    assert [(update.slot, update.blocks) for update in updates] == [(1, (6,)), (0, (7,))]
