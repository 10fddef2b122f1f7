"""A sparse-attention model with random weights whose cache has the real shape, and whose selections have real locality.

Latents are 512 + 64 wide, index keys 128, one layer in four has an indexer. What surrounds them is small, so that
weights take little memory.

Random weights select at random. To select as trained models do, scores follow the calibrated trace: per token
`1.2*b + x_t + 0.28*noise`, with b static and normal and x_t autoregressive with correlation exp(-1/9) per step. An
exact LRU over 1, 2 and 4 times top-k then misses about 30, 13 and 6 %. Queries and keys make such scores by themselves:
a key is b and 63 normal numbers; a query is 1.2 and, over the root of 63, an autoregressive vector plus noise. The
indexer's own code runs, at its own cost: all that changes is what its query projection and its head weights answer,
after having computed what they would. Rotated elements of queries are zero, so rotation is done and has no effect.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig

from hisparse.engine import LoadedModel
from hisparse.engine.models import geometry_of
from hisparse.engine.tokenizer import ByteTokenizer

ROPE, KEY = 64, 128
STATIC, NOISE, CORRELATION = 1.2, 0.28, math.exp(-1 / 9)
LAYERS_PER_LEADER = 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that a benchmark may choose. `max_rows` decode rows have a trace of `trace_steps` steps each."""

    layers: int
    context: int
    topk: int
    hidden: int
    heads: int
    index_heads: int
    max_rows: int
    trace_steps: int


def synthetic_model(shape: ModelShape, device: torch.device, seed: int = 0) -> LoadedModel:
    """The model in bfloat16 on `device`, weights drawn there. The same seed gives the same trace on one device."""
    loaded = plain_model(shape, device, seed)
    for layer in range(0, shape.layers, LAYERS_PER_LEADER):
        indexer: Any = loaded.model.model.layers[layer].self_attn.indexer
        indexer.wq_b = TracedQueries(indexer.wq_b, shape, device, seed + layer)
        indexer.weights_proj = EvenWeights(indexer.weights_proj)
    return loaded


def plain_model(shape: ModelShape, device: torch.device, seed: int = 0) -> LoadedModel:
    """The same without the trace: it selects as its random weights have it."""
    torch.manual_seed(seed)
    config = _config(shape)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    geometry = geometry_of(config, "bfloat16")
    return LoadedModel("synthetic", model.eval(), ByteTokenizer(), geometry, torch.bfloat16, ())


def index_keys(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Random keys, bfloat16 `[num_tokens, 128]`, as `TracedQueries` asks them."""
    return torch.randn((num_tokens, KEY), dtype=torch.bfloat16, device=device)


class TracedQueries(torch.nn.Module):
    """A query projection that computes, and then answers from the trace: row i of a step is one request's query."""

    trace: torch.Tensor
    step: torch.Tensor

    def __init__(self, projection: torch.nn.Module, shape: ModelShape, device: torch.device, seed: int) -> None:
        super().__init__()
        self.projection = projection
        self.heads = shape.index_heads
        # The step is counted on the device, so that a replayed graph moves on as well.
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64, device=device))
        self.register_buffer("trace", _trace(shape, device, seed))

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        self.projection(residual)
        self.step.add_(1).remainder_(self.trace.shape[0])
        now = self.trace.index_select(0, self.step)[:, : residual.shape[1]]
        return now.repeat(1, 1, self.heads)


class EvenWeights(torch.nn.Module):
    """Head weights that are computed, and then all one: no head takes a score below zero."""

    def __init__(self, projection: Any) -> None:
        super().__init__()
        self.projection = projection

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.projection.weight
        return weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(self.projection(hidden))


def _trace(shape: ModelShape, device: torch.device, seed: int) -> torch.Tensor:
    """Queries, bfloat16 `[trace_steps, max_rows, 128]`."""
    generator = torch.Generator(device).manual_seed(seed)
    width = KEY - ROPE - 1

    def normal() -> torch.Tensor:
        return torch.randn((shape.max_rows, width), generator=generator, device=device)

    queries = torch.zeros((shape.trace_steps, shape.max_rows, KEY), dtype=torch.bfloat16, device=device)
    queries[:, :, ROPE] = STATIC
    state = normal()
    for step in range(shape.trace_steps):
        state = CORRELATION * state + math.sqrt(1 - CORRELATION**2) * normal()
        queries[step, :, ROPE + 1 :] = ((state + NOISE * normal()) / math.sqrt(width)).to(torch.bfloat16)
    return queries


def _config(shape: ModelShape) -> Any:
    kinds = ["full" if layer % LAYERS_PER_LEADER == 0 else "shared" for layer in range(shape.layers)]
    return GlmMoeDsaConfig(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        moe_intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=512,
        q_lora_rank=max(64, shape.hidden // 2),
        qk_nope_head_dim=128,
        qk_rope_head_dim=ROPE,
        v_head_dim=128,
        index_topk=shape.topk,
        index_n_heads=shape.index_heads,
        index_head_dim=KEY,
        mlp_layer_types=["dense"] * shape.layers,
        indexer_types=kinds,
        max_position_embeddings=max(131072, shape.context),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
