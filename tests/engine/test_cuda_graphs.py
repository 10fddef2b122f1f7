"""Which size a decode step runs at, and what fills it. Capturing itself needs a GPU."""

import pytest
import torch

from hisparse.engine.cuda_graphs import MAX_GRAPHS, DecodeGraphs, DecodeLimits, DecodeRows, DecodeShape, Recent
from hisparse.errors import InvariantError

LIMITS = DecodeLimits(max_rows=12, max_tokens=5000)


@pytest.mark.parametrize(
    ("num_rows", "context", "shape"),
    [
        (1, 1, DecodeShape(1, 1024)),
        (3, 1024, DecodeShape(4, 1024)),
        (5, 1025, DecodeShape(8, 2048)),
        (9, 4097, DecodeShape(12, 5000)),
        (12, 5000, DecodeShape(12, 5000)),
    ],
)
def test_sizes_are_buckets_up_to_the_limits(num_rows: int, context: int, shape: DecodeShape) -> None:
    assert LIMITS.bucket(num_rows, context) == shape


def test_rows_are_powers_of_two_up_to_16_and_multiples_of_8_from_there_to_the_most() -> None:
    limits = DecodeLimits(max_rows=100, max_tokens=5000)
    buckets = [limits.bucket(rows, 1).num_rows for rows in range(1, 101)]
    assert sorted(set(buckets)) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 100]
    assert buckets == sorted(buckets)
    assert all(bucket >= rows for rows, bucket in enumerate(buckets, start=1))
    assert buckets[34 - 1] == 40


def test_no_more_values_are_kept_than_the_limit_and_the_least_recently_used_goes() -> None:
    made: list[str] = []
    recent: Recent[str, str] = Recent(3)

    def use(keys: str) -> str:
        made.clear()
        for key in keys:
            assert recent.get_or_make(key, lambda name: made.append(name) or name.upper()) == key.upper()
            assert len(recent) <= 3
        return "".join(made)

    assert use("abcab") == "abc"
    assert use("d") == "d"
    assert use("abd") == "", "c was used least recently"
    assert use("c") == "c"
    assert use("a") == "a"
    recent.clear()
    assert len(recent) == 0
    assert use("a") == "a"


def test_what_must_go_is_there_until_its_successor_is_made() -> None:
    recent: Recent[int, int] = Recent(2)
    kept: list[int] = []

    def make(key: int) -> int:
        kept.append(len(recent))
        return key

    for key in range(4):
        recent.get_or_make(key, make)
    assert kept == [0, 1, 2, 2]
    assert len(recent) == 2


def test_one_long_request_or_many_short_ones_use_fewer_sizes_than_are_kept() -> None:
    limits = DecodeLimits(max_rows=64, max_tokens=163840)
    one = {limits.bucket(1, context) for context in range(1, 163840, 500)}
    many = {limits.bucket(rows, 32768) for rows in range(1, 65)}
    assert len(one) < MAX_GRAPHS
    assert len(many) < MAX_GRAPHS


def test_fixed_rows_are_always_the_most() -> None:
    fixed = DecodeLimits(max_rows=12, max_tokens=5000, fixed_rows=True)
    assert {fixed.bucket(rows, 100).num_rows for rows in range(1, 13)} == {12}


def test_steps_with_and_without_leases_are_two_shapes() -> None:
    assert LIMITS.bucket(3, 100, leased=True) != LIMITS.bucket(3, 100, leased=False)


@pytest.mark.parametrize(("num_rows", "context"), [(0, 10), (13, 10), (1, 0), (1, 5001)])
def test_a_step_beyond_the_limits_is_refused(num_rows: int, context: int) -> None:
    with pytest.raises(InvariantError, match="outside"):
        LIMITS.bucket(num_rows, context)


def test_a_step_is_computed_at_its_size_and_its_padding_is_no_one_s() -> None:
    seen: list[tuple[list[list[int]], int]] = []

    def forward(inputs: torch.Tensor, width: int) -> torch.Tensor:
        seen.append((inputs.tolist(), width))
        return inputs.T.float()

    graphs = DecodeGraphs(forward, LIMITS, torch.device("cpu"), use_graphs=False)
    logits = graphs.run(DecodeRows(tokens=[5, 6, 7], positions=[10, 2000, 3], slots=[2, 0, 1]))
    assert seen == [([[5, 6, 7, 0], [10, 2000, 3, 0], [2, 0, 1, -1]], 2048)]
    assert logits.tolist() == [[5, 10, 2], [6, 2000, 0], [7, 3, 1]]
    assert graphs.num_captured == 0
