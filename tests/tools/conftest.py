"""A small tokenizer, corpus and model shape for the tests of the tools."""

import random
from typing import Any

import numpy as np
import pytest

from hisparse.evaluation.prompts import library_files, read_sources
from tools.finder.data import Corpus, SequenceBuilder
from tools.finder.model import FinderShape
from tools.finder.vocabulary import FactTokens, train_tokenizer


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Some of the files that are trained on."""
    return read_sources(library_files(held_out=False), 300_000, random.Random(0))


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Any:
    """The finder's tokenizer with a small vocabulary."""
    return train_tokenizer(texts, 1024)


@pytest.fixture(scope="session")
def builder(texts: list[str], tokenizer: Any) -> SequenceBuilder:
    """Sequences over `texts`."""
    facts = FactTokens.of(tokenizer)
    tokens = np.concatenate([np.array(encoding.ids) for encoding in tokenizer.encode_batch(texts)])
    return SequenceBuilder(Corpus.of(tokens, facts.newline), facts)


@pytest.fixture(scope="session")
def shape() -> FinderShape:
    """A model that takes milliseconds."""
    return FinderShape(
        vocab=1024, hidden=64, intermediate=64, layers=2, heads=4, q_lora=32, kv_lora=32, nope=16, rope=16,
        index_heads=4, index_dim=32, topk=16,
    )  # fmt: skip
