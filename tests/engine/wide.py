"""A small random model whose rows are 512 + 64 wide, which is what packed rows need; the built-in models' are not."""

import functools
import math
import zlib

import torch
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig

from hisparse.engine import LoadedModel
from hisparse.engine.builtin import builtin_config
from hisparse.engine.models import geometry_of
from hisparse.engine.tokenizer import ByteTokenizer

LORA, ROPE = 512, 64
TOPK = 32


@functools.cache
def wide_model(dtype: str = "float32", device: str = "cpu", layers: int = 2) -> LoadedModel:
    """`layers` layers, every other one a follower, the last of each two a mixture. The same weights everywhere."""
    shape = builtin_config("builtin:tiny-glm").to_dict()
    for derived in ("layer_types", "qk_head_dim", "head_dim"):
        shape.pop(derived, None)
    shape.update(
        kv_lora_rank=LORA,
        qk_rope_head_dim=ROPE,
        index_head_dim=ROPE + 16,
        num_hidden_layers=layers,
        mlp_layer_types=["dense", "sparse"] * (layers // 2),
        indexer_types=["full", "shared"] * (layers // 2),
    )
    config = GlmMoeDsaConfig(**shape)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_weights(name, parameter))
    return LoadedModel(
        name="wide",
        model=model.eval().to(device),
        tokenizer=ByteTokenizer(),
        geometry=geometry_of(config, dtype),
        dtype=getattr(torch, dtype),
        eos_token_ids=(),
    )


def _weights(name: str, like: torch.Tensor) -> torch.Tensor:
    """Float32, about as contrasted as the built-in models' are."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if like.dim() == 1:
        return drawn * 0.1 if name.endswith("bias") else 1.0 + 0.1 * drawn
    if "embed_tokens" in name:
        return drawn
    gain = 2.0 if any(part in name for part in ("lm_head", "q_b_proj", "kv_a_proj")) else 1.0
    return drawn * (gain / math.sqrt(like.shape[-1]))
