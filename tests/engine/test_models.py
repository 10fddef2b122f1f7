"""What loads is what was named; what cannot be loaded is refused in one line."""

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hisparse.engine.builtin import TINY_MODELS, builtin_config, builtin_model
from hisparse.engine.models import LoadedModel, describe_model, geometry_of, leaders_of, load_model, require_device
from hisparse.engine.tokenizer import ByteTokenizer
from hisparse.errors import BackendError, InputError
from tests.engine.wide import wide_model

CHECKSUMS = {"builtin:tiny-v32": 3518018884, "builtin:tiny-glm": 797106831}


def save_tokenizer(path: Path) -> None:
    """A word tokenizer small enough to write by hand."""
    words = ["<unk>", "<end>", "rows", "pages", "and"]
    model = {"type": "WordLevel", "vocab": {word: index for index, word in enumerate(words)}, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def checkpoint(tiny: LoadedModel, tmp_path: Path) -> Path:
    """A built-in model saved as a checkpoint directory, with a tokenizer."""
    tiny.model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        config[key] = value
        if value is None:
            del config[key]
    file.write_text(json.dumps(config))


def refusal(path: Path | str, dtype: str = "float32") -> str:
    with pytest.raises(InputError) as caught:
        load_model(str(path), dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_weights_of_a_built_in_model_are_the_same_on_every_machine(name: str) -> None:
    checksum = 0
    for _, weight in sorted(builtin_model(name, torch.float32).named_parameters()):
        checksum = zlib.crc32(weight.detach().numpy().tobytes(), checksum)
    assert checksum == CHECKSUMS[name]


def test_built_in_models_have_what_full_size_models_have(tiny: LoadedModel) -> None:
    config = tiny.config
    assert set(config.mlp_layer_types) == {"dense", "sparse"}
    assert config.index_n_heads >= 16
    assert config.max_position_embeddings >= 65536
    assert isinstance(tiny.tokenizer, ByteTokenizer)
    assert tiny.eos_token_ids == ()


def test_the_geometry_counts_the_bytes_of_a_row_and_names_each_layers_leader() -> None:
    v32 = geometry_of(builtin_config("builtin:tiny-v32"), "float32")
    assert v32.row.row_bytes == (64 + 16) * 4
    assert v32.leader_of == (0, 1, 2)
    glm = geometry_of(builtin_config("builtin:tiny-glm"), "bfloat16")
    assert glm.row.row_bytes == (64 + 16) * 2
    assert glm.index_row_bytes == 24 * 2
    assert glm.leader_of == (0, 0, 2, 2)
    assert (glm.index_topk, glm.leaders) == (32, (0, 2))


def test_packed_rows_change_the_row_and_nothing_else() -> None:
    loaded = wide_model("bfloat16")
    packed = loaded.geometry_for("fp8_ds_mla")
    assert (loaded.geometry.row.row_bytes, packed.row.row_bytes) == (1152, 656)
    assert packed == replace(loaded.geometry, row=packed.row, index_dtype="bfloat16")
    assert loaded.geometry_for("auto") == loaded.geometry


def test_a_model_of_other_rows_cannot_pack_them(tiny: LoadedModel) -> None:
    with pytest.raises(InputError, match=r"^fp8_ds_mla rows are 512\+64 wide; this model's are 64\+16$"):
        tiny.geometry_for("fp8_ds_mla")


def test_a_first_layer_that_shares_is_refused() -> None:
    config = builtin_config("builtin:tiny-glm")
    config.indexer_types = ["shared", "full", "full", "full"]
    with pytest.raises(InputError, match="first layer shares"):
        leaders_of(config)


def test_the_bfloat16_model_is_the_float32_model_rounded(tiny: LoadedModel) -> None:
    rounded = dict(load_model(tiny.name, "bfloat16").model.named_parameters())
    for name, weight in tiny.model.named_parameters():
        assert torch.equal(rounded[name], weight.to(rounded[name].dtype)), name


def test_a_checkpoint_directory_gives_the_same_logits_as_the_model_saved(tiny: LoadedModel, checkpoint: Path) -> None:
    loaded = load_model(str(checkpoint))
    ids = torch.tensor([list(b"rows and pages")])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, tiny.model(ids).logits)
    assert loaded.geometry == tiny.geometry


def test_the_tokenizer_of_a_checkpoint_directory_is_used(checkpoint: Path) -> None:
    loaded = load_model(str(checkpoint))
    assert loaded.tokenizer.encode("pages and rows") == [3, 4, 2]
    assert loaded.tokenizer.decode([3, 4, 2]) == "pages and rows"
    assert loaded.tokenizer.vocab_size == loaded.vocab_size == 256


def test_end_tokens_come_from_the_generation_config_before_the_config(checkpoint: Path) -> None:
    edit_config(checkpoint, eos_token_id=7)
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    assert load_model(str(checkpoint)).eos_token_ids == (7,)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert load_model(str(checkpoint)).eos_token_ids == (1, 5)


@pytest.mark.parametrize("value", ["abc", 256, -1, 1.5, True, [1, "x"], [1, 256], {}])
def test_an_end_token_that_the_vocabulary_does_not_have_is_refused(checkpoint: Path, value: Any) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    told = refusal(checkpoint)
    assert told.startswith(f"{checkpoint / 'generation_config.json'}: eos_token_id is {value!r}; it must be a token id")
    assert "0 to 255" in told


def test_an_end_token_of_the_config_is_held_to_the_vocabulary_too(checkpoint: Path) -> None:
    edit_config(checkpoint, eos_token_id=256)
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    assert refusal(checkpoint).startswith(f"{checkpoint / 'config.json'}: eos_token_id is 256")
    edit_config(checkpoint, eos_token_id=255)
    assert load_model(checkpoint).eos_token_ids == (255,)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_generation_config_that_cannot_be_read_is_refused_by_its_name(checkpoint: Path, text: str) -> None:
    (checkpoint / "generation_config.json").write_text(text)
    assert refusal(checkpoint).startswith(f"{checkpoint / 'generation_config.json'} cannot be ")


def test_a_path_object_names_a_model_as_its_string_does(checkpoint: Path) -> None:
    assert load_model(checkpoint).name == describe_model(checkpoint).name == str(checkpoint)


@pytest.mark.parametrize("name", [None, 5, b"builtin:tiny-v32"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(InputError, match="names no model: give a name or a path"):
        load_model(name)


@pytest.mark.parametrize("device", ["tpu", "mps", "meta", "cuda:x", "", None])
def test_a_device_that_models_do_not_run_on_is_refused_with_those_they_do(device: Any) -> None:
    with pytest.raises(InputError, match=f"^unknown device {device!r}: use cpu, cuda, or one GPU"):
        load_model("builtin:tiny-v32", device=device)


def test_a_gpu_beyond_the_last_is_refused_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_device("cuda:1")
    with pytest.raises(BackendError, match=r"^there is no cuda:2: the last GPU of this machine is cuda:1$"):
        require_device("cuda:2")


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    assert "no model at" in refusal(tmp_path / "nowhere")


def test_a_built_in_name_that_does_not_exist_is_refused_with_those_that_do() -> None:
    assert "builtin:tiny-glm" in refusal("builtin:large")


def test_an_unknown_dtype_is_refused() -> None:
    assert "unknown dtype 'int4'" in refusal("builtin:tiny-v32", "int4")


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "\xff\xfe", "[]"])
def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refusal(tmp_path)


def test_a_model_of_another_type_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, model_type="llama")
    assert "'llama'" in refusal(checkpoint)


def test_a_model_without_index_topk_is_refused_although_transformers_would_fill_it_in(checkpoint: Path) -> None:
    edit_config(checkpoint, index_topk=None)
    assert "no index_topk" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str (value: 'wide')"),
        ({"eos_token_id": "end"}, "Field 'eos_token_id' with value 'end'"),
        ({"num_hidden_layers": 9}, "(9) must be equal to the number of `"),
        ({"hidden_size": -1}, "negative dimension -1"),
        ({"hidden_act": "wobble"}, "'wobble'"),
        ({"index_topk": 0}, "index_topk is 0"),
    ],
)
def test_a_configuration_that_no_model_can_be_made_of_is_refused_with_the_field_and_its_value(
    checkpoint: Path, changes: dict[str, Any], said: str
) -> None:
    edit_config(checkpoint, **changes)
    told = refusal(checkpoint)
    assert told.startswith(f"the configuration of {checkpoint} cannot be used: ")
    assert said in told
    with pytest.raises(InputError) as described:
        describe_model(checkpoint)
    assert str(described.value) == told


@pytest.mark.parametrize("value", ["32", True, 2.5])
def test_an_index_topk_that_is_no_number_is_said_to_be_that_and_not_to_be_missing(checkpoint: Path, value: Any) -> None:
    edit_config(checkpoint, index_topk=value)
    assert f"index_topk is {value!r}; it must be a number" in refusal(checkpoint)


@pytest.mark.parametrize("num_types", [0, 1, 9])
def test_indexer_types_of_another_number_of_layers_are_refused(checkpoint: Path, num_types: int) -> None:
    layers = load_model(checkpoint).geometry.num_layers
    edit_config(checkpoint, indexer_types=["full"] * num_types)
    assert f"indexer_types has {num_types} entries, and the model {layers} layers" in refusal(checkpoint)


def test_types_of_draft_layers_may_follow_those_of_the_models_own() -> None:
    config = builtin_config("builtin:tiny-glm")
    expected = leaders_of(config)
    config.indexer_types = [*config.indexer_types, "full"]
    with pytest.raises(InputError, match="5 entries"):
        leaders_of(config)
    config.num_nextn_predict_layers = 1
    assert leaders_of(config) == expected


def test_missing_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "weights" in refusal(checkpoint)


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("names", [["model.norm.weight"], ["model.norm.weight", "lm_head.weight"]])
def test_weights_that_lack_tensors_are_refused_with_their_number_and_the_first(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, names: list[str]
) -> None:
    change_weights(checkpoint, lambda weights: [weights.pop(name) for name in names] and None)
    count = "1 weight" if len(names) == 1 else "2 weights"
    told = refusal(checkpoint)
    assert told == f"{checkpoint} lacks {count} that its configuration wants, the first is {min(names)}"
    assert caplog.records == [], "and nothing else is said"


def test_weights_of_another_shape_are_refused_with_both_shapes(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_weights(
        checkpoint,
        lambda weights: weights.update({"model.norm.weight": torch.ones(3), "lm_head.weight": torch.ones(3, 3)}),
    )
    assert refusal(checkpoint) == (
        f"{checkpoint} has 2 weights of another shape than its configuration wants, the first is lm_head.weight: "
        "[3, 3] instead of [256, 64]"
    )
    assert caplog.records == [], "and nothing else is said"


def test_experts_of_different_shapes_are_refused_with_the_shapes(checkpoint: Path) -> None:
    expert = "model.layers.1.mlp.experts.1.down_proj.weight"
    change_weights(checkpoint, lambda weights: weights.update({expert: torch.ones(3, 3)}))
    told = refusal(checkpoint)
    assert "cannot be loaded: model.layers.1.mlp.experts.down_proj: " in told
    assert "[64, 32]" in told
    assert "[3, 3]" in told


def test_what_transformers_says_of_a_model_that_loads_is_not_lost(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_weights(checkpoint, lambda weights: weights.update({"model.surplus": torch.ones(3)}))
    load_model(checkpoint)
    assert "model.surplus" in caplog.text


def test_damaged_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"not weights")
    assert "cannot be loaded" in refusal(checkpoint)


def test_a_checkpoint_without_a_tokenizer_is_refused(checkpoint: Path) -> None:
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert refusal(checkpoint) == f"{checkpoint} has no tokenizer.json, and no other tokenizer that can be loaded"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read: "),
        ("tokenizer.json", "{}", "tokenizer.json is no tokenizer that can be loaded: KeyError 'added_tokens'"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json cannot be used: it holds no JSON object"),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_the_name_of_its_file(
    checkpoint: Path, name: str, text: str, said: str
) -> None:
    (checkpoint / name).write_text(text)
    assert refusal(checkpoint).startswith(f"{checkpoint}/{said}")
