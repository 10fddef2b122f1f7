"""Positions of needle and question are those of their tokens."""

import random

import pytest

from hisparse.engine import LoadedModel
from hisparse.engine.tokenizer import ByteTokenizer
from hisparse.errors import InputError
from hisparse.evaluation.prompts import build_prompt, question
from hisparse.evaluation.questions import Question, QuestionSet, common_length, in_tokens
from tests.evaluation.conftest import CONTEXT


def test_the_needle_is_where_the_answer_is_told(questions: list[Question], loaded: LoadedModel) -> None:
    for asked in questions:
        told = asked.ids[asked.needle.start : asked.needle.stop]
        assert loaded.tokenizer.decode(told) == asked.prompt.answer
        assert len(told) == asked.answer_tokens == 5
        assert loaded.tokenizer.decode(asked.ids[asked.asked_from :]) == question(asked.prompt.name)
        assert len(asked.ids) + asked.answer_tokens <= CONTEXT


def test_bytes_are_tokens_too() -> None:
    prompt = build_prompt(["a line\n"] * 50, len, random.Random(0), 400, 2)
    asked = in_tokens(prompt, ByteTokenizer().encode)
    assert bytes(asked.ids[asked.needle.start : asked.needle.stop]).decode() == prompt.answer
    assert asked.asked_from == prompt.question_start


def test_the_token_around_a_place_counts_as_behind_it() -> None:
    prompt = build_prompt(["a line\n"] * 50, len, random.Random(0), 400, 1)

    def in_threes(text: str) -> list[int]:
        return [hash(text[start : start + 3]) for start in range(0, len(text), 3)]

    needle = in_tokens(prompt, in_threes).needle
    assert (needle.start, needle.stop) == (prompt.needle.start // 3, prompt.needle.stop // 3)


@pytest.mark.parametrize(
    ("said", "is_right"),
    [
        (" {}", True),
        ("{}\n", True),
        (" {}1", False),
        (" {:.4}", False),
        ("", False),
        ("is {}", False),
    ],
)
def test_an_answer_is_all_of_the_value_and_no_more(said: str, is_right: bool) -> None:
    prompt = build_prompt(["a line\n"], len, random.Random(0), 100, 1)
    asked = in_tokens(prompt, ByteTokenizer().encode)
    assert asked.is_answered_by(said.format(prompt.answer.strip())) is is_right


def test_facts_that_do_not_fit_are_bad_input(loaded: LoadedModel) -> None:
    with pytest.raises(InputError, match="prompts of 40 tokens cannot be made: 16 facts"):
        QuestionSet((40,), 16, 1, seed=0).questions(loaded.tokenizer.encode)


def test_common_length_ends_at_the_first_difference() -> None:
    assert common_length([1, 2, 3], [1, 2, 4, 3]) == 2
    assert common_length([1], [1, 2]) == 1
    assert common_length([], [1]) == 0
