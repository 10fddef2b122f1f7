"""The finder as plain torch: the stock `deepseek_v32` arithmetic under the stock parameter names, made to train fast.

Attention is dense, or sparse over an exact top-k as the stock class has it. The indexer, which stock classes run
without gradient, learns here from a loss of its own (`tools.finder.indexer`). Exported weights give the stock class
the same logits.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from tools.finder.indexer import Indexer

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class FinderShape:
    """Sizes of the model. `head` is both halves of a query's head, `nope + rope`, and of a value's."""

    vocab: int = 2048
    hidden: int = 256
    intermediate: int = 704
    layers: int = 4
    heads: int = 8
    q_lora: int = 128
    kv_lora: int = 64
    nope: int = 32
    rope: int = 32
    index_heads: int = 16
    index_dim: int = 64
    topk: int = 64
    max_positions: int = 65536
    rope_theta: float = 100000.0

    @property
    def head(self) -> int:
        return self.nope + self.rope

    def config(self) -> dict[str, Any]:
        """The fields of the checkpoint's `DeepseekV32Config`."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "first_k_dense_replace": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_lora,
            "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.head,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_dim,
            "index_topk": self.topk,
            "max_position_embeddings": self.max_positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            # There are no routed experts: every layer is dense. The smallest values that the class accepts.
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }


@dataclass(frozen=True, slots=True)
class Pass:
    """What holds for all layers of one forward.

    `cos`, `sin`: `[length, rope/2]`. `topk`: 0 for dense attention. `probes`: int64 `[batch, probes]`, query rows on
    which each indexer is compared with attention; None without that loss.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    topk: int
    probes: torch.Tensor | None
    window: bool = False


def norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The stock RMS norm: in float32, rounded to the input's dtype before the weight."""
    if values.dtype == weight.dtype == torch.float32:
        return functional.rms_norm(values, weight.shape, weight, EPSILON)
    wide = values.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(values.dtype)


def rotate_pairs(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The stock interleaved rotation: pairs `(0, 1), (2, 3), …` of the last dimension, given out half by half."""
    even, odd = values[..., 0::2], values[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


class RmsNorm(nn.Module):
    """Holds a norm's weight under its stock name."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return norm(values, self.weight)


class Attention(nn.Module):
    """Multi-head latent attention with an indexer."""

    def __init__(self, shape: FinderShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_a_proj = nn.Linear(shape.hidden, shape.q_lora, bias=False)
        self.q_a_layernorm = RmsNorm(shape.q_lora)
        self.q_b_proj = nn.Linear(shape.q_lora, shape.heads * shape.head, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden, shape.kv_lora + shape.rope, bias=False)
        self.kv_a_layernorm = RmsNorm(shape.kv_lora)
        self.kv_b_proj = nn.Linear(shape.kv_lora, shape.heads * (shape.nope + shape.head), bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False)
        self.indexer = Indexer(shape.hidden, shape.q_lora, shape.index_heads, shape.index_dim, shape.rope)

    def forward(self, hidden: torch.Tensor, step: Pass) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`hidden` `[batch, length, hidden]`. Returns the output and the indexer's loss, if it was asked for."""
        q_resid = self.q_a_layernorm(self.q_a_proj(hidden))
        query, key, value = self._project(hidden, q_resid, step)
        selected = loss = None
        if step.topk or step.probes is not None:
            asked = self.indexer(hidden.detach(), q_resid.detach(), step.cos, step.sin)
            if step.probes is not None:
                teacher = probe_attention(query.detach(), key.detach(), step.probes)
                loss = self.indexer.loss(asked, step.probes, teacher)
            if step.topk:
                selected = last_positions(hidden, step.topk) if step.window else self.indexer.select(asked, step.topk)
        mixed = attend(query, key, value, selected)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), loss

    def _project(
        self, hidden: torch.Tensor, q_resid: torch.Tensor, step: Pass
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = self.shape
        query = self.q_b_proj(q_resid).unflatten(-1, (shape.heads, shape.head)).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split([shape.kv_lora, shape.rope], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (shape.heads, -1)).transpose(1, 2)
        k_nope, value = expanded.split([shape.nope, shape.head], dim=-1)
        cos, sin = step.cos.to(query.dtype), step.sin.to(query.dtype)
        q_rope = rotate_pairs(query[..., shape.nope :], cos, sin)
        k_rope = rotate_pairs(k_rope, cos, sin).unsqueeze(1).expand(-1, shape.heads, -1, -1)
        return (
            torch.cat([query[..., : shape.nope], q_rope], dim=-1),
            torch.cat([k_nope, k_rope.to(k_nope.dtype)], dim=-1),
            value,
        )


class Mlp(nn.Module):
    """Gated feed-forward."""

    def __init__(self, shape: FinderShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, shape: FinderShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden)
        self.post_attention_layernorm = RmsNorm(shape.hidden)

    def forward(self, hidden: torch.Tensor, step: Pass) -> tuple[torch.Tensor, torch.Tensor | None]:
        mixed, loss = self.self_attn(self.input_layernorm(hidden), step)
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), loss


class Body(nn.Module):
    """Everything before the vocabulary: the stock name is `model`."""

    def __init__(self, shape: FinderShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden)


class Finder(nn.Module):
    """The whole model. Its state dict is the checkpoint."""

    def __init__(self, shape: FinderShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.apply(_initialise)
        with torch.no_grad():
            # Attention by distance alone needs a direction that all tokens share: there are no biases to give it one.
            # Without it the heads that look a few tokens back take several times as many steps to form.
            self.model.embed_tokens.weight += torch.randn(shape.hidden)
            self.lm_head.weight *= 0.3
        for layer in self.blocks:
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(last.weight, std=(last.in_features * 2 * shape.layers) ** -0.5)

    @property
    def blocks(self) -> list[Layer]:
        """The layers, from the first to the last."""
        return [cast(Layer, layer) for layer in self.model.layers]

    def forward(
        self, tokens: torch.Tensor, topk: int = 0, probes: torch.Tensor | None = None, window: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states before `lm_head`, `[batch, length, hidden]`, and the indexers' mean loss (0 without `probes`).

        `tokens`: int64 `[batch, length]`. `topk` 0 is dense attention. `window` replaces the indexers' choice by the
        last `topk` positions: the control of an evaluation.
        """
        cos, sin = rotation(tokens.shape[1], self.shape, tokens.device)
        step = Pass(cos, sin, topk, probes, window)
        hidden = self.model.embed_tokens(tokens)
        losses = [torch.zeros((), device=tokens.device)]
        for layer in self.blocks:
            hidden, loss = layer(hidden, step)
            if loss is not None:
                losses.append(loss)
        return self.model.norm(hidden), torch.stack(losses).sum() / len(self.blocks)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=1.0)


def rotation(length: int, shape: FinderShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions 0 … `length`-1: float32 `[length, rope/2]` each."""
    frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, shape.rope, 2, device=device).float() / shape.rope)
    angles = torch.arange(length, device=device).float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def probe_attention(query: torch.Tensor, key: torch.Tensor, probes: torch.Tensor) -> torch.Tensor:
    """Dense attention of the probed rows, averaged over heads: float32 `[batch, probes, length]`.

    `query`, `key`: `[batch, heads, length, dim]`; `probes`: int64 `[batch, probes]`.
    """
    heads, dim = query.shape[1], query.shape[-1]
    rows = query.gather(2, probes[:, None, :, None].expand(-1, heads, -1, dim))
    scores = (rows @ key.transpose(-1, -2)).float() * dim**-0.5
    future = torch.arange(key.shape[2], device=key.device) > probes[..., None]
    average: torch.Tensor = scores.masked_fill_(future[:, None], -torch.inf).softmax(-1).mean(1)
    return average


def last_positions(hidden: torch.Tensor, topk: int) -> torch.Tensor:
    """For every row the last `topk` positions up to its own: int64 `[batch, length, topk]`; early rows repeat."""
    length = hidden.shape[1]
    rows = torch.arange(length, device=hidden.device)[:, None] - torch.arange(topk, device=hidden.device)
    # A position before the first becomes one after the row, which attention leaves out.
    return torch.where(rows < 0, length - 1, rows).expand(hidden.shape[0], -1, -1)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selected: torch.Tensor | None) -> torch.Tensor:
    """Causal attention `[batch, heads, length, dim]`, over `selected` positions only if there are any.

    `selected`: int64 `[batch, length, k]`; positions after a row are left out, and each row must select itself or
    something before it.
    """
    if selected is None:
        dense: torch.Tensor = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return dense
    if not torch.is_grad_enabled():
        return _attend_gathered(query, key, value, selected)
    length = query.shape[2]
    mask = torch.zeros(*selected.shape[:2], length, dtype=torch.bool, device=query.device)
    mask = mask.scatter_(-1, selected, True).tril_()
    sparse: torch.Tensor = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
    return sparse


_GATHER_ELEMENTS = 1 << 28
"""Bound on the gathered keys and values of one pass over query rows."""


def _attend_gathered(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selected: torch.Tensor
) -> torch.Tensor:
    """The same by gathering: time and memory grow with `length * k`, not with its square. Without gradient."""
    batch, heads, length, dim = query.shape
    rows = torch.cat([key, value], dim=-1).transpose(1, 2)
    output = torch.empty_like(value)
    step = max(1, _GATHER_ELEMENTS // (selected.shape[2] * heads * 2 * dim))
    for sequence in range(batch):
        for first in range(0, length, step):
            chosen = selected[sequence, first : first + step]
            keys, values = rows[sequence][chosen].split([dim, value.shape[-1]], dim=-1)
            scores = torch.einsum("hrd,rkhd->rhk", query[sequence, :, first : first + step], keys).float() * dim**-0.5
            future = chosen > torch.arange(first, first + chosen.shape[0], device=chosen.device)[:, None]
            weights = scores.masked_fill_(future[:, None], -torch.inf).softmax(-1).to(values.dtype)
            output[sequence, :, first : first + step] = torch.einsum("rhk,rkhd->hrd", weights, values)
    return output
