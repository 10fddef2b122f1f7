"""Models that need no download.

Two tiny ones, one per architecture, are made where they are loaded, with weights that are the same on every machine.
They are shaped so that what matters at full size also happens here: dense and mixture layers, leaders and followers,
many index heads (the scores pass a ReLU, and few heads would leave most of them tied at zero), a selection much
smaller than the context, and a KV row several times larger than the index key.

The third, the finder, is trained: a checkpoint directory among the package's files.
"""

import math
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV32Config, GlmMoeDsaConfig, PreTrainedConfig

from hisparse.errors import InputError

BUILTIN_PREFIX = "builtin:"
TINY_MODELS = ("builtin:tiny-v32", "builtin:tiny-glm")
"""Those that are made where they are loaded."""

FINDER = "builtin:finder"
BUILTIN_MODELS = (FINDER, *TINY_MODELS)
FINDER_FOLDER = Path(__file__).parent / "builtin_data" / "finder"
"""Where its checkpoint lies, trained by `tools/train_finder.py`."""

_UNIFORMS = 4
"""Uniform draws summed per weight: their sum is close to normal, with a standard deviation of `sqrt(4/12)` ranges."""
_RANGE = 1 << 16

_SHARED: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 32,
    "index_n_heads": 16,
    "index_head_dim": 24,
    "max_position_embeddings": 131072,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def builtin_config(name: str) -> PreTrainedConfig:
    """The configuration of a built-in model. Raises `InputError` for a name that is not in `TINY_MODELS`."""
    if name == "builtin:tiny-v32":
        return DeepseekV32Config(**_SHARED, num_hidden_layers=3, first_k_dense_replace=1)
    if name == "builtin:tiny-glm":
        return GlmMoeDsaConfig(
            **_SHARED,
            num_hidden_layers=4,
            mlp_layer_types=["dense", "sparse", "dense", "sparse"],
            indexer_types=["full", "shared", "full", "shared"],
        )
    raise InputError(f"there is no model {name!r}: built in are {', '.join(BUILTIN_MODELS)}")


def builtin_model(name: str, dtype: torch.dtype) -> Any:
    """Build a built-in model on the CPU with its seeded weights, in evaluation mode.

    Weights are drawn in float64 and rounded to `dtype`, so that the bfloat16 model is the float32 one, rounded.
    Raises `InputError` for an unknown name.
    """
    model = AutoModelForCausalLM.from_config(builtin_config(name), dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_weights(name, parameter_name, parameter))
    return model.eval()


def _weights(model_name: str, name: str, like: torch.Tensor) -> torch.Tensor:
    draw = _normal(f"{model_name}/{name}", like.shape)
    if like.dim() == 1:
        return draw * 0.1 if name.endswith("bias") else 1.0 + 0.1 * draw
    if "embed_tokens" in name:
        return draw
    scaled = draw * (_gain(name) / math.sqrt(like.shape[-1]))
    return scaled * _printable_rows().unsqueeze(1) if "lm_head" in name else scaled


def _gain(name: str) -> float:
    """Standard deviation of a layer's output per unit of its input: where untrained models need more contrast."""
    if "lm_head" in name:
        return 2.0
    return 2.0 if "q_b_proj" in name or "kv_a_proj" in name else 1.0


def _printable_rows() -> torch.Tensor:
    """One factor per byte that keeps what the models say in printable ASCII: they say nothing, but legibly."""
    factors = torch.full((256,), 0.1, dtype=torch.float64)
    factors[32:127] = 1.0
    return factors


def _normal(key: str, shape: torch.Size) -> torch.Tensor:
    """Float64 of about unit variance. Sums of integers: no rounding, so no dependence on machine or vector width."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    total = torch.randint(_RANGE, (_UNIFORMS, *shape), generator=generator, dtype=torch.int64).sum(0)
    centred = total.double() - _UNIFORMS * (_RANGE - 1) / 2
    return centred / (_RANGE * math.sqrt(_UNIFORMS / 12))
