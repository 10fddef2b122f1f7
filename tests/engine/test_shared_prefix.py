"""Many requests over one long beginning, on a slab that does not hold all that they compute: everybody gets on.

Steps are counted, never timed. A step that computes nothing is lost for all.
"""

import random
from dataclasses import dataclass

import pytest

from hisparse.config import CacheConfig, CachePlan, ModelGeometry, WriteBack, plan_cache
from hisparse.geometry import RowFormat, device_blocks
from hisparse.residency import HiSparseCoordinator
from tests.engine.paper_worker import BLOCK_SIZE, Drive
from tests.engine.requests import make_request

HOT_BLOCKS = 2
OUTPUT = 60
"""Tokens of each request, one a step: nobody can end in fewer steps."""


@dataclass(frozen=True)
class Load:
    """`num_requests` prompts of `num_pages` pages, alike but for their last tokens, and a slab of `slab` blocks for
    requests to share."""

    num_requests: int
    num_pages: int
    slab: int
    host: int = 1000
    is_shared: bool = True
    max_delay: int = 0
    num_workers: int = 1
    write_back: WriteBack = WriteBack.PRESSURE

    def plan(self) -> CachePlan:
        model = ModelGeometry(RowFormat("test", 64), (0,), index_topk=4, index_row_bytes=32)
        page = device_blocks(model.row, 1, BLOCK_SIZE).payload_bytes
        longest = (self.num_pages + 2) * BLOCK_SIZE + OUTPUT
        return plan_cache(
            CacheConfig(
                block_size=BLOCK_SIZE,
                # The null block and the one of staging are nobody's.
                slab_bytes=(2 + self.slab) * page,
                host_pool_bytes=self.host * page,
                hot_rows=HOT_BLOCKS * BLOCK_SIZE,
                staging_rows=BLOCK_SIZE,
                max_running=self.num_requests,
                max_tokens=longest,
                indexer_tokens=(self.num_requests + 1) * (longest + BLOCK_SIZE),
                write_back=self.write_back,
            ),
            model,
        )


@dataclass(frozen=True)
class Steps:
    """What a load took: steps, those of them that computed nothing, and pages that were copied."""

    total: int
    empty: int
    copied: int


def run(load: Load, seed: int = 0) -> tuple[Steps, Drive]:
    """The beginning is computed once; then all requests come at once and run to their end, every row read checked."""
    plan = load.plan()
    drive = Drive(plan, seed, load.max_delay, load.num_workers, chunk=4 * load.num_pages * BLOCK_SIZE)
    rng = random.Random(seed)
    beginning = [rng.randrange(7) for _ in range(load.num_pages * BLOCK_SIZE)]
    if load.is_shared:
        drive.scheduler.add(make_request("first", [*beginning, 1], 1))
        while drive.scheduler.has_work:
            drive.step()
    for number in range(load.num_requests):
        prompt = beginning if load.is_shared else [rng.randrange(7) for _ in beginning]
        drive.scheduler.add(make_request(f"r{number}", [*prompt, number, 9], OUTPUT))
    copied, total, empty = drive.workers[0].copied_pages, 0, 0
    while drive.scheduler.has_work:
        total += 1
        empty += not drive.step()
        assert total < 40 * OUTPUT, f"{len(drive.scheduler.running)} requests still run after {total} steps"
    return Steps(total, empty, drive.workers[0].copied_pages - copied), drive


def own_pages(load: Load) -> int:
    """Pages that a request has alone when it ends."""
    return (2 + OUTPUT) // BLOCK_SIZE


def test_a_slab_with_room_for_the_beginning_runs_all_requests_side_by_side() -> None:
    load = Load(num_requests=16, num_pages=100, slab=100 + 16 * 2 + 16)
    steps, drive = run(load)
    assert steps.empty == 0
    assert steps.total <= OUTPUT + 3
    assert drive.scheduler.num_preemptions == 0
    # The beginning is copied once at most, whoever shares it.
    assert 0 < steps.copied <= load.num_pages + load.num_requests * own_pages(load)
    totals = drive.scheduler.coordinator.totals
    assert totals.spills - totals.shared_spills == steps.copied


@pytest.mark.parametrize("slab", [98, 66])
def test_a_beginning_that_is_larger_than_the_slab_beside_the_hot_leases_is_read_from_the_host(slab: int) -> None:
    """Hot leases and last pages of all take 64 blocks, so nearly nothing of 200 pages has room beside them.

    Nobody is passed over for long: all of them run side by side, or it would take twice as many steps.
    """
    steps, drive = run(Load(num_requests=16, num_pages=200, slab=slab))
    assert steps.empty <= 3
    assert steps.total <= OUTPUT + 15
    assert drive.scheduler.num_preemptions == 0


@pytest.mark.parametrize(("num_requests", "num_pages"), [(4, 100), (16, 40)])
def test_sharing_a_beginning_never_takes_more_steps_than_having_one_each(num_requests: int, num_pages: int) -> None:
    slab = num_pages + 4 * num_requests
    shared, _ = run(Load(num_requests, num_pages, slab))
    distinct, _ = run(Load(num_requests, num_pages, slab, host=8000, is_shared=False))
    assert shared.total <= distinct.total
    assert shared.empty <= distinct.empty
    assert shared.copied < distinct.copied


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("write_back", [WriteBack.PRESSURE, WriteBack.EAGER])
def test_copies_and_reports_that_are_late_cost_their_delay_and_no_more(seed: int, write_back: WriteBack) -> None:
    rng = random.Random(seed)
    pages = rng.choice([30, 80])
    load = Load(
        num_requests=rng.choice([5, 12]),
        num_pages=pages,
        slab=rng.choice([60, pages + 40]),
        host=rng.choice([400, 2000]),
        max_delay=3,
        num_workers=2,
        write_back=write_back,
    )
    steps, drive = run(load, seed)
    assert steps.empty <= steps.total // 2
    assert drive.scheduler.kv.use().resident == 0


def test_a_host_pool_that_holds_the_beginning_once_is_enough_for_all() -> None:
    load = Load(num_requests=8, num_pages=100, slab=60, host=100 + 8 * 16 + 2)
    steps, drive = run(load)
    assert steps.empty <= 3
    assert drive.scheduler.num_preemptions == 0


def test_control_blocks_that_are_promised_and_do_not_come_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a block counts for each request that shares it: all are told to wait, and next to nothing comes."""
    sound = HiSparseCoordinator.reclaim
    asked = 0

    def broken(self: HiSparseCoordinator, num_blocks: int) -> int:
        nonlocal asked
        asked += 1
        return sound(self, num_blocks) if asked % 50 == 0 else num_blocks

    monkeypatch.setattr(HiSparseCoordinator, "reclaim", broken)
    steps, _ = run(Load(num_requests=16, num_pages=100, slab=100 + 16 * 2 + 16))
    assert steps.empty > 3
    assert steps.total > OUTPUT + 15
