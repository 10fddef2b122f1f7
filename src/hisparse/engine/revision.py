"""Which weights a model has: what KV may be kept under, beyond the life of the process that computed it."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hisparse.cache.prefix import root_key
from hisparse.config import CachePlan
from hisparse.engine.models import LoadedModel
from hisparse.errors import InputError, InvariantError
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

    Of a model that is split over ranks, all of them call this at once and get what the whole model gives. Only the
    pieces cross between them.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        pieces = _pieces_of_parts(tensor) if hasattr(tensor, "placements") else _pieces(tensor.detach())
        digest.update(pieces.cpu().numpy().tobytes())
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
    return raw[_offsets(raw.numel()).to(raw.device)]


def _pieces_of_parts(tensor: Any) -> torch.Tensor:
    """The same of a `DTensor`, which is split over ranks along one dimension: each fills in the bytes that it has."""
    size, stride = tensor.shape[_split_dim(tensor)], math.prod(tensor.shape[_split_dim(tensor) + 1 :])
    own = _own_indices(tensor)
    part_of = torch.full((size,), -1, dtype=torch.int64, device="cpu")
    part_of[own] = torch.arange(own.numel(), device="cpu")
    offsets = _offsets(tensor.numel() * tensor.element_size())
    element, byte = offsets // tensor.element_size(), offsets % tensor.element_size()
    index = part_of[element // stride % size]
    local = (element // (stride * size) * own.numel() + index) * stride + element % stride
    raw = tensor.to_local().detach().contiguous().reshape(-1).view(torch.uint8)
    mine = index >= 0
    pieces = torch.zeros(offsets.numel(), dtype=torch.uint8, device=raw.device)
    pieces[mine.to(raw.device)] = raw[(local * tensor.element_size() + byte)[mine].to(raw.device)]
    # A byte is not zero at one rank at most.
    dist.all_reduce(pieces, group=tensor.device_mesh.get_group())
    return pieces


def _own_indices(tensor: Any) -> torch.Tensor:
    """int64 `[n]`, on the CPU: which indices along the split dimension lie here, in order.

    Parts need not be connected, so indices are split just as the tensor was.
    """
    from torch.distributed.tensor import distribute_tensor  # half a second, for ranks alone

    shape = [1] * tensor.ndim
    shape[_split_dim(tensor)] = -1
    indices = torch.arange(tensor.shape[_split_dim(tensor)], device=tensor.to_local().device).reshape(shape)
    # Without a source nothing is sent: all have the same numbers.
    parts = distribute_tensor(indices, tensor.device_mesh, tensor.placements, src_data_rank=None)
    own: torch.Tensor = parts.to_local().reshape(-1).cpu()
    return own


def _split_dim(tensor: Any) -> int:
    (placement,) = tensor.placements
    dim: int | None = getattr(placement, "dim", None)
    if dim is None:
        raise InvariantError(f"a weight is placed as {placement}, and not split along a dimension")
    return dim


def _offsets(num_bytes: int) -> torch.Tensor:
    """int64 `[n]`: which bytes of a tensor of `num_bytes` are looked at."""
    if num_bytes <= NUM_PIECES * PIECE_BYTES:
        return torch.arange(num_bytes, device="cpu")
    step = (num_bytes - PIECE_BYTES) // (NUM_PIECES - 1)
    starts = torch.arange(NUM_PIECES, device="cpu") * step
    return (starts[:, None] + torch.arange(PIECE_BYTES, device="cpu")).reshape(-1)
