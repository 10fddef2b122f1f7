"""May a request start, or ever run?"""

from dataclasses import replace

import pytest

from hisparse.cache import Verdict
from hisparse.config import WriteBack
from hisparse.residency import Demand, Supply, can_ever_run, may_start
from tests.residency.world import World

PLENTY = Supply(promised=0, slab_free=8, reclaimable=0, host_free=39, indexer_free=500)


@pytest.fixture
def world() -> World:
    return World(device_blocks=13, host_blocks=40)


def test_what_fits_the_device_needs_no_host(world: World) -> None:
    assert can_ever_run(world.plan, Demand(total=world.plan.usable_device_blocks, prompt=1)).granted


def test_what_can_never_fit_is_told_the_host_pool_that_would_do(world: World) -> None:
    most = world.plan.usable_device_blocks - world.plan.hot_blocks + world.plan.num_host_blocks - 1
    assert can_ever_run(world.plan, Demand(total=most, prompt=1)).granted
    answer = can_ever_run(world.plan, Demand(total=most + 3, prompt=1))
    assert answer.verdict is Verdict.NEVER
    assert answer.host_short == 3
    bigger = World(device_blocks=13, host_blocks=43)
    needed = bigger.plan.num_host_blocks * bigger.plan.host.payload_bytes
    assert f"host pool of {needed} bytes" in answer.reason
    assert can_ever_run(bigger.plan, Demand(total=most + 3, prompt=1)).granted


def test_index_keys_cannot_leave_the_device(world: World) -> None:
    answer = can_ever_run(world.plan, Demand(total=world.plan.num_indexer_blocks, prompt=1))
    assert answer.verdict is Verdict.NEVER
    assert answer.indexer_short == 1


def test_footprints_of_running_requests_are_promised(world: World) -> None:
    demand = Demand(total=30, prompt=10)
    room = world.plan.usable_device_blocks - demand.footprint(world.plan)
    assert may_start(world.plan, demand, replace(PLENTY, promised=room)).granted
    answer = may_start(world.plan, demand, replace(PLENTY, promised=room + 2))
    assert (answer.verdict, answer.slab_short) == (Verdict.WAIT, 2)


def test_a_request_smaller_than_a_hot_lease_is_promised_only_itself(world: World) -> None:
    small = Demand(total=2, prompt=2)
    assert small.footprint(world.plan) == 2
    assert not small.may_spill(world.plan)
    on_host = replace(small, on_host=True)
    assert on_host.footprint(world.plan) == world.plan.host_backed_blocks
    assert on_host.may_spill(world.plan)


def test_admission_counts_what_reclaiming_will_free(world: World) -> None:
    demand = Demand(total=30, prompt=10)
    full = replace(PLENTY, slab_free=0)
    assert may_start(world.plan, demand, full).slab_short == 2
    assert may_start(world.plan, demand, replace(full, reclaimable=2)).granted


def test_slab_and_host_together_must_hold_the_prompt(world: World) -> None:
    demand = Demand(total=30, prompt=10)
    assert may_start(world.plan, demand, replace(PLENTY, host_free=2)).granted
    assert may_start(world.plan, demand, replace(PLENTY, host_free=1)).host_short == 1


def test_blocks_that_a_hit_claims_count(world: World) -> None:
    demand = Demand(total=30, prompt=10, hit=8, claimed=8, index_claimed=8)
    assert may_start(world.plan, demand, replace(PLENTY, slab_free=9)).slab_short == 1
    assert may_start(world.plan, demand, replace(PLENTY, slab_free=10, indexer_free=9)).indexer_short == 1
    assert may_start(world.plan, demand, replace(PLENTY, slab_free=10, indexer_free=10)).granted


def test_where_nothing_may_leave_a_request_is_promised_all_of_itself() -> None:
    plan = World(write_back=WriteBack.NEVER).plan
    demand = Demand(total=6, prompt=5)
    assert demand.footprint(plan) == 6
    assert not demand.may_spill(plan)
    room = plan.usable_device_blocks - 6
    assert may_start(plan, demand, replace(PLENTY, promised=room)).granted
    answer = may_start(plan, demand, replace(PLENTY, promised=room + 2))
    assert (answer.verdict, answer.slab_short) == (Verdict.WAIT, 2)


def test_where_nothing_may_leave_a_request_must_fit_the_device() -> None:
    plan = World(write_back=WriteBack.NEVER).plan
    assert can_ever_run(plan, Demand(total=plan.usable_device_blocks, prompt=1)).granted
    demand = Demand(total=plan.usable_device_blocks + 2, prompt=1)
    answer = can_ever_run(plan, demand)
    assert (answer.verdict, answer.slab_short) == (Verdict.NEVER, 2)
    bigger = World(device_blocks=15, write_back=WriteBack.NEVER).plan
    assert f"device budget of {bigger.num_device_blocks * bigger.device.payload_bytes} bytes" in answer.reason
    assert can_ever_run(bigger, demand).granted
    assert can_ever_run(World(write_back=WriteBack.PRESSURE).plan, demand).granted
