"""What the scheduler's process knows of a model without its weights, and over how many ranks a model can be split."""

import pytest

from hisparse.engine.builtin import FINDER, TINY_MODELS
from hisparse.engine.models import describe_model, load_model
from hisparse.engine.tp.sharded_model import check_heads
from hisparse.errors import InputError


@pytest.mark.parametrize("name", [*TINY_MODELS, FINDER])
def test_a_description_says_what_the_loaded_model_does_and_has_no_weights(name: str) -> None:
    described, loaded = describe_model(name, "bfloat16"), load_model(name, "bfloat16")
    assert {parameter.device.type for parameter in described.model.parameters()} == {"meta"}
    for what in ("name", "geometry", "dtype", "eos_token_ids", "vocab_size", "max_tokens"):
        assert getattr(described, what) == getattr(loaded, what)
    assert described.config.to_dict() == loaded.config.to_dict()
    assert described.tokenizer.encode("rows and pages") == loaded.tokenizer.encode("rows and pages")


def test_a_model_that_is_not_there_cannot_be_described() -> None:
    with pytest.raises(InputError, match="no model at /nowhere"):
        describe_model("/nowhere")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_that_divide_the_heads_are_fine(num_ranks: int) -> None:
    check_heads(describe_model(TINY_MODELS[0]).config, num_ranks)


@pytest.mark.parametrize("num_ranks", [-1, 0, 3, 8])
def test_others_are_refused_with_those_that_would_do(num_ranks: int) -> None:
    with pytest.raises(InputError, match=f"cannot be split over {num_ranks} ranks: use one of 1, 2, 4"):
        check_heads(describe_model(TINY_MODELS[0]).config, num_ranks)
