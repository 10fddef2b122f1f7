"""The device budget in bytes, from every way to write it."""

import pytest

from hisparse.cli.budget import Workload, check_budget, device_budget
from hisparse.config import CacheConfig, ModelGeometry, plan_cache
from hisparse.errors import CapacityError, InputError
from hisparse.geometry import RowFormat

MODEL = ModelGeometry(RowFormat("float32", 320), leader_of=(0, 1, 2, 3), index_topk=32, index_row_bytes=64)


def workload(total_tokens: int, num_running: int = 1) -> Workload:
    return Workload(
        MODEL, block_size=16, hot_rows=64, staging_rows=128, num_running=num_running, total_tokens=total_tokens
    )


def test_a_size_is_taken_as_it_is() -> None:
    assert device_budget("512KiB", workload(10_000)) == 512 << 10


def test_a_share_is_of_all_rows_of_all_layers() -> None:
    assert device_budget("15%", workload(10_000)) == 10_000 * 4 * 320 * 15 // 100
    assert device_budget("100 %", workload(10_000)) == 10_000 * 4 * 320


def test_all_has_no_bound() -> None:
    assert device_budget("all", workload(10_000)) is None


def test_the_default_is_a_quarter_of_a_long_workload() -> None:
    assert device_budget(None, workload(100_000)) == 100_000 * 4 * 320 // 4


@pytest.mark.parametrize("num_running", [1, 4])
def test_the_default_is_enough_for_every_running_request(num_running: int) -> None:
    budget = device_budget(None, workload(10, num_running))
    assert budget is not None
    page = 16 * 4 * 320
    assert budget == page * (1 + 8 + num_running * (4 + 2))


def test_the_default_for_one_request_is_just_what_the_plan_accepts() -> None:
    budget = device_budget(None, workload(10))
    assert budget is not None

    def plan(slab_bytes: int) -> int:
        config = CacheConfig(
            block_size=16,
            slab_bytes=slab_bytes,
            host_pool_bytes=1 << 20,
            hot_rows=64,
            staging_rows=128,
            max_running=1,
            max_tokens=10,
            indexer_tokens=10,
        )
        return plan_cache(config, MODEL).num_device_blocks

    assert plan(budget) == 15
    with pytest.raises(CapacityError):
        plan(budget - 1)


@pytest.mark.parametrize("text", ["", "x", "15 percent", "-1", "0%", "100.5%", "0"])
def test_anything_else_is_refused_with_and_without_a_model(text: str) -> None:
    with pytest.raises(InputError, match="budget"):
        check_budget(text)
    with pytest.raises(InputError, match="budget"):
        device_budget(text, workload(10))
