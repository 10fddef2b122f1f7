"""Loading: a name or a checkpoint directory becomes a model, a tokenizer, and what the cache needs to know of both.

Whatever is wrong with what the user named becomes an `InputError` of one line.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hisparse.config import KVDtype, ModelGeometry
from hisparse.engine.builtin import BUILTIN_PREFIX, FINDER, FINDER_FOLDER, builtin_config, builtin_model
from hisparse.engine.checkpoint import (
    MODEL_TYPES,
    describe_weights,
    eos_ids,
    load_config,
    load_tokenizer,
    load_weights,
    quiet_loading,
    read_config,
    without_weights,
)
from hisparse.engine.tokenizer import ByteTokenizer, Tokenizer
from hisparse.errors import BackendError, InputError
from hisparse.geometry import ELEMENT_BYTES, latent_row

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run; `load_model` makes one. One engine at a time drives it.

    `name`: what it was loaded by, a built-in name or a path. `model`: a transformers causal language model in
    evaluation mode, untouched. `geometry` is for KV in the model's own `dtype`; `geometry_for` gives it for other rows.
    `eos_token_ids`: tokens that end a text, below `vocab_size`; empty if there are none.
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
    """Raise `InputError` for a device that models do not run on, `BackendError` for one that is not there."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    if place is None or place.type not in DEVICE_TYPES:
        raise InputError(f"unknown device {device!r}: use cpu, cuda, or one GPU by its number as in cuda:0")
    if place.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise BackendError("no CUDA device is usable: use the CPU (--device cpu), or install a driver and a CUDA torch")
    if (place.index or 0) >= torch.cuda.device_count():  # cuda alone has no index
        raise BackendError(
            f"there is no {device}: the last GPU of this machine is cuda:{torch.cuda.device_count() - 1}"
        )


def load_model(
    name_or_path: str | os.PathLike[str], dtype: str = "float32", device: str = "cpu", *, distributed: Any = None
) -> LoadedModel:
    """Load a built-in model ("builtin:tiny-v32", "builtin:tiny-glm", "builtin:finder") or a checkpoint directory.

    `dtype`: of weights and KV, "float32", "bfloat16" or "float16". `device`: "cpu", "cuda", or one GPU as "cuda:0".
    `distributed`: for a checkpoint, a transformers `DistributedConfig` over the default process group, all of whose
    ranks call this: each reads and keeps its part only, on its own device (`tp.sharded_model.load_part`).
    Nothing is downloaded. Raises `InputError` for: a built-in model that is unknown, a directory that is missing or has
    no configuration that can be used, a model that is no sparse-attention model this library knows, weights that are
    missing or of another shape, end tokens outside the vocabulary, no tokenizer, an unknown dtype or device.
    Raises `BackendError` for a device that is not there.
    """
    name, torch_dtype = _name_of(name_or_path), parse_dtype(dtype)
    require_device(device)
    if _is_made_here(name):
        return _loaded(name, builtin_model(name, torch_dtype).to(device), ByteTokenizer(), dtype)
    path = _folder_of(name)
    with quiet_loading() as said:
        config, eos_token_ids = _checked_config(path, dtype)
        model = load_weights(path, config, torch_dtype, distributed, said)
        tokenizer = load_tokenizer(path, config, eos_token_ids)
    return _loaded(name, model.to(device), tokenizer, dtype)


def describe_model(name_or_path: str | os.PathLike[str], dtype: str = "float32") -> LoadedModel:
    """As `load_model`, without the weights: `model` lies on torch's meta device and computes nothing.

    For a process that drives others, in which the weights are. Raises `InputError` as `load_model` does, except for
    what is wrong with weights.
    """
    name, torch_dtype = _name_of(name_or_path), parse_dtype(dtype)
    if _is_made_here(name):
        return _loaded(name, without_weights(builtin_config(name), torch_dtype), ByteTokenizer(), dtype)
    path = _folder_of(name)
    with quiet_loading():
        config, eos_token_ids = _checked_config(path, dtype)
        model = describe_weights(path, config, torch_dtype)
        tokenizer = load_tokenizer(path, config, eos_token_ids)
    return _loaded(name, model, tokenizer, dtype)


def _name_of(name_or_path: str | os.PathLike[str]) -> str:
    name: object = os.fspath(name_or_path) if isinstance(name_or_path, os.PathLike) else name_or_path
    if not isinstance(name, str):
        raise InputError(f"{name_or_path!r} names no model: give a name or a path, as a string or a path object")
    return name


def _is_made_here(name: str) -> bool:
    """Whether it is a built-in model, or would be one if there were one of that name, without files."""
    return name.startswith(BUILTIN_PREFIX) and name != FINDER


def _folder_of(name: str) -> Path:
    return FINDER_FOLDER if name == FINDER else Path(name)


def _checked_config(path: Path, dtype: str) -> tuple[Any, tuple[int, ...]]:
    """All that can be checked before weights are read: the configuration, and the end tokens."""
    read_config(path)
    config = load_config(path)
    try:
        geometry_of(config, dtype)
    except InputError as error:
        raise InputError(f"the configuration of {path} cannot be used: {error}") from error
    return config, eos_ids(path, config)


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
    """For each layer, the layer whose indexer it uses. Without `indexer_types` every layer has its own.

    Raises `InputError` for types that are unknown, of another number of layers, or begin with one that shares. Types of
    draft layers, which are behind the model's own, may be among them.
    """
    num_layers = int(config.num_hidden_layers)
    types = getattr(config, "indexer_types", None)
    types = ["full"] * num_layers if types is None else types
    num_drafts = int(getattr(config, "num_nextn_predict_layers", None) or 0)
    if not num_layers <= len(types) <= num_layers + num_drafts:
        raise InputError(f"indexer_types has {len(types)} entries, and the model {num_layers} layers")
    leaders: list[int] = []
    for layer, kind in enumerate(types[:num_layers]):
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
