"""A rank's part of a model, by transformers' own plan: attention heads and the inner width of MLPs are split.

What DSA adds is not: every rank has all latents, all index keys and the whole indexer, and sums that cross ranks come
out bit for bit alike on all of them, so that all select the same rows.
"""

from dataclasses import replace
from typing import Any

import torch

from hisparse.engine.models import LoadedModel
from hisparse.errors import InputError


def check_heads(config: Any, num_ranks: int) -> None:
    """Raise `InputError` for a number of ranks over which the model's attention heads cannot be split evenly."""
    heads = int(config.num_attention_heads)
    if num_ranks < 1 or heads % num_ranks:
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise InputError(f"{heads} attention heads cannot be split over {num_ranks} ranks: use one of {sizes}")


def shard_model(loaded: LoadedModel, num_ranks: int) -> LoadedModel:
    """The part of `loaded` that belongs to this rank of the default process group, all of whose ranks call this.

    The whole model is loaded where it is called, and is used up: weights that are split replace the whole ones. Raises
    `InputError` as `check_heads` does.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    check_heads(loaded.config, num_ranks)
    if num_ranks == 1:
        return loaded
    model = loaded.model
    config, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=num_ranks, tp_plan="auto"))
    with torch.no_grad():
        model = type(model).maybe_distribute_model(model, config, mesh)
        for parameter in model.parameters():
            # A part is at first a view of the whole, which would stay in memory for it.
            if hasattr(parameter, "to_local"):
                parameter.data = parameter.data.clone()
    return replace(loaded, model=model)
