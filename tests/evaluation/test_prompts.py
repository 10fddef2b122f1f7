"""A prompt says where its needle and its question are, and a source repeats itself."""

import random

import pytest

from hisparse.evaluation.prompts import PromptSource, build_prompt, question

LINES = [f"line {number}\n" for number in range(200)]


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("num_keys", [1, 4, 16])
def test_the_needle_is_the_answer_in_the_asked_line(num_keys: int) -> None:
    prompt = build_prompt(LINES, words, random.Random(0), 300, num_keys)
    before, told = prompt.text[: prompt.needle.start], prompt.text[prompt.needle]
    assert told == prompt.answer
    assert before.endswith(question(prompt.name))
    assert prompt.text[prompt.needle.stop] == "\n"
    assert prompt.text[prompt.question_start :] == question(prompt.name)
    assert prompt.needle.stop < prompt.question_start


def test_a_source_gives_the_same_prompts_again_and_others_for_another_seed() -> None:
    first = PromptSource(words, 0).prompts(300, 4, 3)
    assert first == PromptSource(words, 0).prompts(300, 4, 3)
    assert first != PromptSource(words, 1).prompts(300, 4, 3)
    assert len({prompt.text for prompt in first}) == 3
