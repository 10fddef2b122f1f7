"""A start that can already look up, set by hand, for when the ordinary start does not get there (`--wire`).

Three heads are set; everything else stays random and everything is trained afterwards.
- Layer 0, heads 0 and 1 look one and two tokens back, by rotation alone, and copy what they find into places of their
  own in the residual.
- Layer 1, head 0 compares "one back" of its query with "two back" of its keys: in `lantern is 48213` the row of `is`
  finds the row of the first digit. Its value says which token stands there, in a place that the output layer reads.
"""

import torch
from torch import nn

from tools.finder.model import Finder, rotation

_CONSTANT = 2.0
"""What every token's first embedding element is: rotation alone needs something that does not depend on the token."""
_SHARPNESS = 4.0
_MATCH = 2.0
_VOICE = 1.0


@torch.no_grad()
def wire(model: Finder) -> None:
    """Set the look-up heads of `model`, in place. It needs at least two layers and two heads.

    The residual is cut: its first half holds embeddings (element 0 is constant), then come "one back", "two back" and
    "found", each `width` elements wide.
    """
    shape = model.shape
    width = min(shape.nope, shape.kv_lora // 2, shape.hidden // 8, shape.q_lora // 2)
    half = shape.hidden // 2
    one_back, two_back, found = (slice(half + i * width, half + (i + 1) * width) for i in range(3))
    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = _CONSTANT
    embedding[:, half:] = 0.0
    # Nothing shared but the constant, and all of one length, so that a layer's norm leaves it the same for all tokens.
    embedding[:, 1:half] -= embedding[:, 1:half].mean(0)
    embedding[:, 1:half] *= (half - 1) ** 0.5 / embedding[:, 1:half].norm(dim=1, keepdim=True)
    identity = nn.init.orthogonal_(torch.empty(width, half - 1)) * (half / width) ** 0.5
    identity = identity.to(embedding.device)
    _look_back(model, identity, (one_back, two_back))
    _look_up(model, identity, (one_back, two_back, found))
    model.lm_head.weight[:, found] = embedding[:, 1:half] @ identity.T * (_VOICE / width**0.5)


def _look_back(model: Finder, identity: torch.Tensor, places: tuple[slice, slice]) -> None:
    """Layer 0: head h attends to what stands h+1 tokens back and writes its identity to `places[h]`."""
    shape, attention = model.shape, model.blocks[0].self_attn
    width = identity.shape[0]
    keys = attention.kv_a_proj_with_mqa.weight
    keys[:width] = 0.0
    keys[:width, 1 : identity.shape[1] + 1] = identity
    keys[shape.kv_lora :] = 0.0
    # Pairs (even, odd) with the even part constant: the key of a position is its rotation.
    keys[shape.kv_lora :: 2, 0] = _SHARPNESS / _CONSTANT
    attention.q_a_proj.weight[0] = 0.0
    attention.q_a_proj.weight[0, 0] = 2.0
    queries = attention.q_b_proj.weight.unflatten(0, (shape.heads, shape.head))
    values = attention.kv_b_proj.weight.unflatten(0, (shape.heads, -1))
    output = attention.o_proj.weight.unflatten(1, (shape.heads, shape.head))
    for head, place in enumerate(places):
        cos, sin = rotation(head + 2, shape, queries.device)
        queries[head] = 0.0
        # The query of position p is turned back by the offset, so that it is the key of position p - offset.
        queries[head, shape.nope :: 2, 0] = _SHARPNESS * cos[head + 1]
        queries[head, shape.nope + 1 :: 2, 0] = -_SHARPNESS * sin[head + 1]
        values[head] = 0.0
        output[:, head] = 0.0
        for element in range(width):
            values[head, shape.nope + element, element] = 1.0
            output[place.start + element, head, element] = 1.0


def _look_up(model: Finder, identity: torch.Tensor, places: tuple[slice, slice, slice]) -> None:
    """Layer 1: head 0 matches "one back" with "two back" and writes the identity of what it found."""
    shape, attention = model.shape, model.blocks[1].self_attn
    one_back, two_back, found = places
    width = identity.shape[0]
    eye = torch.eye(width, device=identity.device)
    attention.q_a_proj.weight[:width] = 0.0
    attention.q_a_proj.weight[:width, one_back] = eye
    latent = attention.kv_a_proj_with_mqa.weight
    latent[: 2 * width] = 0.0
    latent[:width, two_back] = eye
    latent[width : 2 * width, 1 : identity.shape[1] + 1] = identity
    queries = attention.q_b_proj.weight.unflatten(0, (shape.heads, shape.head))
    queries[0] = 0.0
    queries[0, :width, :width] = _MATCH * eye
    both = attention.kv_b_proj.weight.unflatten(0, (shape.heads, -1))
    both[0] = 0.0
    both[0, :width, :width] = _MATCH * eye
    both[0, shape.nope : shape.nope + width, width : 2 * width] = eye
    output = attention.o_proj.weight.unflatten(1, (shape.heads, shape.head))
    output[:, 0] = 0.0
    output[found, 0, :width] = 2.0 * eye
