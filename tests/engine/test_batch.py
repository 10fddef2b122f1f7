"""The layout of a step: decode rows first, everything in its place, and nonsense refused."""

import pytest

from hisparse.engine.batch import PrefillSegment, ScheduledTokens, build_batch
from hisparse.errors import InvariantError


def test_decode_rows_come_first_and_each_kind_keeps_its_order() -> None:
    items = [
        ScheduledTokens(3, [10, 11, 12], 5, wants_logits=False, is_decode=False),
        ScheduledTokens(1, [20], 9, wants_logits=True, is_decode=True),
        ScheduledTokens(0, [30], 0, wants_logits=True, is_decode=False),
        ScheduledTokens(2, [40], 7, wants_logits=True, is_decode=True),
    ]
    batch = build_batch(items)
    assert batch.token_ids.tolist() == [20, 40, 10, 11, 12, 30]
    assert batch.positions.tolist() == [9, 7, 5, 6, 7, 0]
    assert batch.slots.tolist() == [1, 2, 3, 3, 3, 0]
    assert batch.num_decode == 2
    assert batch.segments == (PrefillSegment(2, 3, 3, 8), PrefillSegment(5, 1, 0, 1))


def test_logit_rows_are_last_tokens_and_name_the_item_they_belong_to() -> None:
    items = [
        ScheduledTokens(3, [10, 11, 12], 5, wants_logits=True, is_decode=False),
        ScheduledTokens(0, [30, 31], 0, wants_logits=False, is_decode=False),
        ScheduledTokens(1, [20], 9, wants_logits=True, is_decode=True),
    ]
    batch = build_batch(items)
    assert batch.logit_rows.tolist() == [0, 3]
    assert batch.logit_items == (2, 0)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "without tokens"),
        ([ScheduledTokens(0, [], 0, True, False)], "slot 0: 0 tokens"),
        ([ScheduledTokens(4, [1, 2], 3, True, True)], "slot 4: a decode row"),
        ([ScheduledTokens(4, [1], 0, True, True)], "slot 4: a decode row"),
        ([ScheduledTokens(5, [1], 3, True, True), ScheduledTokens(5, [1], 4, True, False)], "slot 5 appears twice"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(items: list[ScheduledTokens], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        build_batch(items)
