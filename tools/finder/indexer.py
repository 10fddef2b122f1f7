"""The finder's indexer: the stock score, an exact selection, and the loss that teaches it what attention looks at."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

_SCORE_ELEMENTS = 1 << 28
"""Bound on the per-head scores of one pass over query rows."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One layer's index queries `[batch, length, heads, dim]`, head weights `[batch, length, heads]` (both scales of
    the stock score are in them) and keys `[batch, length, dim]`, all float32.
    """

    queries: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor


def rotate_halves(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The stock half-split rotation of the last dimension. `cos`, `sin`: half as wide as it."""
    first, second = values.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def scores_of(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`sum_h weights[r, h] * relu(queries[r, h] · keys[t])`: `[batch, rows, tokens]`.

    `queries` `[batch, rows, heads, dim]`, `weights` `[batch, rows, heads]`, `keys` `[batch, tokens, dim]`.
    """
    by_head = (queries.flatten(1, 2) @ keys.transpose(-1, -2)).unflatten(1, queries.shape[1:3])
    by_head = functional.relu(by_head, inplace=not torch.is_grad_enabled())
    return (weights.unsqueeze(-2) @ by_head).squeeze(-2)


class Indexer(nn.Module):
    """Stock parameters. Its inputs are detached by the caller, so its loss moves nothing but these."""

    def __init__(self, hidden: int, q_lora: int, heads: int, dim: int, rope: int) -> None:
        super().__init__()
        self.heads, self.dim, self.rope = heads, dim, rope
        self.wq_b = nn.Linear(q_lora, heads * dim, bias=False)
        self.wk = nn.Linear(hidden, dim, bias=False)
        self.k_norm = nn.LayerNorm(dim, eps=1e-6)
        self.weights_proj = nn.Linear(hidden, heads, bias=False)

    def forward(self, hidden: torch.Tensor, q_resid: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Asked:
        """`hidden` `[batch, length, hidden]`, `q_resid` `[batch, length, q_lora]`, `cos`, `sin` `[length, rope/2]`."""
        queries = self.wq_b(q_resid).unflatten(-1, (self.heads, self.dim))
        keys = self.k_norm(self.wk(hidden)).to(queries.dtype)
        cos, sin = cos.to(queries.dtype), sin.to(queries.dtype)
        q_rope = rotate_halves(queries[..., : self.rope], cos[:, None], sin[:, None])
        k_rope = rotate_halves(keys[..., : self.rope], cos, sin)
        with torch.autocast(hidden.device.type, enabled=False):
            weights = functional.linear(hidden.to(self.weights_proj.weight.dtype), self.weights_proj.weight).float()
        return Asked(
            torch.cat([q_rope, queries[..., self.rope :]], dim=-1).float(),
            weights * (self.heads * self.dim) ** -0.5,
            torch.cat([k_rope, keys[..., self.rope :]], dim=-1).float(),
        )

    def loss(self, asked: Asked, probes: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Mean KL divergence of the softmax of the probed rows' scores from `teacher` `[batch, probes, length]`."""
        with torch.autocast(teacher.device.type, enabled=False):
            queries = asked.queries.gather(1, probes[..., None, None].expand(-1, -1, self.heads, self.dim))
            weights = asked.weights.gather(1, probes[..., None].expand(-1, -1, self.heads))
            scores = scores_of(queries, weights, asked.keys)
            future = torch.arange(scores.shape[-1], device=scores.device) > probes[..., None]
            learned = scores.masked_fill(future, torch.finfo(scores.dtype).min).log_softmax(-1)
            divergence = torch.xlogy(teacher, teacher) - teacher * learned
        return divergence.sum(-1).mean()

    @torch.no_grad()
    def select(self, asked: Asked, topk: int) -> torch.Tensor:
        """The positions of each row's `topk` highest scores: int64 `[batch, length, min(topk, length)]`, unordered.

        Rows with fewer visible positions select later ones too, which attention leaves out.
        """
        batch, length = asked.keys.shape[:2]
        count = min(topk, length)
        selected = torch.zeros(batch, length, count, dtype=torch.int64, device=asked.keys.device)
        positions = torch.arange(length, device=asked.keys.device)
        step = max(16, _SCORE_ELEMENTS // (batch * length * self.heads))
        with torch.autocast(asked.keys.device.type, enabled=False):
            for first in range(0, length, step):
                rows = slice(first, min(first + step, length))
                # No row of this pass sees further; but there have to be `count` positions to choose from.
                visible = max(rows.stop, count)
                scores = scores_of(asked.queries[:, rows], asked.weights[:, rows], asked.keys[:, :visible])
                scores.masked_fill_(positions[:visible] > positions[rows, None], -torch.inf)
                selected[:, rows] = scores.topk(count, dim=-1, sorted=False).indices
        return selected
