"""Needle rows are counted once, by the rows that ask, and by where they were read."""

import random

import torch

from hisparse.engine.observer import SeenSelection, StepRows
from hisparse.engine.tokenizer import ByteTokenizer
from hisparse.evaluation.prompts import build_prompt
from hisparse.evaluation.provenance import NeedleRows, NeedleWatch
from hisparse.evaluation.questions import in_tokens

ASKED = in_tokens(build_prompt(["a line\n"] * 20, len, random.Random(0), 200, 1), ByteTokenizer().encode)
FIRST, ASKS = ASKED.needle.start, ASKED.asked_from
SLOT = 3


def watching() -> NeedleWatch:
    watch = NeedleWatch()
    watch.watch("a", ASKED)
    return watch


def seen(query: int, positions: list[int], is_host: list[bool], layer: int = 0, slot: int = SLOT) -> SeenSelection:
    """One row's selection."""
    host = torch.tensor([is_host])
    return SeenSelection(
        layer, torch.tensor([slot]), torch.tensor([query]), torch.tensor([positions]).int(), ~host, host
    )


def test_steps_before_the_question_are_not_asked_for() -> None:
    watch = watching()
    assert not watch.begin_step([StepRows("a", SLOT, 0, ASKS)])
    assert not watch.begin_step([StepRows("b", SLOT, 0, ASKS + 1)])
    assert watch.begin_step([StepRows("b", 0, 0, 500), StepRows("a", SLOT, 0, ASKS + 1)])


def test_a_row_counts_once_for_each_layer_and_from_host_if_it_ever_came_from_there() -> None:
    watch = watching()
    watch.begin_step([StepRows("a", SLOT, ASKS, 2)])
    watch.observe(seen(ASKS, [FIRST, FIRST + 1, 0], [False, True, True]))
    assert watch.rows("a") == NeedleRows(read=2, from_host=1)
    watch.observe(seen(ASKS + 1, [FIRST, FIRST + 1, -1], [True, False, False]))
    assert watch.rows("a") == NeedleRows(read=2, from_host=2)
    watch.observe(seen(ASKS + 1, [FIRST, 0, 1], [False, True, True], layer=1))
    assert watch.rows("a") == NeedleRows(read=3, from_host=2)


def test_other_rows_and_other_requests_do_not_count() -> None:
    watch = watching()
    watch.begin_step([StepRows("a", SLOT, 0, 500)])
    watch.observe(seen(ASKS - 1, [FIRST], [True]))
    watch.observe(seen(ASKS, [FIRST], [True], slot=SLOT + 1))
    watch.observe(seen(ASKS, [FIRST - 1, ASKED.needle.stop], [True, True]))
    assert watch.rows("a") == NeedleRows()
    assert watch.rows("a").share_from_host is None
    # The control: the first of them, one token later.
    watch.observe(seen(ASKS, [FIRST], [True]))
    assert watch.rows("a").share_from_host == 1.0


def test_a_position_that_was_found_nowhere_was_not_read() -> None:
    watch = watching()
    watch.begin_step([StepRows("a", SLOT, 0, 500)])
    selection = seen(ASKS, [FIRST], [True])
    nowhere = torch.zeros(1, 1, dtype=torch.bool)
    watch.observe(SeenSelection(0, selection.slots, selection.query_positions, selection.positions, nowhere, nowhere))
    assert watch.rows("a") == NeedleRows()
