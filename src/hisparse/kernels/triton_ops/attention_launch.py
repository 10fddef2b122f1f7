"""How the Triton kernel of `attention.py` is launched. Pure functions, which need no triton."""

from dataclasses import dataclass

import torch

from hisparse.geometry import ceil_div
from hisparse.kernels.row_elements import RowElements

_MIN_HEADS = 16
"""The least number of heads that a tensor core takes at once."""

_WIDE_HEADS = 64
"""What the matrix units of a Hopper GPU take at once."""

_START_COST = 0.4
"""What a program costs before and after its chunks (queries, a first tile to wait for), in chunks."""

_JOIN_COST = 0.6
"""What a second launch that joins chunks costs, in chunks."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one program works: on `heads` heads, `tile` rows at a time, with so many warps and pipeline stages.

    `chunk_rows`: rows of a chunk, a multiple of `tile`. Another value of it gives other bits; so does another `tile`.
    """

    heads: int
    tile: int
    chunk_rows: int
    warps: int
    stages: int


def launch_for(elements: RowElements, num_heads: int, topk: int, capability: tuple[int, int]) -> Launch:
    """Chosen by the model and the GPU (`capability`, as torch gives it) alone, never by the batch.

    More heads a program read each row less often, and packed rows are also taken apart once a program.
    """
    fitting = max(16, next_power_of_two(topk))
    if elements.dtype is torch.float32:
        return Launch(_MIN_HEADS, 16, min(256, fitting), 4, 1)
    heads = max(_MIN_HEADS, next_power_of_two(num_heads))
    if capability[0] == 9 and heads >= _WIDE_HEADS:
        # Of those in benchmarks/attention.py: smaller tiles and chunks are quicker for few queries and slower for many.
        return Launch(_WIDE_HEADS, min(64, fitting), min(512, fitting), 8, 2)
    if capability >= (12, 0):
        # Shared memory of 99 KiB: heads and rows of two stages do not fit.
        return Launch(_MIN_HEADS, min(32, fitting), min(256, fitting), 4, 1)
    return Launch(min(32, heads), min(32, fitting), min(256, fitting), 4, 2)


def chunks_per_program(num_chunks: int, num_lanes: int, num_processors: int) -> int:
    """How many chunks one program takes in a row, of the `num_chunks` that each of `num_lanes` programs would.

    `num_lanes`: queries times groups of heads. One program runs on a processor at a time, so the work goes in rounds;
    taking all chunks saves the join, and fewer leave no processor idle.
    """

    def cost(chunks: int) -> float:
        rounds = ceil_div(num_lanes * ceil_div(num_chunks, chunks), num_processors)
        return rounds * (chunks + _START_COST) + (_JOIN_COST if chunks < num_chunks else 0.0)

    return min(range(1, num_chunks + 1), key=cost)


def next_power_of_two(value: int) -> int:
    """The least power of two at or above `value`, which is at least 1."""
    return 1 << (value - 1).bit_length()
