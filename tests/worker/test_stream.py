"""The CPU's stream: copies are late, in order, and seen to be done later still."""

import pytest
import torch

from hisparse.errors import InputError
from hisparse.geometry import RowFormat, device_blocks
from hisparse.worker import BlockCopies, CopyDelay, CpuStream, PagedCacheView
from hisparse.worker.views import all_layers

GEOMETRY = device_blocks(RowFormat("float32", 16), num_layers=1, block_size=1)
NUM_BLOCKS = 8


class Bench:
    """Two allocations of one-row blocks, and copies between them."""

    def __init__(self, delay: CopyDelay) -> None:
        self.stream = CpuStream(delay)
        layout = all_layers(GEOMETRY, NUM_BLOCKS)
        self.source, self.destination = (
            PagedCacheView.over(torch.zeros(NUM_BLOCKS * 16, dtype=torch.uint8), layout) for _ in range(2)
        )
        for block in range(1, NUM_BLOCKS):
            self.source.write(torch.tensor([block]), torch.full((1, 4), float(block)))

    def copies(self, source: int, destination: int, *, back: bool = False) -> BlockCopies:
        ends = (self.destination, self.source) if back else (self.source, self.destination)
        return BlockCopies(*ends, torch.tensor([source]), torch.tensor([destination]))

    def at(self, block: int) -> float:
        return float(self.destination.read(torch.tensor(block), torch.float32)[0])


def test_without_delay_a_copy_happens_and_is_seen_at_the_next_poll_not_before() -> None:
    bench = Bench(CopyDelay())
    event = bench.stream.submit(bench.copies(3, 1))
    assert bench.at(1) == 0.0
    assert event.query()
    assert bench.at(1) == 3.0


def test_bytes_move_late_and_completion_is_seen_later_still() -> None:
    stages = set()
    for seed in range(20):
        bench = Bench(CopyDelay(seed, max_polls=3))
        event = bench.stream.submit(bench.copies(3, 1))
        for _ in range(1 + 2 * 3):
            done = event.query()
            stages.add((bench.at(1) == 3.0, done))
            assert bench.at(1) in (0.0, 3.0)
        assert done, "the delay is bounded"
    assert stages == {(False, False), (True, False), (True, True)}


def test_an_event_that_is_done_stays_done() -> None:
    bench = Bench(CopyDelay(seed=5, max_polls=2))
    event = bench.stream.submit(bench.copies(3, 1))
    answers = [event.query() for _ in range(10)]
    assert answers == sorted(answers)
    assert answers[-1]


def test_ordering_moves_the_bytes_of_all_copies_and_completes_none() -> None:
    bench = Bench(CopyDelay(seed=1, max_polls=50))
    events = [bench.stream.submit(bench.copies(block, block + 1)) for block in (3, 5)]
    bench.stream.order_before_compute()
    assert (bench.at(4), bench.at(6)) == (3.0, 5.0)
    assert bench.stream.num_outstanding == 0
    assert not any(event.query() for event in events)


def test_a_later_copy_never_overtakes_an_earlier_one() -> None:
    bench = Bench(CopyDelay(seed=2, max_polls=50))
    bench.stream.submit(bench.copies(3, 1))
    last = bench.stream.submit(bench.copies(1, 7, back=True))
    last.wait()
    # The second copy read what the first one wrote.
    assert float(bench.source.read(torch.tensor(7), torch.float32)[0]) == 3.0


def test_waiting_for_one_copy_leaves_later_ones_outstanding() -> None:
    bench = Bench(CopyDelay(seed=2, max_polls=50))
    first, second = (bench.stream.submit(bench.copies(block, block)) for block in (3, 4))
    first.wait()
    assert first.query()
    assert (bench.at(3), bench.at(4)) == (3.0, 0.0)
    bench.stream.synchronize()
    assert bench.at(4) == 4.0
    assert second.query()


def delays(seed: int) -> list[int]:
    bench = Bench(CopyDelay(seed, max_polls=30))
    counts = []
    for block in range(1, NUM_BLOCKS):
        event = bench.stream.submit(bench.copies(block, block))
        counts.append(next(polls for polls in range(1, 100) if event.query()))
    return counts


def test_a_seed_repeats_its_delays_and_another_has_others() -> None:
    assert delays(7) == delays(7)
    assert delays(7) != delays(8)


def test_a_negative_delay_is_refused() -> None:
    with pytest.raises(InputError, match="-1 polls"):
        CopyDelay(max_polls=-1)
