"""Blocks of rows spread over threads, each of which computes its own block from beginning to end.

Threads inside an operator meet at its end; between small operators they wait for each other more than they compute,
by a scheduler's time slice each time when other programs want the same cores. Blocks meet once, when all are done.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def map_blocks(compute: Callable[[slice], torch.Tensor], blocks: Sequence[slice]) -> list[torch.Tensor]:
    """`compute` of each block, in order, without gradients, by as many threads as torch may use (`get_num_threads`).

    With one block, or one thread, the calling thread computes, and operators keep the threads they have. Raises what
    `compute` raises.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(blocks) == 1:
        return [_without_gradients(compute, block) for block in blocks]
    pool = _pool(num_threads, os.getpid())
    return list(pool.map(lambda block: _without_gradients(compute, block), blocks))


def _without_gradients(compute: Callable[[slice], torch.Tensor], block: slice) -> torch.Tensor:
    # Whether gradients are recorded is each thread's own affair, and on where a thread begins.
    with torch.no_grad():
        return compute(block)


@cache
def _pool(num_threads: int, process_id: int) -> ThreadPoolExecutor:
    """Threads whose operators run on one thread. A forked process has none of its parent's, hence `process_id`."""
    pool = ThreadPoolExecutor(num_threads, f"hisparse-rows-{process_id}", _compute_alone)
    # The number is kept per thread, but what is set last is also what later threads begin with: so have all of ours
    # set it now, and then put back what it was.
    everyone = threading.Barrier(num_threads)
    list(pool.map(lambda _: everyone.wait(), range(num_threads)))
    torch.set_num_threads(num_threads)
    return pool


def _compute_alone() -> None:
    # A thread takes over the number of all when it first asks, which would undo what was set before.
    torch.get_num_threads()
    torch.set_num_threads(1)
