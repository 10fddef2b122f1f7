"""What the copy kernel is told copies a page once and whole; each run goes to the method of its size and alignment."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import BackendError
from hisparse.kernels.cuda import arguments, compiler
from hisparse.kernels.cuda.arguments import MAX_RUNS, CopyArgs
from hisparse.kernels.cuda.parameters import Specialization
from hisparse.offload.copy_choice import KERNEL_THREADS
from hisparse.offload.copy_kernel import kernel_arguments, pages_per_launch, run_alignment, split_runs
from hisparse.offload.layout import Run
from hisparse.offload.sharding import Topology
from tests.offload.logical_kv import FORMS, PageForm

COPY = Specialization("copy_pages", KERNEL_THREADS)


def launch(args: CopyArgs, sources: list[np.ndarray], destinations: list[np.ndarray]) -> None:
    """What the kernel does, word by word, for pages that are arrays of bytes."""
    for source, destination in zip(sources, destinations, strict=True):
        for index in range(args.words_per_page):
            run = 0
            while run + 1 < args.num_runs and index >= args.runs[run + 1].first_word:
                run += 1
            found = args.runs[run]
            piece, word = divmod(index - found.first_word, found.words_per_piece)
            start = found.source_offset + piece * found.source_stride + word * args.word_bytes
            to = found.destination_offset + piece * found.destination_stride + word * args.word_bytes
            assert (destination[to : to + args.word_bytes] == 0).all(), "a byte is written twice"
            destination[to : to + args.word_bytes] = source[start : start + args.word_bytes]


@pytest.mark.parametrize("alignment", [1, 4, 4096])
@pytest.mark.parametrize("form", FORMS)
def test_launches_copy_all_of_a_page_in_both_directions(form: str, alignment: int) -> None:
    pages = PageForm(form, 4, 24, 4)
    logical = pages.logical(1) | 1  # no byte is zero
    for rank in Topology(2).ranks():
        runs = pages.mapping(0, rank).runs
        split = split_runs(runs, alignment)
        assert not split.batch, "fragments as small as these are the kernel's"
        stored, loaded = np.zeros(pages.page_bytes, dtype=np.uint8), np.zeros_like(pages.local(logical, rank))
        for word, part in split.kernel:
            launch(kernel_arguments(part, word, to_region=True), [pages.local(logical, rank)], [stored])
            launch(kernel_arguments(part, word, to_region=False), [pages.canonical(logical)], [loaded])
        assert np.array_equal(loaded, pages.local(logical, rank))
        own = stored != 0
        assert own.sum() == len(loaded)
        assert np.array_equal(stored[own], pages.canonical(logical)[own])


RUNS = st.builds(
    Run,
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
    st.integers(1, 1 << 20),
    st.integers(1, 100),
    st.integers(1 << 20, 1 << 21),
    st.integers(1 << 20, 1 << 21),
)


@given(st.lists(RUNS, min_size=1, max_size=80), st.sampled_from([1, 2, 8, 16, 4096]))
def test_every_run_is_copied_by_one_method_and_words_divide_all_of_it(runs: list[Run], alignment: int) -> None:
    split = split_runs(runs, alignment)
    by_kernel = [run for _, part in split.kernel for run in part]
    assert sorted(map(repr, [*split.batch, *by_kernel])) == sorted(map(repr, runs))
    for word, part in split.kernel:
        assert 1 <= len(part) <= MAX_RUNS
        args = kernel_arguments(part, word, to_region=True)
        assert args.words_per_page * word == sum(run.size * run.count for run in part)
        for run in part:
            assert run.size % word == run.local_offset % word == run.canonical_offset % word == alignment % word == 0
            assert run.count == 1 or run.local_stride % word == run.canonical_stride % word == 0


def test_the_strides_of_a_single_piece_do_not_count() -> None:
    assert run_alignment(Run(0, 16, 32, 1, 3, 5), 4096) == 16
    assert run_alignment(Run(0, 16, 32, 2, 32, 36), 4096) == 4


def test_large_and_small_runs_of_one_page_are_told_apart() -> None:
    large, small = Run(0, 0, 1 << 16, 2, 1 << 16, 1 << 17), Run(1 << 17, 1 << 18, 256, 8, 256, 512)
    split = split_runs([large, small], 4096)
    assert split.batch == (large,)
    assert split.kernel == ((16, (small,)),)


def test_words_of_a_launch_fit_32_bits() -> None:
    args = kernel_arguments([Run(0, 0, 4096, 1, 0, 0)], 1, to_region=True)
    assert pages_per_launch(args) * args.words_per_page < 1 << 32
    assert (pages_per_launch(args) + 1) * args.words_per_page >= 1 << 32


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES, ids=str)
def test_the_kernel_compiles_for_every_architecture(arch: tuple[int, int], tmp_path: Path) -> None:
    assert compiler.compile_kernel(COPY, arch, tmp_path).startswith(b"\x7fELF")


def test_arguments_that_differ_from_the_kernels_do_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict(arguments.size_macros())
    assert sizes["COPY_ARGS_BYTES"] == str(ctypes.sizeof(CopyArgs))
    sizes["COPY_ARGS_BYTES"] = str(ctypes.sizeof(CopyArgs) + 8)
    monkeypatch.setattr(compiler, "size_macros", lambda: tuple(sizes.items()))
    with pytest.raises(BackendError, match=r"CopyArgs differs from arguments\.py"):
        compiler.compile_kernel(COPY, (9, 0), tmp_path)
