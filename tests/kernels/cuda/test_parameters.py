"""Launches are decided from shapes alone: what is laid out fits, does not overlap, and fills the device once."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import InputError
from hisparse.kernels.cuda.parameters import (
    DeviceLimits,
    ResolveLaunch,
    ResolveShape,
    Specialization,
    blocks_per_row,
    cluster_size,
    plan_look_up,
    plan_move,
    plan_replay,
    plan_resolve,
    with_mover,
)

H200 = DeviceLimits((9, 0), 132, 227 * 1024)
A100 = DeviceLimits((8, 0), 108, 163 * 1024)
RTX_5090 = DeviceLimits((12, 0), 170, 99 * 1024)


@given(
    st.sampled_from([H200, A100, RTX_5090]),
    st.integers(1, 512),
    st.integers(1, 32768),
    st.integers(1, 200_000),
    st.sampled_from([16, 656, 1152, 4096]),
)
def test_shared_memory_is_within_the_device_and_its_parts_do_not_overlap(
    limits: DeviceLimits, num_rows: int, hot_rows: int, max_tokens: int, row_bytes: int
) -> None:
    try:
        launch = plan_resolve(ResolveShape(num_rows, 2048, hot_rows, max_tokens, row_bytes), limits)
    except InputError:
        # The bits of 200,000 tokens and two bytes a hot row: only large sizes may fail.
        assert max_tokens // 8 + 2 * hot_rows > 64 * 1024
        return
    if limits.has_clusters:
        parts = cluster_parts(launch, num_rows)
    else:
        parts = team_parts(launch, max_tokens, num_rows, hot_rows)
    for (_, end), (start, _) in itertools.pairwise(parts):
        assert end <= start
    assert all(start % 16 == 0 for start, _ in parts)
    assert parts[-1][0] % 128 == 0
    assert parts[-1][1] == launch.shared_bytes <= limits.shared_bytes - 10240


def team_parts(launch: ResolveLaunch, max_tokens: int, num_rows: int, hot_rows: int) -> list[tuple[int, int]]:
    kernel, offsets = launch.specialization, launch.offsets
    assert offsets.miss_segments * 128 >= max_tokens
    ends = {
        "miss_bits": offsets.miss_segments * 16,
        "miss_prefix": offsets.miss_segments * 2,
        "touched": (hot_rows + 31) // 32 * 4,
        "positions": (hot_rows + 3) // 4 * 16 if kernel.keep_positions else 0,
        "stamps": (hot_rows + 3) // 4 * 16 if kernel.keep_stamps else 0,
        "victims": hot_rows * 2,
        "rows": num_rows * 2,
        "stages": kernel.stage_bytes,
    }
    return [(getattr(offsets, name), getattr(offsets, name) + size) for name, size in ends.items()]


def cluster_parts(launch: ResolveLaunch, num_rows: int) -> list[tuple[int, int]]:
    kernel, offsets = launch.specialization, launch.cluster_offsets
    ends = {
        "missed": offsets.missed_words * 4,
        "touched": offsets.touched_words * 4,
        "excluded": offsets.touched_words * 4,
        "misses": offsets.capacity * 4,
        "victims": offsets.capacity * 2,
        "rows": num_rows * 2,
        "stages": kernel.stage_bytes,
    }
    return [(getattr(offsets, name), getattr(offsets, name) + size) for name, size in ends.items()]


@given(st.integers(1, 512), st.integers(1, 4096), st.integers(1, 32768), st.integers(1, 200_000))
def test_the_blocks_of_a_cluster_cover_their_request(num_rows: int, topk: int, hot_rows: int, max_tokens: int) -> None:
    launch = plan_resolve(ResolveShape(num_rows, topk, hot_rows, max_tokens, 656), H200)
    kernel, offsets = launch.specialization, launch.cluster_offsets
    assert launch.grid == (kernel.cluster, num_rows)
    assert offsets.missed_words * 32 * kernel.cluster >= max_tokens
    assert offsets.touched_words * 32 * kernel.cluster >= hot_rows
    # Every miss that a request of up to 8 rows can have is listed, or there are more than hot rows.
    columns = sum(1 for column in range(topk) if column // kernel.threads % kernel.cluster == 0)
    assert offsets.capacity >= min(hot_rows, columns * min(num_rows, 8))
    assert kernel.selections in (1, 2, 4)


def test_a_cluster_shrinks_as_requests_fill_the_device() -> None:
    assert [cluster_size(requests, H200) for requests in (1, 33, 34, 66, 67, 132, 133, 1000)] == [
        8,
        8,
        4,
        4,
        2,
        2,
        1,
        1,
    ]


def test_rows_of_the_same_requests_share_their_clusters() -> None:
    union = ResolveShape(128, 2048, 10240, 32768, 656, num_slots=32)
    assert plan_resolve(union, H200).specialization.cluster == 8
    assert plan_resolve(replace(union, num_slots=128), H200).specialization.cluster == 2


def test_a_look_up_has_a_thread_a_column_until_the_device_is_full() -> None:
    grids = [plan_look_up(ResolveShape(rows, 2048, 4096, 32768, 656), H200).grid for rows in (1, 128, 1056, 8192)]
    assert grids == [(8, 1), (8, 128), (1, 1056), (1, 8192)]


def test_devices_without_clusters_get_the_other_kernel() -> None:
    shape = ResolveShape(1, 2048, 4096, 32768, 656)
    for limits, name in ((A100, "resolve"), (H200, "resolve_cluster"), (RTX_5090, "resolve")):
        assert plan_resolve(shape, limits).specialization.kernel == name


def test_the_sizes_of_a_served_model_keep_their_state_in_shared_memory() -> None:
    for hot_rows in (4096, 10240):
        kernel = plan_resolve(ResolveShape(1, 2048, hot_rows, 163_840, 656), A100).specialization
        assert kernel.keep_positions
        assert kernel.keep_stamps


def test_the_largest_hot_lease_fits_with_part_of_its_state_outside() -> None:
    kernel = plan_resolve(ResolveShape(8, 4096, 32768, 163_840, 656), A100).specialization
    assert not kernel.keep_stamps


def test_what_cannot_fit_says_what_to_lower() -> None:
    with pytest.raises(InputError, match="lower max_tokens or hot_rows"):
        plan_resolve(ResolveShape(1, 2048, 32768, 1_000_000, 656), RTX_5090)


@pytest.mark.parametrize(("name", "value"), [("topk", 4097), ("hot_rows", 32769), ("num_rows", 8193)])
def test_sizes_past_the_bounds_are_refused(name: str, value: int) -> None:
    sizes = {"num_rows": 1, "topk": 8, "hot_rows": 8, "max_tokens": 64, "row_bytes": 64} | {name: value}
    with pytest.raises(InputError, match=f"{name} is {value}"):
        ResolveShape(**sizes)


def test_bulk_copies_need_their_hardware_and_room() -> None:
    kernel = Specialization("move_rows", row_bytes=656)
    assert with_mover(kernel, H200, 1 << 20).use_bulk
    assert not with_mover(kernel, A100, 1 << 20).use_bulk
    assert not with_mover(kernel, H200, 1024).use_bulk
    assert with_mover(kernel, H200, 16 * 768).rows_per_warp == 1


def test_a_lone_row_gets_many_blocks_and_a_full_batch_one_each() -> None:
    assert [blocks_per_row(num_rows, H200) for num_rows in (1, 8, 32, 128, 1000)] == [32, 16, 4, 1, 1]


def test_moves_start_no_more_blocks_than_they_can_use() -> None:
    assert [plan_move(656, copies, H200, 1 << 17).blocks for copies in (1, 17, 1 << 20)] == [1, 2, 132]


def test_replays_leave_most_multiprocessors_to_the_model() -> None:
    for limits in (H200, A100, RTX_5090):
        assert [plan_replay(656, copies, limits, 1 << 16).blocks for copies in (1, 9, 1 << 20)] == [1, 2, 16]
        assert 3 * plan_replay(656, 1 << 20, limits, 1 << 16).blocks < limits.num_multiprocessors


def test_replays_have_as_much_under_way_as_the_link_needs_and_not_ten_times_that() -> None:
    link, latency_s = 55e9, 2e-6
    for row_bytes in (656, 1152, 2304):
        launch = plan_replay(row_bytes, 1 << 20, H200, 1 << 17)
        kernel = launch.specialization
        under_way = launch.blocks * kernel.threads // 32 * kernel.rows_per_warp * row_bytes
        assert link * latency_s < under_way < 10 * link * latency_s
