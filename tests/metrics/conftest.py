"""A tiny model, and what to run on it."""

import pytest

from hisparse.engine import LoadedModel, load_model


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """The smallest built-in model with an indexer in every layer."""
    return load_model("builtin:tiny-v32")
