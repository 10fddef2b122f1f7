"""Prompts hide the facts they ask for, and their text is cut into tokens as training sequences are."""

import random
from typing import Any

import pytest

from hisparse.evaluation.prompts import (
    NAMES,
    build_prompt,
    draw_value,
    fact_line,
    library_files,
    question,
    read_sources,
    take_lines,
)
from tools.finder.vocabulary import FactTokens, train_tokenizer

LINES = [f"line {number}\n" for number in range(200)]


def words(text: str) -> int:
    return len(text.split())


def test_the_asked_fact_stands_in_the_text_and_the_answer_does_not_follow_the_question() -> None:
    rng = random.Random(0)
    for num_keys in (1, 4, 16):
        prompt = build_prompt(LINES, words, rng, 300, num_keys)
        assert prompt.text.endswith(question(prompt.name))
        assert prompt.text.count("# the key of ") == num_keys + 1
        told = next(line for line in prompt.text.splitlines() if line.startswith(question(prompt.name) + " "))
        assert told == question(prompt.name) + prompt.answer


def test_a_prompt_fills_its_room_and_no_more() -> None:
    rng = random.Random(1)
    sizes = [build_prompt(LINES, words, rng, 300, 4).num_tokens for _ in range(20)]
    assert max(sizes) <= 300
    assert min(sizes) >= 296


def test_facts_stand_anywhere() -> None:
    rng = random.Random(2)
    depths = [build_prompt(LINES, words, rng, 300, 1).depth for _ in range(200)]
    assert min(depths) < 0.1
    assert max(depths) > 0.9


def test_facts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        build_prompt(LINES, words, random.Random(0), 20, 4)


def test_lines_are_consecutive_and_a_line_that_is_too_long_is_left_out() -> None:
    lines = ["a\n", "b b b b b b b b b\n", "c\n", "d\n"]
    assert take_lines(lines, words, 0, 3) == ["a\n", "c\n", "d\n"]
    assert take_lines(lines, words, 3, 2) == ["d\n", "a\n"]


def test_training_and_evaluation_share_no_file() -> None:
    training, held_out = set(library_files(held_out=False)), set(library_files(held_out=True))
    assert training
    assert held_out
    assert not training & held_out
    assert len(held_out) < len(training) / 10


def test_values_have_five_digits() -> None:
    rng = random.Random(0)
    assert all(len(str(draw_value(rng))) == 5 for _ in range(1000))


def test_every_name_and_digit_is_one_token(tokenizer: Any) -> None:
    for name in NAMES:
        assert len(tokenizer.encode(f" {name}").ids) == 1
    assert len(tokenizer.encode(" 48213").ids) == 5
    # The control: a word that is no name takes several.
    assert len(tokenizer.encode(" hippopotamus").ids) > 1


def test_the_tokens_of_a_text_are_those_of_its_lines(tokenizer: Any) -> None:
    for text in read_sources(library_files(held_out=True), 100_000, random.Random(0)):
        lines = [token for line in text.splitlines(keepends=True) for token in tokenizer.encode(line).ids]
        assert tokenizer.encode(text).ids == lines
    # The control: cut elsewhere, text gives other tokens.
    assert tokenizer.encode("import").ids != tokenizer.encode("imp").ids + tokenizer.encode("ort").ids


def test_tokens_give_their_text_back(tokenizer: Any) -> None:
    text = 'def f(x):\n\treturn "é\u20ac" + x[10:]  # the key of lantern is 48213\n\n'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_fact_line_is_cut_as_training_writes_it(tokenizer: Any) -> None:
    facts = FactTokens.of(tokenizer)
    assert tokenizer.encode(fact_line(NAMES[7], 90210)).ids == facts.fact(7, 90210).tolist()


def test_a_vocabulary_that_is_too_small_for_the_names_is_refused(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="not one"):
        train_tokenizer(texts[:2], 300)
