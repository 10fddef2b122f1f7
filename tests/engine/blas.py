"""What this machine's matrix products promise, asked of them."""

from functools import cache

import torch


@cache
def rows_are_independent() -> bool:
    """Whether a row of a float32 product has the same bits however many rows are multiplied together.

    Not everywhere: some libraries sum a few rows in another order than many. Runs that batch otherwise then differ in
    their last bits, and in bfloat16, now and then, by a rounding of it.
    """
    generator = torch.Generator().manual_seed(0)
    for inner in (16, 64, 128):
        rows, weight = (torch.randn((count, inner), generator=generator) for count in (64, 96))
        whole = rows @ weight.T
        if not all(torch.equal(rows[:count] @ weight.T, whole[:count]) for count in (1, 2, 3, 5, 17)):
            return False
    return True
