"""A rank's part of a model, by transformers' own plan: attention heads and the inner width of MLPs are split.

What DSA adds is not: every rank has all latents, all index keys and the whole indexer, and sums that cross ranks come
out bit for bit alike on all of them, so that all select the same rows.
"""

from dataclasses import replace
from typing import Any

import torch

from hisparse.engine.builtin import TINY_MODELS
from hisparse.engine.models import LoadedModel, load_model
from hisparse.errors import InputError


def check_heads(config: Any, num_ranks: int) -> None:
    """Raise `InputError` for a number of ranks over which the model's attention heads cannot be split evenly."""
    heads = int(config.num_attention_heads)
    if num_ranks < 1 or heads % num_ranks:
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise InputError(f"{heads} attention heads cannot be split over {num_ranks} ranks: use one of {sizes}")


def load_part(name_or_path: str, dtype: str, device: str, num_ranks: int) -> LoadedModel:
    """The part of a model that belongs to this rank of the default process group, all of whose ranks call this.

    Of a checkpoint, a rank reads its own part only, straight to its device; a model that is made where it is loaded is
    made whole, and cut. Raises as `load_model` does. `num_ranks` divides the heads (`check_heads`).
    """
    if num_ranks == 1:
        return load_model(name_or_path, dtype, device)
    from transformers.distributed.configuration_utils import DistributedConfig

    distributed = DistributedConfig(tp_size=num_ranks, tp_plan="auto")
    if name_or_path not in TINY_MODELS:
        return load_model(name_or_path, dtype, device, distributed=distributed)
    whole = load_model(name_or_path, dtype)
    return replace(whole, model=_cut(whole.model, distributed).to(device))


def _cut(model: Any, distributed: Any) -> Any:
    """Replace the weights that are split by this rank's parts of them."""
    config, _, mesh = type(model).prepare_distribute_model(distributed)
    with torch.no_grad():
        model = type(model).maybe_distribute_model(model, config, mesh)
        for parameter in model.parameters():
            # A part is at first a view of the whole, which would stay in memory for it.
            if hasattr(parameter, "to_local"):
                parameter.data = parameter.data.clone()
    return model
