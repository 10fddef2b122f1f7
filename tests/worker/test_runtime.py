"""A leader has its followers' rows copied ahead: in as few launches as serve them best, and never unseen."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import InvariantError
from hisparse.kernels.contract import Selection
from hisparse.worker import CpuBackend, LeaderRuntime
from hisparse.worker.runtime import ONE_LAUNCH_ROWS, launch_sizes
from tests.worker.late_side import LateBackend, rows_of
from tests.worker.world import NUM_SLOTS, MakeWorld, World, make_plan

LEADER_OF = (0, 0, 0, 0, 4, 4, 6)
"""A leader with three followers, one with one, one alone."""

MANY = ONE_LAUNCH_ROWS + 1


@pytest.fixture
def backend() -> LateBackend:
    return LateBackend()


@pytest.fixture
def world(make_world: MakeWorld, backend: LateBackend) -> World:
    """Every slot has five pages, four of them on the host. Followers' copies are made when they are joined."""
    world = make_world(backend, plan=make_plan(leader_of=LEADER_OF, max_running=MANY))
    for slot in range(NUM_SLOTS):
        world.admit_on_host(slot, 5)
    return world


def select(first: int, num_rows: int) -> Selection:
    """Four positions of each slot from `first` on, in a batch of `num_rows` rows."""
    return Selection(*rows_of([(slot, range(first + slot, first + slot + 4)) for slot in range(NUM_SLOTS)], num_rows))


def assert_reads(world: World, layer: int, rows: torch.Tensor, selection: Selection) -> None:
    got = world.worker.handles[layer].gather(rows)
    for slot in range(NUM_SLOTS):
        assert torch.equal(got[slot], world.truth(slot, selection.positions[slot], layer)), f"layer {layer}"


# How many launches.


def test_few_rows_go_in_one_launch_and_many_in_one_for_each_follower() -> None:
    assert [launch_sizes(rows, 3) for rows in (1, 8, 9, 128)] == [(3,), (3,), (1, 1, 1), (1, 1, 1)]
    assert launch_sizes(5, 1) == launch_sizes(50, 1) == (1,)
    assert launch_sizes(5, 0) == launch_sizes(50, 0) == ()


@given(st.integers(0, 300), st.integers(0, 80))
def test_launches_serve_every_follower_once(num_rows: int, num_followers: int) -> None:
    sizes = launch_sizes(num_rows, num_followers)
    assert sum(sizes) == num_followers
    assert all(size > 0 for size in sizes)


@pytest.mark.parametrize(("num_rows", "served"), [(NUM_SLOTS, [3, 1]), (MANY, [1, 1, 1, 1])])
def test_each_resolve_launches_as_planned(world: World, backend: LateBackend, num_rows: int, served: list[int]) -> None:
    for first in (0, 6):
        backend.resolver.served.clear()
        world.forward(select(first, num_rows))
        assert backend.resolver.served == served


def test_without_a_lease_nothing_is_launched_for_followers(make_world: MakeWorld, backend: LateBackend) -> None:
    world = make_world(backend, plan=make_plan(leader_of=LEADER_OF))
    assert not world.worker.tables.any_leased
    selection = replace(select(0, NUM_SLOTS), leased=False)
    rows = world.worker.handles[0].resolve(selection)
    assert (rows == -1).all(), "nothing is resident, and nothing can be loaded"
    for layer in (1, 2, 3):
        world.worker.handles[layer].load_followed()
    assert backend.resolver.served == []


def test_a_broken_promise_is_told(world: World) -> None:
    with pytest.raises(InvariantError, match="a selection without leases names slots"):
        world.worker.handles[0].resolve(replace(select(0, NUM_SLOTS), leased=False))


# What followers read.


@pytest.mark.parametrize("num_rows", [NUM_SLOTS, MANY])
def test_a_follower_reads_its_own_bytes_once_it_has_loaded_and_not_before(world: World, num_rows: int) -> None:
    selection = select(0, num_rows)
    rows = world.worker.handles[0].resolve(selection)
    for layer in (1, 2, 3):
        # One launch serves all followers of few rows, so that the first of them brings the others' rows as well.
        if layer == 1 or num_rows == MANY:
            with pytest.raises(AssertionError, match=f"layer {layer}"):
                assert_reads(world, layer, rows, selection)
        world.worker.handles[layer].load_followed()
        assert_reads(world, layer, rows, selection)


def test_a_follower_may_be_late_when_its_leader_is_not_the_last(make_world: MakeWorld, backend: LateBackend) -> None:
    world = make_world(backend, plan=make_plan(leader_of=(0, 1, 0, 1)))
    for slot in range(NUM_SLOTS):
        world.admit_on_host(slot, 5)
    for first in (0, 5, 9):
        selection = select(first, NUM_SLOTS)
        for layer, got in enumerate(world.forward(selection)):
            for slot in range(NUM_SLOTS):
                assert torch.equal(got[slot], world.truth(slot, selection.positions[slot], layer))


def test_many_and_few_rows_move_and_count_the_same(make_world: MakeWorld) -> None:
    counted = []
    for num_rows in (NUM_SLOTS, MANY):
        world = make_world(CpuBackend(), plan=make_plan(leader_of=LEADER_OF, max_running=MANY))
        for slot in range(NUM_SLOTS):
            world.admit_on_host(slot, 5)
        for first in (0, 2, 11):
            world.forward(select(first, num_rows))
        counted.append(world.worker.counters())
    assert counted[0] == counted[1]
    assert counted[0]["bytes"] == (counted[0]["miss"] // 3) * 48 * len(LEADER_OF)


# Who is missed.


def test_a_leader_without_followers_launches_nothing(world: World, backend: LateBackend) -> None:
    world.worker.handles[6].resolve(select(0, NUM_SLOTS))
    runtime = world.worker.handles[6].runtime
    assert isinstance(runtime, LeaderRuntime)
    assert runtime.unjoined == {}
    assert backend.resolver.served == []


@pytest.mark.parametrize("num_rows", [NUM_SLOTS, MANY])
def test_a_leader_does_not_resolve_again_before_all_its_followers_loaded(world: World, num_rows: int) -> None:
    handles = world.worker.handles
    handles[0].resolve(select(0, num_rows))
    handles[2].load_followed()
    with pytest.raises(InvariantError, match="layer 1, 3 missed a plan of layer 0: it must load after each"):
        handles[0].resolve(select(4, num_rows))
    for layer in (1, 3):
        handles[layer].load_followed()
    handles[0].resolve(select(4, num_rows))


def test_a_step_does_not_end_before_all_followers_loaded(world: World) -> None:
    handles = world.worker.handles
    world.start()
    handles[4].resolve(select(0, NUM_SLOTS))
    with pytest.raises(InvariantError, match="layer 5 missed a plan of layer 4"):
        world.worker.finish_step()
    handles[5].load_followed()
    world.worker.finish_step()


def test_loading_before_any_resolve_or_again_is_free(world: World, backend: LateBackend) -> None:
    handle = world.worker.handles[5]
    handle.load_followed()
    assert backend.side.num_done == 0
    world.worker.handles[4].resolve(select(0, NUM_SLOTS))
    handle.load_followed()
    handle.load_followed()
    assert backend.side.num_done == 1
