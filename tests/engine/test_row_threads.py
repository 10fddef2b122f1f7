"""Blocks are computed in order, each on one thread, and callers' threads are left as they were."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from hisparse.engine.row_threads import map_blocks

BLOCKS = [slice(start, start + 3) for start in range(0, 30, 3)]


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """Torch on three threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_results_are_in_the_order_of_blocks() -> None:
    values = torch.arange(30)
    assert torch.equal(torch.cat(map_blocks(lambda block: values[block] * 2, BLOCKS)), values * 2)


def test_blocks_run_beside_each_other_and_their_operators_on_one_thread() -> None:
    together = threading.Barrier(3, timeout=20)

    def compute(_: slice) -> torch.Tensor:
        together.wait()
        return torch.tensor([torch.get_num_threads(), int(threading.current_thread() is threading.main_thread())])

    assert torch.stack(map_blocks(compute, BLOCKS[:3])).tolist() == [[1, 0]] * 3


def test_other_threads_keep_their_number() -> None:
    map_blocks(lambda block: torch.zeros(1), BLOCKS)
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (torch.get_num_threads(), later) == (3, [3])


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_nothing_is_recorded_for_gradients(num_blocks: int) -> None:
    weight = torch.ones(30, requires_grad=True)
    assert not any(part.requires_grad for part in map_blocks(lambda block: weight[block] * 2, BLOCKS[:num_blocks]))
    assert (weight[BLOCKS[0]] * 2).requires_grad


def test_one_block_or_one_thread_is_the_caller_s_own_work() -> None:
    def compute(_: slice) -> torch.Tensor:
        return torch.tensor(threading.get_ident())

    own = threading.get_ident()
    assert int(map_blocks(compute, BLOCKS[:1])[0]) == own
    assert all(int(ident) != own for ident in map_blocks(compute, BLOCKS))
    torch.set_num_threads(1)
    assert {int(ident) for ident in map_blocks(compute, BLOCKS)} == {own}


def test_an_error_in_a_block_reaches_the_caller() -> None:
    def fail(block: slice) -> torch.Tensor:
        raise ValueError(f"block {block.start}")

    with pytest.raises(ValueError, match="block 0"):
        map_blocks(fail, BLOCKS)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    map_blocks(lambda block: torch.zeros(1), BLOCKS)
    child = os.fork()
    if child == 0:
        # Waiting for threads that were not forked would have no end.
        signal.alarm(20)
        done = len(map_blocks(lambda block: torch.tensor(block.start), BLOCKS)) == len(BLOCKS)
        os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
