"""What loads is what was named; what cannot be loaded is refused in one line."""

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.engine.builtin import TINY_MODELS, builtin_config, builtin_model
from hisparse.engine.models import LoadedModel, geometry_of, leaders_of, load_model
from hisparse.engine.tokenizer import ByteTokenizer
from hisparse.errors import InputError
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


def test_a_configuration_of_a_wrong_type_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, hidden_size="wide")
    assert "cannot be loaded" in refusal(checkpoint)


def test_missing_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "weights" in refusal(checkpoint)


def test_weights_that_lack_a_tensor_are_refused_with_its_name(checkpoint: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    assert "lacks 1 weights, model.norm.weight" in refusal(checkpoint)


def test_damaged_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"not weights")
    assert "cannot be loaded" in refusal(checkpoint)


def test_a_checkpoint_without_a_tokenizer_is_refused(checkpoint: Path) -> None:
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer" in refusal(checkpoint)
