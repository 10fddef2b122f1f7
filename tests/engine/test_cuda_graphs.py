"""Which size a decode step runs at, and what fills it. Capturing itself needs a GPU."""

import pytest
import torch

from hisparse.engine.cuda_graphs import DecodeGraphs, DecodeLimits, DecodeRows, DecodeShape
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
def test_sizes_are_powers_of_two_up_to_the_limits(num_rows: int, context: int, shape: DecodeShape) -> None:
    assert LIMITS.bucket(num_rows, context) == shape


def test_fixed_rows_are_always_the_most() -> None:
    fixed = DecodeLimits(max_rows=12, max_tokens=5000, fixed_rows=True)
    assert {fixed.bucket(rows, 100).num_rows for rows in range(1, 13)} == {12}


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
