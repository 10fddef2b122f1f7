"""A synthetic trace of a sparse indexer, with the locality that was published for one: which positions a step selects.

A token's score is 1.2 b + x + 0.28 noise: b, drawn once a token, says how important it is; x wanders from step to
step, AR(1) with a correlation of exp(-1/9); the noise is new in every step. The highest scores are selected.
"""

import math
from collections.abc import Iterator

import torch

CORRELATION = math.exp(-1 / 9)


def selections(requests: int, context: int, topk: int, steps: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Per step, int32 `[requests, topk]` positions in ascending order, on torch's CUDA device."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(requests, context, generator=generator, device="cuda")

    importance, wandering = normal(), normal()
    for _ in range(steps):
        scores = 1.2 * importance + wandering + 0.28 * normal()
        yield scores.topk(topk).indices.int().sort(1).values
        wandering = CORRELATION * wandering + math.sqrt(1 - CORRELATION**2) * normal()
