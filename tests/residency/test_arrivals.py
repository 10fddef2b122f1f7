"""Leases of pages that come from below: taken whole, handed over once, ended once."""

from array import array

import pytest

from hisparse.cache import Admission
from hisparse.errors import InvariantError
from hisparse.residency import Arrival, PageState
from tests.residency.world import BLOCK_SIZE, HOT_BLOCKS, World

NUM_PAGES = 5


def newcomer(world: World, length: int = NUM_PAGES * BLOCK_SIZE + 1) -> list[bytes]:
    """A request without pages, named n. Returns the keys of its prompt."""
    tokens = array("i", range(length))
    world.kv.add("n", 3)
    world.coordinator.add("n", 3, tokens)
    return world.coordinator.prefix_keys(tokens)


def reserve(world: World, keys: list[bytes], first: int = 0) -> Arrival:
    arrival = world.coordinator.arrivals.reserve("n", keys[first:], first, on_host=True)
    assert isinstance(arrival, Arrival)
    world.coordinator.assert_invariants()
    return arrival


def leave_on_host(world: World, num_pages: int) -> None:
    """The host has the rows of the first pages of the prompt, nobody the index keys, and the slab nothing."""
    world.start("a", 0, num_pages=NUM_PAGES)
    world.spill("a", num_pages)
    world.coordinator.remove("a")
    world.kv.index_pool.forget_all()
    world.kv.slab.forget_all()


def test_what_comes_belongs_to_nobody_before_it_is_there_and_to_the_request_then() -> None:
    world = World()
    keys = newcomer(world)
    arrival = reserve(world, keys)
    assert world.kv.resident.num_pages("n") == 0
    assert world.coordinator.find_prefix(keys).num_pages == 0
    assert world.coordinator.num_reclaimable() == 0
    world.coordinator.commit_arrival("n", arrival)
    world.coordinator.assert_invariants()
    assert list(world.kv.resident.blocks("n")) == arrival.resident
    assert list(world.kv.indexer.blocks("n")) == arrival.indexer
    assert world.coordinator.find_prefix(keys).num_pages == NUM_PAGES
    left = NUM_PAGES - HOT_BLOCKS
    assert world.coordinator.num_reclaimable() == left, "what was loaded may leave like what was computed"
    with pytest.raises(InvariantError, match="does not follow"):
        world.coordinator.commit_arrival("n", arrival)


@pytest.mark.parametrize("has_come", [True, False])
def test_what_nobody_wants_any_more_is_found_exactly_if_it_came(has_come: bool) -> None:
    world = World()
    keys = newcomer(world)
    free = world.kv.slab.num_free
    arrival = reserve(world, keys)
    world.coordinator.remove("n")
    world.coordinator.arrivals.detach(arrival)
    world.coordinator.assert_invariants()
    assert world.kv.slab.num_free == free - NUM_PAGES, "a copy may still write them"
    world.coordinator.arrivals.release(arrival, has_come)
    world.coordinator.assert_invariants()
    assert world.kv.slab.num_free == free
    assert world.coordinator.find_prefix(keys).num_pages == (NUM_PAGES if has_come else 0)
    with pytest.raises(InvariantError, match="not open"):
        world.coordinator.arrivals.release(arrival, has_come)


def test_rows_of_the_host_are_adopted_with_the_keys_that_were_loaded_for_them() -> None:
    world = World()
    leave_on_host(world, 3)
    keys = newcomer(world)
    hit = world.coordinator.find_prefix(keys, look_beyond=True)
    assert (hit.num_pages, len(hit.host_beyond)) == (0, 3)
    assert world.coordinator.find_prefix(keys).host_beyond == ()
    world.coordinator.arrivals.claim("n", 0, hit.host_beyond)
    assert world.coordinator.arrivals.num_local("n", keys, 0, on_host=False) == (3, 0)
    arrival = reserve(world, keys)
    assert (arrival.num_resident, arrival.num_indexed) == (3, 0)
    assert arrival.host[:3] == list(hit.host_beyond)
    world.coordinator.commit_arrival("n", arrival)
    assert world.states("n") == [PageState.HOST] * 3 + [PageState.RESIDENT] * 2
    world.coordinator.assert_invariants()


def test_a_claim_keeps_host_pages_until_the_request_is_gone() -> None:
    world = World(host_blocks=4)
    leave_on_host(world, 3)
    keys = newcomer(world)
    world.coordinator.arrivals.claim("n", 0, world.coordinator.find_prefix(keys, look_beyond=True).host_beyond)
    with pytest.raises(InvariantError, match="claimed host pages already"):
        world.coordinator.arrivals.claim("n", 0, ())
    world.coordinator.assert_invariants()
    assert world.coordinator.host_pool.num_free == 0
    world.coordinator.remove("n")
    world.coordinator.assert_invariants()
    assert world.coordinator.host_pool.num_free == 3


def test_a_claim_holds_no_page_that_an_arrival_gave_back() -> None:
    """The claim then begins behind the first page that the request lacks."""
    world = World()
    leave_on_host(world, 4)
    keys = newcomer(world)
    world.coordinator.arrivals.claim("n", 0, world.coordinator.find_prefix(keys, look_beyond=True).host_beyond)
    world.coordinator.arrivals.release(reserve(world, keys[:2]), has_come=False)
    world.coordinator.assert_invariants()
    assert world.coordinator.arrivals.num_local("n", keys, 0, on_host=False) == (0, 0)
    assert world.coordinator.arrivals.num_local("n", keys, 0, on_host=True) == (4, 0)
    blocks = world.coordinator.host_pool.lookup_all(keys[:4])
    assert reserve(world, keys[:4]).host == blocks


def test_a_piece_is_as_large_as_free_blocks_permit_and_no_block_is_evicted_that_it_needs() -> None:
    """Rows of pages 3 and 4 lie in the only free blocks of the slab."""
    world = World(device_blocks=13)
    tokens = world.start("a", 0, num_pages=NUM_PAGES)
    keys = world.coordinator.prefix_keys(array("i", [*tokens, 0]))
    world.coordinator.remove("a")
    world.kv.index_pool.forget_all()
    slab = world.kv.slab
    taken = slab.allocate(slab.num_free - 2)
    assert slab.longest_prefix(keys) == 2, "the beginning is kept longest"
    newcomer(world)
    arrival = world.coordinator.arrivals.reserve("n", keys, 0, on_host=True)
    assert isinstance(arrival, Arrival)
    assert (arrival.resident, arrival.num_pages) == (slab.lookup_all(keys[:2]), 2)
    short = world.coordinator.arrivals.reserve("n", keys[2:], 2, on_host=True)
    assert isinstance(short, Admission)
    assert (short.granted, short.slab_short, short.indexer_short) == (False, 1, 0)
    world.coordinator.arrivals.release(arrival, has_come=False)
    slab.release(taken)


def test_blocks_that_a_copy_reads_stay_leased_when_their_request_goes() -> None:
    world = World()
    world.start("a", 0, num_pages=2)
    blocks = tuple(world.kv.resident.blocks("a"))
    index_blocks = tuple(world.kv.indexer.blocks("a"))
    pin = world.coordinator.arrivals.pin(blocks, index_blocks)  # type: ignore[arg-type]
    world.coordinator.remove("a")
    world.coordinator.assert_invariants()
    taken = world.kv.slab.allocate(world.kv.slab.num_free)
    assert not set(taken) & set(blocks)
    world.coordinator.arrivals.unpin(pin)
    assert world.kv.slab.num_free == 2
    with pytest.raises(InvariantError, match="not pinned"):
        world.coordinator.arrivals.unpin(pin)
    world.kv.slab.release(taken)


def test_a_free_block_cannot_be_pinned() -> None:
    world = World()
    with pytest.raises(InvariantError, match="slab block 9 is free"):
        world.coordinator.arrivals.pin((9,), ())  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["arrival", "claim", "pin"])
def test_damage_is_found_by_the_invariants(damage: str) -> None:
    world = World()
    leave_on_host(world, 3)
    world.start("b", 1, num_pages=1, seed=7)
    keys = newcomer(world)
    arrivals = world.coordinator.arrivals
    arrivals.claim("n", 0, world.coordinator.find_prefix(keys, look_beyond=True).host_beyond)
    pin = arrivals.pin(tuple(world.kv.resident.blocks("b")), ())  # type: ignore[arg-type]
    arrival = reserve(world, keys[:1])
    if damage == "arrival":
        world.kv.index_pool.release(arrival.indexer)
    elif damage == "claim":
        arrivals._claims["stranger"] = arrivals._claims.pop("n")
    else:
        world.kv.slab.release(pin.slab)
    with pytest.raises(InvariantError):
        world.coordinator.assert_invariants()
