"""The broken host tier loses no byte and puts every one of them in the wrong place."""

import pytest

from hisparse.worker import CpuBackend
from tests.evaluation.misplaced import SHAPES, assert_misplaced


@pytest.mark.parametrize(("num_layers", "block_size"), SHAPES)
def test_every_row_lands_elsewhere_and_restores_are_left_alone(num_layers: int, block_size: int) -> None:
    assert_misplaced(CpuBackend(), num_layers, block_size)
