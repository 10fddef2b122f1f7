"""Which weights a model has: what KV may be kept under, beyond the life of the process that computed it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hisparse.cache.prefix import root_key
from hisparse.config import CachePlan
from hisparse.engine.models import LoadedModel
from hisparse.errors import InputError
from hisparse.offload.engine_layout import ModelIdentity
from hisparse.offload.files import attention_config_digest

DIGEST_BYTES = 16
PIECE_BYTES = 4096
NUM_PIECES = 64
"""Of a tensor larger than so many pieces, so many are looked at, evenly spaced."""


def weights_revision(model: Any) -> str:
    """32 hex digits over a model's weights as they are in memory: names, types and shapes of all, and their bytes.

    Looking at memory and not at files covers built-in models, checkpoints of any format and weights that were changed
    since. Tensors up to 256 KiB are read whole, of larger ones 64 pieces of 4 KiB: training moves every weight, so
    other weights differ in some piece of a tensor. Whoever edits single numbers of a large tensor by hand must not
    rely on it. Buffers count, since rotary frequencies may be among them. Waits for the device.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(_pieces(tensor.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()


def check_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise `InputError` unless `weights` are those of such a model: each name once, each tensor of the same shape."""
    expected = model.state_dict(keep_vars=True)
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected:
            raise InputError(f"the weights {'lack' if name in expected else 'have'} {name}, and the model does not")
        if weights[name].shape != expected[name].shape:
            found, wanted = tuple(weights[name].shape), tuple(expected[name].shape)
            raise InputError(f"the weights have {name} as {found}, where the model has {wanted}")


def model_identity(loaded: LoadedModel, plan: CachePlan, salt: str, revision: str) -> ModelIdentity:
    """What decides the KV that `loaded` computes, with the root of its prefix keys.

    `salt`: a secret that keys depend on, or nothing. A checkpoint goes by the name of its directory, wherever that
    is: what it contains is the revision's matter.
    """
    name = loaded.name if loaded.name.startswith("builtin:") else Path(loaded.name).resolve().name
    config = attention_config_digest(loaded.config.to_dict())
    dtype = str(loaded.dtype).removeprefix("torch.")
    root = root_key(name, revision, config, dtype, plan.model.row.name, plan.config.block_size, salt=salt.encode())
    return ModelIdentity(name, revision, config, dtype, root)


def _pieces(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 `[n]`: the bytes of the tensor that are looked at."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() <= NUM_PIECES * PIECE_BYTES:
        return raw
    step = (raw.numel() - PIECE_BYTES) // (NUM_PIECES - 1)
    return raw.as_strided((NUM_PIECES, PIECE_BYTES), (step, 1)).reshape(-1)
