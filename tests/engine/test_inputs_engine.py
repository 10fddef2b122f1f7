"""What a program gives an engine: wrong values are refused at once, in one line that says what would be right."""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hisparse.config import CacheConfig, WriteBack
from hisparse.engine import Engine, EngineConfig, LoadedModel, SamplingParams, load_model
from hisparse.engine.request import FinishReason
from hisparse.errors import InputError, InvariantError

CONFIG = EngineConfig(max_tokens=64, host_pool_bytes=1 << 20)
PARAMS = SamplingParams(max_tokens=3)
PROMPT = [97, 98, 99]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("builtin:tiny-v32")


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[Engine]:
    with Engine(loaded, CONFIG) as engine:
        yield engine


def outputs(engine: Engine, prompt: Any) -> list[int]:
    request_id = engine.add_request(prompt, PARAMS)
    list(engine.run())
    return list(engine.take_result(request_id).output_ids)


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        array("q", PROMPT),
        bytes(PROMPT),
        range(97, 100),
        torch.tensor(PROMPT),
        torch.tensor(PROMPT, dtype=torch.int32),
        np.array(PROMPT),
    ],
    ids=lambda prompt: f"{type(prompt).__name__}",
)
def test_token_ids_may_come_in_any_sequence_or_a_tensor(engine: Engine, prompt: Any) -> None:
    assert outputs(engine, prompt) == outputs(engine, PROMPT)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("abc", "the prompt is text, and token ids are wanted"),
        (torch.tensor([PROMPT]), r"the prompt is a tensor of shape \[1, 3\]; it must have one dimension"),
        (torch.tensor(97), r"the prompt is a tensor of shape \[\]; it must have one dimension"),
        (torch.tensor([1.0, 2.0]), "the prompt has 1.0 among its token ids, which must be integers"),
        ([1, 1.5], "the prompt has 1.5 among its token ids, which must be integers"),
        (["a"], "the prompt has 'a' among its token ids"),
        (7, "the prompt must be a sequence of token ids, not 7"),
        (None, "the prompt must be a sequence of token ids, not None"),
        ([], "the prompt is empty"),
        (torch.tensor([], dtype=torch.int64), "the prompt is empty"),
        ([256], "token id 256 is outside the vocabulary of 256"),
        (torch.tensor([-1]), "token id -1 is outside the vocabulary of 256"),
        ([1 << 40], "is outside the vocabulary"),
    ],
)
def test_what_is_no_run_of_token_ids_is_refused_and_leaves_no_request(engine: Engine, prompt: Any, said: str) -> None:
    with pytest.raises(InputError, match=f"^{said}" if said[0] == "t" else said) as caught:
        engine.add_request(prompt, PARAMS)
    assert "\n" not in str(caught.value)
    assert engine.results() == []
    assert not engine.scheduler.has_work


@pytest.mark.parametrize(
    ("stop_token_ids", "said"),
    [
        ((256,), "stop token 256 is outside the vocabulary: its tokens are 0 to 255"),
        ((3, 999), "stop token 999 is outside"),
        ((1.5,), "stop_token_ids has 1.5 among its token ids, which must be integers"),
    ],
)
def test_a_stop_token_that_the_model_cannot_generate_is_refused(engine: Engine, stop_token_ids: Any, said: str) -> None:
    with pytest.raises(InputError, match=f"^{said}"):
        engine.add_request(PROMPT, SamplingParams(stop_token_ids=stop_token_ids))
    assert engine.results() == []
    engine.add_request(PROMPT, SamplingParams(stop_token_ids=(0, 255)))


def test_one_string_for_stop_is_refused_because_each_of_its_characters_would_stop() -> None:
    with pytest.raises(InputError, match=r"^stop 'sQ' is one string: give a tuple of strings, \('sQ',\)$"):
        SamplingParams(stop="sQ")  # type: ignore[arg-type]


def test_a_stop_string_ends_a_text_as_a_whole(engine: Engine) -> None:
    request_id = engine.add_request(PROMPT, SamplingParams(max_tokens=8))
    list(engine.run())
    text = engine.take_result(request_id).text
    # Its first character comes alone before, or never: it does not stop the text, the two together do.
    stop = text[2:4]
    request_id = engine.add_request(PROMPT, SamplingParams(max_tokens=8, stop=(stop,)))
    list(engine.run())
    result = engine.take_result(request_id)
    assert (result.text, result.finish_reason) == (text[: text.index(stop)], FinishReason.STOP)


def test_a_closed_engine_takes_no_request(loaded: LoadedModel) -> None:
    engine = Engine(loaded, CONFIG)
    engine.close()
    with pytest.raises(InvariantError, match=r"^this engine was closed$"):
        engine.add_request(PROMPT, PARAMS)


def test_a_second_engine_of_a_model_is_told_to_close_the_first_which_goes_on(loaded: LoadedModel) -> None:
    with Engine(loaded, CONFIG) as first:
        before = outputs(first, PROMPT)
        with pytest.raises(InputError, match=r"^another engine drives builtin:tiny-v32: close that one first"):
            Engine(loaded, CONFIG)
        assert outputs(first, PROMPT) == before
    with Engine(loaded, CONFIG) as second:
        assert outputs(second, PROMPT) == before


@pytest.mark.parametrize("value", ["eager", "never", "EAGER", None, 1])
def test_a_write_back_that_is_none_is_refused_and_not_taken_for_pressure(value: Any) -> None:
    said = "must be one of WriteBack.PRESSURE, WriteBack.EAGER, WriteBack.NEVER$"
    with pytest.raises(InputError, match=f"^write_back {value!r} {said}"):
        EngineConfig(max_tokens=64, write_back=value)
    with pytest.raises(InputError, match=f"^write_back {value!r} {said}"):
        CacheConfig(16, 1 << 20, 1 << 20, 32, 32, 1, 64, 64, write_back=value)
    for right in WriteBack:
        assert EngineConfig(max_tokens=64, write_back=right).write_back is right


@pytest.mark.parametrize("name", ["max_tokens", "max_running", "chunk_tokens"])
@pytest.mark.parametrize("value", [0, 64.5, "64", None])
def test_a_number_of_tokens_or_requests_is_an_integer(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} must be an integer, at least 1, not {value!r}$"):
        EngineConfig(**{"max_tokens": 64, name: value})


def test_a_directory_may_be_named_by_a_path_object(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^no model at {tmp_path / 'nowhere'}"):
        load_model(tmp_path / "nowhere")
