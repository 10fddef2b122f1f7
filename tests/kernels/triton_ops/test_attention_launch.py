"""How the attention kernel is launched: by the model and the GPU where bits depend on it, by the batch where not."""

import inspect

import pytest
import torch

from hisparse.kernels.row_elements import RowElements
from hisparse.kernels.triton_ops.attention_launch import Launch, chunks_per_program, launch_for, next_power_of_two

PROCESSORS = 132


def test_what_bits_depend_on_is_chosen_without_the_batch() -> None:
    assert set(inspect.signature(launch_for).parameters) == {"elements", "num_heads", "topk", "capability"}
    assert {"tile", "chunk_rows"} <= set(Launch.__dataclass_fields__)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("heads", [1, 4, 16, 20, 64, 128])
@pytest.mark.parametrize("topk", [1, 7, 32, 600, 2048, 4096])
def test_a_chunk_is_whole_tiles_and_a_tile_is_what_a_tensor_core_takes(
    capability: tuple[int, int], dtype: torch.dtype, heads: int, topk: int
) -> None:
    launch = launch_for(RowElements(dtype, 512, 64), heads, topk, capability)
    assert launch.chunk_rows % launch.tile == 0
    assert launch.tile >= 16
    assert launch.heads >= 16
    assert launch.chunk_rows < 2 * max(16, topk)


def test_a_hopper_gpu_takes_the_heads_that_fill_its_matrix_units() -> None:
    elements = RowElements(torch.bfloat16, 512, 64)
    assert launch_for(elements, 128, 2048, (9, 0)).heads == 64
    assert launch_for(elements, 128, 2048, (8, 0)).heads == 32
    assert launch_for(elements, 16, 2048, (9, 0)).heads == 16


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 16])
@pytest.mark.parametrize("num_lanes", [1, 2, 16, 64, 128, 132, 133, 512, 5000])
def test_one_program_takes_some_of_the_chunks_and_never_more(num_chunks: int, num_lanes: int) -> None:
    assert 1 <= chunks_per_program(num_chunks, num_lanes, PROCESSORS) <= num_chunks


def test_a_lone_query_is_spread_and_a_full_batch_is_not() -> None:
    assert chunks_per_program(4, 2, PROCESSORS) == 1
    assert chunks_per_program(4, 16, PROCESSORS) == 1
    assert chunks_per_program(4, 64, PROCESSORS) == 2
    assert chunks_per_program(4, 128, PROCESSORS) == 4
    assert chunks_per_program(4, 1000, PROCESSORS) == 4


@pytest.mark.parametrize(("value", "expected"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_the_next_power_of_two(value: int, expected: int) -> None:
    assert next_power_of_two(value) == expected
