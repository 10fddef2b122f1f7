"""A model that answers every question from its first step on, because all of it is set by hand.

Layer 0 has a head for each of the last `REACH` tokens, which copies that token's code into a place of its own. Layer 1
looks for the position whose preceding tokens are those up to here, and says what stands there: in the row of a digit,
the name is still within reach. The code of a token is a row of signs.
"""

import random
from pathlib import Path

import torch

from hisparse.evaluation.prompts import library_files, read_sources
from tools.finder.export import export
from tools.finder.model import Attention, Finder, FinderShape, rotation
from tools.finder.vocabulary import train_tokenizer

CODE = 32
REACH = 6
PLACES = CODE * (REACH + 1)
"""Elements of a token's own code and those of the tokens before it: elements 1 … of the residual, after a constant."""

SHAPE = FinderShape(
    vocab=1024, hidden=1 + PLACES + CODE, intermediate=16, layers=2, heads=REACH, q_lora=CODE * REACH,
    kv_lora=PLACES, nope=CODE * REACH, rope=32, index_heads=1, index_dim=32 + CODE * REACH, topk=32,
    max_positions=16384,
)  # fmt: skip

_SHARPNESS = 300.0
_OWN, _FOUND = slice(1, 1 + CODE), slice(1 + PLACES, 1 + PLACES + CODE)
_LAST = slice(1, 1 + CODE * REACH)
"""Codes of the tokens 0 … REACH-1 back."""
_BEFORE = slice(1 + CODE, 1 + PLACES)
"""Codes of the tokens 1 … REACH back."""


def write_checkpoint(folder: Path) -> None:
    """The model and a tokenizer for it, as stock classes load them. Takes two seconds."""
    texts = read_sources(library_files(held_out=False), 300_000, random.Random(0))
    export(wired_finder(), train_tokenizer(texts, SHAPE.vocab), folder)


@torch.no_grad()
def wired_finder() -> Finder:
    """The model."""
    model = Finder(SHAPE)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.zero_()
    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = 1.0
    embedding[:, _OWN] = torch.randn(SHAPE.vocab, CODE, generator=torch.Generator().manual_seed(3)).sign()
    model.lm_head.weight[:, _FOUND] = embedding[:, _OWN]
    for layer, filled in zip(model.blocks, (CODE, PLACES), strict=True):
        # Undo the norms: what they divide by is the same for all tokens.
        layer.input_layernorm.weight.fill_(((1 + filled) / SHAPE.hidden) ** 0.5)
        layer.self_attn.kv_a_layernorm.weight.fill_((filled / PLACES) ** 0.5)
        layer.self_attn.indexer.weights_proj.weight[:, 0] = 1.0
    _look_back(model.blocks[0].self_attn)
    _look_up(model.blocks[1].self_attn)
    return model


def _look_back(attention: Attention) -> None:
    """Head h attends to the token h+1 back, by rotation alone, and writes its code to place h+1."""
    attention.q_a_proj.weight[0, 0] = 1.0
    attention.kv_a_proj_with_mqa.weight[:CODE, _OWN] = torch.eye(CODE)
    attention.kv_a_proj_with_mqa.weight[SHAPE.kv_lora :: 2, 0] = 1.0
    queries = attention.q_b_proj.weight.unflatten(0, (SHAPE.heads, SHAPE.head))
    values = attention.kv_b_proj.weight.unflatten(0, (SHAPE.heads, -1))[:, SHAPE.nope :]
    outputs = attention.o_proj.weight.unflatten(1, (SHAPE.heads, SHAPE.head))
    cos, sin = rotation(REACH + 1, SHAPE, torch.device("cpu"))
    for head in range(REACH):
        queries[head, SHAPE.nope :: 2, 0] = _SHARPNESS * cos[head + 1]
        queries[head, SHAPE.nope + 1 :: 2, 0] = -_SHARPNESS * sin[head + 1]
        values[head, :CODE, :CODE] = torch.eye(CODE)
        place = 1 + CODE * (head + 1)
        outputs[place : place + CODE, head, :CODE] = torch.eye(CODE)
    # The indexer scores nearness: its key is the same everywhere, turned by the position.
    half = SHAPE.rope // 2
    attention.indexer.wq_b.weight[:half, 0] = 1.0
    attention.indexer.k_norm.weight.zero_()
    attention.indexer.k_norm.bias.zero_()
    attention.indexer.k_norm.bias[:half] = 1.0


def _look_up(attention: Attention) -> None:
    """Head 0 matches the last tokens with those before a position and says which token stands there."""
    width = CODE * REACH
    attention.q_a_proj.weight[:, _LAST] = torch.eye(width)
    attention.kv_a_proj_with_mqa.weight[:width, _BEFORE] = torch.eye(width)
    attention.kv_a_proj_with_mqa.weight[width : width + CODE, _OWN] = torch.eye(CODE)
    attention.q_b_proj.weight[:width] = 4.0 * torch.eye(width)
    key_value = attention.kv_b_proj.weight
    key_value[:width, :width] = torch.eye(width)
    key_value[SHAPE.nope : SHAPE.nope + CODE, width : width + CODE] = torch.eye(CODE)
    attention.o_proj.weight[_FOUND, :CODE] = torch.eye(CODE)
    attention.indexer.wq_b.weight[SHAPE.rope :] = torch.eye(width)
    attention.indexer.wk.weight[SHAPE.rope :, _BEFORE] = torch.eye(width)
