"""Prompts as an engine takes them: tokens, and where among them the needle and the question are."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from hisparse.errors import InputError
from hisparse.evaluation.prompts import EXAMPLE_ANSWER, FinderPrompt, PromptSource

Encode = Callable[[str], list[int]]
"""From a text to its token ids."""


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt in tokens.

    `needle`: the positions of the answer where the text tells it. `asked_from`: the position at which the question
    begins. `answer_tokens`: how many tokens an answer takes.
    """

    prompt: FinderPrompt
    ids: tuple[int, ...]
    needle: range
    asked_from: int
    answer_tokens: int

    def is_answered_by(self, text: str) -> bool:
        """Whether `text`, which a model wrote, begins with the value that was asked for, all of it and no more."""
        said = re.match(r"\s*(\d+)", text)
        return said is not None and said.group(1) == self.prompt.answer.strip()


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """What to ask: for each of `contexts` (tokens of a prompt, its answer included), `num_prompts` prompts.

    Each has `num_keys` facts, of which one is asked for. `seed` decides the text, the names and the values.
    """

    contexts: tuple[int, ...]
    num_keys: int
    num_prompts: int
    seed: int

    def questions(self, encode: Encode) -> dict[int, list[Question]]:
        """The questions of each context. Raises `InputError` for a context that does not hold that many facts."""
        source = PromptSource(lambda text: len(encode(text)), self.seed)
        asked: dict[int, list[Question]] = {}
        for context in self.contexts:
            try:
                prompts = source.prompts(context, self.num_keys, self.num_prompts)
            except ValueError as error:
                raise InputError(f"prompts of {context} tokens cannot be made: {error}") from error
            asked[context] = [in_tokens(prompt, encode) for prompt in prompts]
        return asked


def in_tokens(prompt: FinderPrompt, encode: Encode) -> Question:
    """Cut a prompt into tokens.

    A place in the text becomes the position up to which the text before it is cut as the whole text is. That is exact
    where a token ends there, and otherwise the token that contains the place counts as being behind it.
    """
    ids, needle = encode(prompt.text), prompt.needle

    def position(place: int) -> int:
        return common_length(encode(prompt.text[:place]), ids)

    return Question(
        prompt=prompt,
        ids=tuple(ids),
        needle=range(position(needle.start), position(needle.stop)),
        asked_from=position(prompt.question_start),
        answer_tokens=len(encode(EXAMPLE_ANSWER)),
    )


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading elements are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
