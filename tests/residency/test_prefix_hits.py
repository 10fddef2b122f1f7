"""Which pages a new request need not compute."""

import pytest

from hisparse.residency import PageState
from tests.residency.world import BLOCK_SIZE, World


def adopt(world: World, request_id: str, slot: int, tokens: object) -> int:
    hit = world.coordinator.find_prefix(world.coordinator.prefix_keys(tokens))  # type: ignore[arg-type]
    world.kv.add(request_id, slot)
    world.coordinator.add(request_id, slot, tokens)  # type: ignore[arg-type]
    world.coordinator.adopt_prefix(request_id, hit)
    world.coordinator.assert_invariants()
    return hit.num_pages


@pytest.mark.parametrize("spilled", [0, 2, 4])
def test_a_prefix_is_found_on_the_device_and_on_the_host(spilled: int) -> None:
    world = World(device_blocks=30)
    tokens = world.start("a", 0, num_pages=4)
    if spilled:
        world.spill("a", spilled)
        world.kv.slab.forget_all()
    tokens.append(1)
    found = adopt(world, "b", 1, tokens)
    # Forgetting the slab's content leaves the host pages only.
    assert found == (spilled or 4)
    states = world.states("b")
    assert states.count(PageState.HOST) == spilled


def test_one_token_is_always_left_to_compute() -> None:
    world = World(device_blocks=30)
    tokens = world.start("a", 0, num_pages=4)
    assert adopt(world, "b", 1, tokens[:]) == 3
    assert adopt(world, "c", 2, tokens[: 2 * BLOCK_SIZE + 1]) == 2


def test_a_page_without_index_keys_ends_the_hit() -> None:
    world = World(device_blocks=30)
    tokens = world.start("a", 0, num_pages=4)
    world.coordinator.remove("a")
    tokens.append(1)
    keys = world.coordinator.prefix_keys(tokens)
    assert world.coordinator.find_prefix(keys).num_pages == 4
    world.kv.index_pool._drop_key(world.kv.index_pool.lookup(keys[2]))  # type: ignore[arg-type]
    assert world.coordinator.find_prefix(keys).num_pages == 2


def test_a_page_whose_copy_is_not_completed_is_not_found_on_the_host() -> None:
    world = World(device_blocks=30)
    tokens = world.start("a", 0, num_pages=4)
    world.coordinator.reclaim(1)
    (transfer,) = world.take()
    world.report(enqueued=[transfer])
    world.kv.slab.forget_all()
    tokens.append(1)
    keys = world.coordinator.prefix_keys(tokens)
    assert world.coordinator.find_prefix(keys).num_pages == 0
    world.report(completed=[transfer])
    assert world.coordinator.find_prefix(keys).num_pages == len(transfer.copies)


def test_adopting_counts_the_free_blocks_it_claims() -> None:
    world = World(device_blocks=30)
    tokens = world.start("a", 0, num_pages=4)
    tokens.append(1)
    keys = world.coordinator.prefix_keys(tokens)
    assert world.coordinator.find_prefix(keys).num_free_adopted == 0
    world.coordinator.remove("a")
    hit = world.coordinator.find_prefix(keys)
    assert (hit.num_free_adopted, hit.num_free_indexer_adopted) == (4, 4)
    free = world.kv.slab.num_free
    assert adopt(world, "b", 1, tokens) == 4
    assert world.kv.slab.num_free == free - 4
