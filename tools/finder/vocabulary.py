"""The finder's tokenizer: byte-level BPE in which lines, digits and the known names are always cut the same way.

A newline is a token of its own and a digit too (with the space before it, if there is one). So the tokens of a text
are those of its lines, one after the other, and training on joined lines sees what a text prompt gives.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hisparse.evaluation.prompts import NAMES, fact_line

_BOOST = 4000
"""How often each name and spaced digit is shown to the trainer, so that it becomes one token among so few."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train the tokenizer on `texts`. Raises `ValueError` if a name or digit did not become one token."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Split(Regex(" ?[0-9]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_with_facts(texts), trainer)
    FactTokens.of(tokenizer)
    return tokenizer


def _with_facts(texts: Iterable[str]) -> Iterator[str]:
    yield from texts
    words = [*NAMES, *"0123456789", "the", "key", "of", "is"]
    yield from (f" {word}" * _BOOST for word in words)


@dataclass(frozen=True, slots=True)
class FactTokens:
    """Token ids of a fact's parts: int64 arrays. A fact is `prefix`, a name, `middle`, digits, `newline`.

    `names` `[len(NAMES)]`; `first_digits` (with the space) and `digits`, each `[10]`.
    """

    prefix: np.ndarray
    names: np.ndarray
    middle: int
    first_digits: np.ndarray
    digits: np.ndarray
    newline: int

    @classmethod
    def of(cls, tokenizer: Any) -> "FactTokens":
        """Look the ids up. Raises `ValueError` if the tokenizer cuts a fact otherwise."""
        prefix = tokenizer.encode("# the key of").ids
        found = cls(
            prefix=np.array(prefix),
            names=np.array([_single(tokenizer, f" {name}") for name in NAMES]),
            middle=_single(tokenizer, " is"),
            first_digits=np.array([_single(tokenizer, f" {digit}") for digit in range(10)]),
            digits=np.array([_single(tokenizer, str(digit)) for digit in range(10)]),
            newline=_single(tokenizer, "\n"),
        )
        for index, name in enumerate(NAMES):
            if tokenizer.encode(fact_line(name, 48213)).ids != found.fact(index, 48213).tolist():
                raise ValueError(f"the fact of {name!r} is not cut as expected")
        return found

    @property
    def fact_length(self) -> int:
        """Tokens of a fact line, the newline included."""
        return len(self.prefix) + 8

    @property
    def value_start(self) -> int:
        """Where in a fact its first digit stands."""
        return len(self.prefix) + 2

    def fact(self, name: int, value: int) -> np.ndarray:
        """Token ids of the fact line of the name with index `name`: `[fact_length]`."""
        first, *rest = (int(digit) for digit in str(value))
        line = [self.names[name], self.middle, self.first_digits[first], *self.digits[rest], self.newline]
        return np.concatenate([self.prefix, np.array(line)])


def _single(tokenizer: Any, text: str) -> int:
    ids = tokenizer.encode(text).ids
    if len(ids) != 1:
        raise ValueError(f"{text!r} is {len(ids)} tokens, not one")
    return int(ids[0])
