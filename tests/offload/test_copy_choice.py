"""Small aligned fragments go to the kernel, large ones to the copy engine, and the measured rates say where."""

import pytest

from hisparse.offload.copy_choice import KERNEL_BLOCKS, CopyMethod, choose_method, kernel_blocks, word_bytes

BATCH_GBPS = {256: 0.9, 512: 1.8, 2048: 16, 4096: 34, 16384: 33, 32768: 51.4, 65536: 54}
KERNEL_GBPS = 50.0


@pytest.mark.parametrize(
    ("numbers", "word"), [((16, 32), 16), ((24, 48), 8), ((656, 20), 4), ((6, 1024), 2), ((7,), 1), ((0, 4096), 16)]
)
def test_the_word_divides_everything(numbers: tuple[int, ...], word: int) -> None:
    assert word_bytes(*numbers) == word


@pytest.mark.parametrize("size", BATCH_GBPS)
def test_aligned_fragments_take_what_was_measured_to_be_as_fast_or_faster(size: int) -> None:
    chosen = {CopyMethod.BATCH: BATCH_GBPS[size], CopyMethod.KERNEL: KERNEL_GBPS}[choose_method(size, 4096)]
    assert chosen >= 0.98 * max(BATCH_GBPS[size], KERNEL_GBPS)
    assert chosen >= 48


def test_the_less_is_aligned_the_sooner_the_copy_engine_takes_over() -> None:
    def first_batch(alignment: int) -> int:
        sizes = [1 << power for power in range(4, 21)]
        return next(size for size in sizes if choose_method(size, alignment) is CopyMethod.BATCH)

    assert [first_batch(alignment) for alignment in (16, 8, 4, 2, 1)] == [32768, 32768, 8192, 4096, 2048]
    assert choose_method(1 << 20, 1) is CopyMethod.BATCH


def test_the_size_of_a_fragment_limits_the_word_as_its_address_does() -> None:
    assert choose_method(8192 + 4, 16) is CopyMethod.BATCH
    assert choose_method(8192 + 16, 16) is CopyMethod.KERNEL


def test_blocks_are_as_many_as_fill_the_link_and_no_more_than_there_is_work_for() -> None:
    assert kernel_blocks(1) == 1
    assert kernel_blocks(1025) == 2
    assert kernel_blocks(1 << 30) == KERNEL_BLOCKS
