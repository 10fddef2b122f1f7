"""Training sequences: real lines of source with facts among them and as many questions. Numpy only.

Many questions per sequence make looking up a name what lowers the loss from the first step on; one question per
sequence teaches a small model to copy digits and to guess among names. Each question is about any of the facts: were
each asked for once, leaving out those already asked for would do half of the work, and that is learned instead.
"""

from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from hisparse.evaluation.prompts import NAMES, VALUE_DIGITS
from tools.finder.vocabulary import FactTokens

TEXT, FIRST_DIGIT, LATER_DIGIT, FACT_VALUE = 0, 1, 2, 3
"""What a token is as a target: text, an answer's digits, or the value of a fact, which nothing before it tells."""

FACT_COUNTS = (1, 2, 4, 8, 16, 32, 64)
SCATTERED = 0.3
"""Share of the sequences whose questions stand anywhere after their facts; in the others they end the sequence."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of all training files in one row, uint16 `[tokens]`, and the places where a line ends, int64 `[lines]`.

    `line_ends` are offsets of the token after a newline.
    """

    tokens: np.ndarray
    line_ends: np.ndarray

    @classmethod
    def of(cls, tokens: np.ndarray, newline: int) -> "Corpus":
        """Find the line ends of `tokens`."""
        return cls(tokens.astype(np.uint16), np.flatnonzero(tokens == newline) + 1)

    def save(self, path: Path) -> None:
        """Write to `path` (.npy of the tokens) and beside it the line ends, for other processes to map."""
        np.save(path, self.tokens)
        np.save(path.with_suffix(".lines.npy"), self.line_ends)

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        """Map what `save` wrote."""
        return cls(np.load(path, mmap_mode="r"), np.load(path.with_suffix(".lines.npy"), mmap_mode="r"))


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` int32 `[batch, length + 1]` and what each is as a target, `kinds` uint8 of the same shape."""

    tokens: np.ndarray
    kinds: np.ndarray


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """What a batch shall be. The same order gives the same batch. `seed` is the run's, `index` the batch's own."""

    seed: int
    index: int
    size: int
    length: int


@dataclass(frozen=True, slots=True)
class SequenceBuilder:
    """Builds sequences from a corpus. Every draw comes from the order's seed."""

    corpus: Corpus
    facts: FactTokens

    def batch(self, order: BatchOrder) -> Batch:
        """`size` sequences of `length + 1` tokens."""
        rng = np.random.default_rng((order.seed, order.index, order.length))
        rows = [self.sequence(rng, order.length + 1) for _ in range(order.size)]
        return Batch(np.stack([tokens for tokens, _ in rows]), np.stack([kinds for _, kinds in rows]))

    def sequence(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """One sequence of `length` tokens and their kinds. It ends with a question and its answer.

        Facts and questions stand at line breaks of the filler. A question comes after its fact; some facts are asked
        for several times and some never.
        """
        num = self._num_facts(rng, length)
        filler, breaks = self._filler(rng, length - 2 * num * self.facts.fact_length)
        told = rng.choice(breaks, num)
        about = rng.integers(0, num, num)
        asked = np.full(num, len(filler))
        if rng.random() < SCATTERED:
            later = [breaks[np.searchsorted(breaks, place) :] for place in told[about[1:]]]
            asked[1:] = [rng.choice(places) for places in later]
        # At one break facts come before questions, and among themselves in any order.
        places = np.concatenate([told, asked])
        is_question = np.repeat([False, True], num)
        order = np.lexsort((rng.random(2 * num), is_question, places))
        lines = self._lines(rng, num)
        lines += [lines[index] for index in about]
        return self._join(filler, [(int(places[i]), bool(is_question[i]), lines[i]) for i in order])

    def _num_facts(self, rng: np.random.Generator, length: int) -> int:
        most = max(1, length // (2 * self.facts.fact_length + 4))
        choices = [count for count in FACT_COUNTS if count <= most]
        # Large counts are where look-up is learned; the small ones stay in, because they are asked for too.
        weights = np.arange(1, len(choices) + 1, dtype=np.float64)
        return int(rng.choice(choices, p=weights / weights.sum()))

    def _lines(self, rng: np.random.Generator, num: int) -> list[np.ndarray]:
        names = rng.permutation(len(NAMES))[:num]
        values = rng.integers(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS, num)
        return [self.facts.fact(int(name), int(value)) for name, value in zip(names, values, strict=True)]

    def _filler(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`length` tokens that end with a line, and the offsets of the breaks between and after lines, ascending."""
        ends = self.corpus.line_ends
        first = int(np.searchsorted(ends, length))
        end = int(ends[rng.integers(first, len(ends))])
        inside = ends[np.searchsorted(ends, end - length) : np.searchsorted(ends, end)]
        return self.corpus.tokens[end - length : end], np.append(inside, end) - (end - length)

    def _join(self, filler: np.ndarray, inserts: list[tuple[int, bool, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        value = slice(self.facts.value_start, self.facts.value_start + VALUE_DIGITS)
        kinds_of = {False: np.zeros(self.facts.fact_length, np.uint8), True: np.zeros(self.facts.fact_length, np.uint8)}
        kinds_of[False][value] = FACT_VALUE
        kinds_of[True][value] = LATER_DIGIT
        kinds_of[True][value.start] = FIRST_DIGIT
        tokens, kinds, done = [], [], 0
        for place, is_question, line in inserts:
            tokens += [filler[done:place], line]
            kinds += [np.zeros(place - done, np.uint8), kinds_of[is_question]]
            done = place
        return np.concatenate([*tokens, filler[done:]]).astype(np.int32), np.concatenate(
            [*kinds, np.zeros(len(filler) - done, np.uint8)]
        )


class Feeder:
    """Batches in the order they are asked for, made ahead by other processes (or here, with no workers).

    The caller says which orders come next; what was made ahead for others is dropped.
    """

    def __init__(self, builder: SequenceBuilder, corpus_path: Path, num_workers: int, ahead: int = 24) -> None:
        """`corpus_path` is where `builder.corpus` is saved, for the processes to map."""
        self._builder = builder
        self._ahead = ahead
        self._pending: deque[tuple[BatchOrder, Future[Batch]]] = deque()
        self._pool: ProcessPoolExecutor | None = None
        if num_workers:
            self._pool = ProcessPoolExecutor(
                num_workers, get_context("spawn"), _open_corpus, (corpus_path, builder.facts)
            )

    def take(self, orders: list[BatchOrder]) -> Batch:
        """The batch of `orders[0]`; the others are what will probably be asked for next."""
        if self._pool is None:
            return self._builder.batch(orders[0])
        while self._pending and self._pending[0][0] != orders[0]:
            self._pending.popleft()[1].cancel()
        for order in orders[len(self._pending) : self._ahead]:
            self._pending.append((order, self._pool.submit(_build, order)))
        return self._pending.popleft()[1].result()

    def close(self) -> None:
        """Stop the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


_worker_builder: list[SequenceBuilder] = []
"""One builder per process, set when the process starts."""


def _open_corpus(path: Path, facts: FactTokens) -> None:
    _worker_builder[:] = [SequenceBuilder(Corpus.load(path), facts)]


def _build(order: BatchOrder) -> Batch:
    return _worker_builder[0].batch(order)
