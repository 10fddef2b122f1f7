"""A checkpoint that answers every question, made once."""

from pathlib import Path

import pytest

from hisparse.engine import LoadedModel, load_model
from hisparse.evaluation.questions import Question, QuestionSet
from tests.evaluation.wired import write_checkpoint

CONTEXT = 448
SEED = 5
"""With this one all needles stand well before the pages that are still resident when they are asked for."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wired model and its tokenizer."""
    folder = tmp_path_factory.mktemp("wired")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> LoadedModel:
    """The wired model in float32."""
    return load_model(str(checkpoint))


@pytest.fixture(scope="session")
def questions(loaded: LoadedModel) -> list[Question]:
    """Three questions among four facts."""
    return QuestionSet((CONTEXT,), 4, 3, SEED).questions(loaded.tokenizer.encode)[CONTEXT]
