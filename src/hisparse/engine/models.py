"""Loading: a name or a checkpoint directory becomes a model, a tokenizer, and what the cache needs to know of both.

Whatever is wrong with what the user named becomes an `InputError` of one line.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hisparse.config import KVDtype, ModelGeometry
from hisparse.engine.builtin import BUILTIN_MODELS, BUILTIN_PREFIX, FINDER, FINDER_FOLDER, builtin_config, builtin_model
from hisparse.engine.tokenizer import ByteTokenizer, CheckpointTokenizer, Tokenizer
from hisparse.errors import BackendError, InputError
from hisparse.geometry import ELEMENT_BYTES, latent_row

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `model` is a transformers causal language model in evaluation mode, untouched.

    `geometry` is for KV in the model's own dtype; `geometry_for` gives it for other rows.
    """

    name: str
    model: Any
    tokenizer: Tokenizer
    geometry: ModelGeometry
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    @property
    def config(self) -> Any:
        """The transformers configuration."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """Logits per row; token ids are below it."""
        return int(self.config.vocab_size)

    @property
    def max_tokens(self) -> int:
        """The longest request that the model's positions allow, prompt and output together."""
        return int(self.config.max_position_embeddings)

    def geometry_for(self, kv_dtype: KVDtype) -> ModelGeometry:
        """What the cache needs to know when rows are stored as `kv_dtype`. Index keys keep the model's dtype.

        Raises `InputError` for rows that do not have the widths of a packed format.
        """
        if kv_dtype == "auto":
            return self.geometry
        row = latent_row(kv_dtype, self.config.kv_lora_rank, self.config.qk_rope_head_dim)
        return replace(self.geometry, row=row, index_dtype=self.geometry.row.name)


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of "float32", "bfloat16" or "float16". Raises `InputError` for another name."""
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def require_device(device: str) -> None:
    """Raise `BackendError` where a model cannot be moved to `device`."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise BackendError("no CUDA device is usable: use the CPU (--device cpu), or install a driver and a CUDA torch")


def load_model(
    name_or_path: str, dtype: str = "float32", device: str = "cpu", *, distributed: Any = None
) -> LoadedModel:
    """Load a built-in model ("builtin:tiny-v32", "builtin:tiny-glm", "builtin:finder") or a checkpoint directory.

    `distributed`: for a checkpoint, a transformers `DistributedConfig` over the default process group, all of whose
    ranks call this: each reads and keeps its part only, on its own device (`tp.sharded_model.load_part`).
    Nothing is downloaded. Raises `InputError` for: a built-in model that is unknown, a directory that is missing or has
    no readable configuration, a model that is no sparse-attention model this library knows, missing weights or
    tokenizer, an unknown dtype.
    Raises `BackendError` for a device that is not there.
    """
    torch_dtype = parse_dtype(dtype)
    require_device(device)
    if name_or_path.startswith(BUILTIN_PREFIX) and name_or_path != FINDER:
        model, tokenizer = builtin_model(name_or_path, torch_dtype), ByteTokenizer()
        return _loaded(name_or_path, model.to(device), tokenizer, dtype)
    path = FINDER_FOLDER if name_or_path == FINDER else Path(name_or_path)
    read_config(path)
    model = _load_weights(path, torch_dtype, distributed)
    return _loaded(name_or_path, model.to(device), _load_tokenizer(path, model.config), dtype)


def describe_model(name_or_path: str, dtype: str = "float32") -> LoadedModel:
    """As `load_model`, without the weights: `model` lies on torch's meta device and computes nothing.

    For a process that drives others, in which the weights are. Raises `InputError` as `load_model` does, except for
    what is wrong with weights.
    """
    torch_dtype = parse_dtype(dtype)
    if name_or_path.startswith(BUILTIN_PREFIX) and name_or_path != FINDER:
        return _loaded(
            name_or_path, _without_weights(builtin_config(name_or_path), torch_dtype), ByteTokenizer(), dtype
        )
    path = FINDER_FOLDER if name_or_path == FINDER else Path(name_or_path)
    read_config(path)
    from transformers import AutoConfig

    try:
        model = _without_weights(AutoConfig.from_pretrained(path, local_files_only=True), torch_dtype)
    except Exception as error:  # transformers raises many types for a configuration that it cannot use
        raise InputError(f"the configuration of {path} cannot be used: {_one_line(error)}") from error
    return _loaded(name_or_path, model, _load_tokenizer(path, model.config), dtype)


def _without_weights(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


def read_config(path: Path) -> dict[str, Any]:
    """The checked `config.json` of a checkpoint directory, as written.

    It is read here and not through transformers, which fills `index_topk` in where a configuration has none.
    """
    if not path.is_dir():
        raise InputError(f"no model at {path}: name a checkpoint directory, or one of {', '.join(BUILTIN_MODELS)}")
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"{path} has no config.json: it is not a checkpoint directory")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {_one_line(error)}") from error
    if not isinstance(config, dict):
        raise InputError(f"{file} is not a model configuration: it holds no JSON object")
    if config.get("model_type") not in MODEL_TYPES:
        raise InputError(f"{path} is a {config.get('model_type')!r} model; supported are {', '.join(MODEL_TYPES)}")
    if not isinstance(config.get("index_topk"), int):
        raise InputError(f"{file} has no index_topk: only models with a sparse-attention indexer are supported")
    return config


def geometry_of(config: Any, dtype: str) -> ModelGeometry:
    """What the cache needs to know of a transformers configuration whose KV is stored as `dtype`.

    Raises `InputError` for a model type, dtype or row size that is not supported.
    """
    if config.model_type not in MODEL_TYPES:
        raise InputError(f"{config.model_type!r} models are not supported; supported are {', '.join(MODEL_TYPES)}")
    parse_dtype(dtype)
    return ModelGeometry(
        row=latent_row(dtype, config.kv_lora_rank, config.qk_rope_head_dim),
        leader_of=leaders_of(config),
        index_topk=config.index_topk,
        index_row_bytes=ELEMENT_BYTES[dtype] * config.index_head_dim,
    )


def leaders_of(config: Any) -> tuple[int, ...]:
    """For each layer, the layer whose indexer it uses. Without `indexer_types` every layer has its own."""
    types = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    leaders: list[int] = []
    for layer, kind in enumerate(types[: config.num_hidden_layers]):
        if kind not in ("full", "shared"):
            raise InputError(f"layer {layer} has the indexer type {kind!r}; known are full and shared")
        if kind == "shared" and not leaders:
            raise InputError("the first layer shares an indexer, but no layer before it has one")
        leaders.append(layer if kind == "full" else leaders[-1])
    return tuple(leaders)


def _loaded(name: str, model: Any, tokenizer: Tokenizer, dtype: str) -> LoadedModel:
    return LoadedModel(
        name=name,
        model=model.eval(),
        tokenizer=tokenizer,
        geometry=geometry_of(model.config, dtype),
        dtype=parse_dtype(dtype),
        eos_token_ids=tokenizer.eos_token_ids,
    )


def _load_weights(path: Path, dtype: torch.dtype, distributed: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # The annotation of from_pretrained knows nothing of what output_loading_info adds.
    load: Any = AutoModelForCausalLM.from_pretrained
    has_bar = logging.is_progress_bar_enabled()
    # What a command shows of its progress is its own affair.
    logging.disable_progress_bar()
    try:
        model, info = load(
            path,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            distributed_config=distributed,
        )
    except Exception as error:  # transformers, safetensors and torch raise many types for a damaged checkpoint
        raise InputError(f"the weights of {path} cannot be loaded: {_one_line(error)}") from error
    finally:
        if has_bar:
            logging.enable_progress_bar()
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(f"{path} lacks {len(missing)} weights, {missing[0]} among them")
    return model


def _load_tokenizer(path: Path, config: Any) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the same: the type depends on which file is missing or damaged
        raise InputError(f"{path} has no tokenizer that can be loaded: {_one_line(error)}") from error
    return CheckpointTokenizer(inner, int(config.vocab_size), eos_ids(path, config))


def eos_ids(path: Path, config: Any) -> tuple[int, ...]:
    """End tokens: those of `generation_config.json` if it names any, else the configuration's."""
    file = path / "generation_config.json"
    value: Any = None
    if file.is_file():
        try:
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{file} cannot be read: {_one_line(error)}") from error
    value = config.eos_token_id if value is None else value
    if value is None:
        return ()
    return tuple(int(token) for token in (value if isinstance(value, list) else [value]))


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
