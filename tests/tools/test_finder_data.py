"""Training sequences ask for what they told before."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tools.finder.data import (
    FACT_VALUE,
    FIRST_DIGIT,
    LATER_DIGIT,
    TEXT,
    Batch,
    BatchOrder,
    Corpus,
    Feeder,
    SequenceBuilder,
)
from tools.finder.schedule import FULL

LENGTH = 384


def test_every_question_is_about_a_fact_told_before(builder: SequenceBuilder, tokenizer: Any) -> None:
    asked_never = asked_often = 0
    for row, kinds in zip(*columns(builder.batch(BatchOrder(0, 0, 16, LENGTH))), strict=True):
        told: dict[str, str] = {}
        asked: list[str] = []
        ends = np.flatnonzero(row == builder.facts.newline) + 1
        for first, last in pairwise(ends):
            line = tokenizer.decode(row[first:last].tolist())
            if FACT_VALUE in kinds[first:last]:
                assert line.split()[4] not in told
                told[line.split()[4]] = line
            elif FIRST_DIGIT in kinds[first:last]:
                assert told[line.split()[4]] == line
                asked.append(line)
        assert len(asked) == len(told) > 0
        assert ends[-1] == len(row)
        asked_never += len(set(told.values()) - set(asked))
        asked_often += len(asked) - len(set(asked))
    assert asked_never == asked_often > 0


def columns(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    return batch.tokens, batch.kinds


def test_kinds_mark_the_digits(builder: SequenceBuilder) -> None:
    batch = builder.batch(BatchOrder(0, 1, 16, LENGTH))
    facts = builder.facts
    first, later = np.isin(batch.tokens, facts.first_digits), np.isin(batch.tokens, facts.digits)
    assert first[batch.kinds == FIRST_DIGIT].all()
    assert later[batch.kinds == LATER_DIGIT].all()
    assert (first | later)[batch.kinds == FACT_VALUE].all()
    # As many digits are told as are asked for, and text is most of a sequence.
    answers = np.isin(batch.kinds, (FIRST_DIGIT, LATER_DIGIT)).sum()
    assert (batch.kinds == FACT_VALUE).sum() == answers > 0
    assert (batch.kinds == TEXT).mean() > 0.7


def test_training_sequences_are_what_their_text_is_cut_into(builder: SequenceBuilder, tokenizer: Any) -> None:
    for row in builder.batch(BatchOrder(0, 2, 16, LENGTH)).tokens:
        # The first line may begin in the middle; from the second on, text and tokens say the same.
        whole = row[np.flatnonzero(row == builder.facts.newline)[0] + 1 :]
        assert tokenizer.encode(tokenizer.decode(whole.tolist())).ids == whole.tolist()


def test_the_same_order_gives_the_same_batch_and_another_does_not(builder: SequenceBuilder) -> None:
    order = BatchOrder(3, 5, 4, LENGTH)
    once, again = builder.batch(order), builder.batch(order)
    assert np.array_equal(once.tokens, again.tokens)
    assert not np.array_equal(once.tokens, builder.batch(BatchOrder(4, 5, 4, LENGTH)).tokens)
    assert not np.array_equal(once.tokens, builder.batch(BatchOrder(3, 6, 4, LENGTH)).tokens)


def test_other_processes_make_the_same_batches(builder: SequenceBuilder, tmp_path: Path) -> None:
    path = tmp_path / "corpus.npy"
    builder.corpus.save(path)
    assert np.array_equal(Corpus.load(path).line_ends, builder.corpus.line_ends)
    stage = FULL.stages[0]
    feeder = Feeder(builder, path, num_workers=1, ahead=3)
    try:
        for first in (0, 1, 7):
            orders = [BatchOrder(1, index, 2, LENGTH) for index in range(first, first + 4)]
            assert np.array_equal(feeder.take(orders).tokens, builder.batch(orders[0]).tokens)
    finally:
        feeder.close()
    assert stage.orders(1, 4, 2)[0] == BatchOrder(1, 4, stage.mix(4).size, stage.mix(4).length)
