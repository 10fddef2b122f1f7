"""What the copy kernel is told: the runs of a page in words. Numbers only; nothing here needs a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hisparse.kernels.cuda.arguments import MAX_RUNS, CopyArgs, CopyRun
from hisparse.offload.copy_choice import CopyMethod, choose_method, word_bytes
from hisparse.offload.layout import Run

_MAX_WORDS = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class SplitRuns:
    """A mapping's runs by how they are copied. `kernel`: what one launch takes, by the words that it moves."""

    batch: tuple[Run, ...]
    kernel: tuple[tuple[int, tuple[Run, ...]], ...]


def split_runs(runs: Sequence[Run], alignment: int) -> SplitRuns:
    """How to copy pages whose addresses are multiples of `alignment`."""
    batch: list[Run] = []
    by_word: dict[int, list[Run]] = {}
    for run in runs:
        aligned = run_alignment(run, alignment)
        if choose_method(run.size, aligned) is CopyMethod.BATCH:
            batch.append(run)
        else:
            by_word.setdefault(word_bytes(run.size, aligned), []).append(run)
    launches = tuple((word, tuple(part)) for word in sorted(by_word) for part in _parts(by_word[word]))
    return SplitRuns(tuple(batch), launches)


def run_alignment(run: Run, alignment: int) -> int:
    """What divides the address of every piece of a run, at both ends, where `alignment` divides those of its page."""
    strides = (run.local_stride, run.canonical_stride) if run.count > 1 else ()
    return word_bytes(alignment, run.local_offset, run.canonical_offset, *strides)


def _parts(runs: list[Run]) -> Iterator[tuple[Run, ...]]:
    """Runs that one launch takes: at most `MAX_RUNS`."""
    for start in range(0, len(runs), MAX_RUNS):
        yield tuple(runs[start : start + MAX_RUNS])


def kernel_arguments(runs: Sequence[Run], word: int, to_region: bool) -> CopyArgs:
    """The arguments of a launch but for its pages. `word`: bytes, a divisor of everything in `runs`."""
    arguments = CopyArgs(num_runs=len(runs), word_bytes=word)
    words = 0
    for index, run in enumerate(runs):
        local, canonical = (run.local_offset, run.local_stride), (run.canonical_offset, run.canonical_stride)
        source, destination = (local, canonical) if to_region else (canonical, local)
        arguments.runs[index] = CopyRun(source[0], destination[0], source[1], destination[1], words, run.size // word)
        words += run.count * run.size // word
    arguments.words_per_page = words
    return arguments


def pages_per_launch(arguments: CopyArgs) -> int:
    """As many as 32 bits count the words of."""
    return int(_MAX_WORDS // arguments.words_per_page)
