"""The checkpoint as stock transformers classes load it, and the check that they do."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV32Config, PreTrainedTokenizerFast

from hisparse.evaluation.prompts import FinderPrompt
from tools.finder.model import Finder, FinderShape

MAX_BYTES = 12_000_000
WEIGHTS = "model.safetensors"


def rounded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict as it is shipped: bfloat16, on the CPU."""
    return {name: values.detach().to("cpu", torch.bfloat16).contiguous() for name, values in state.items()}


def export(model: Finder, tokenizer: Any, folder: Path) -> None:
    """Write weights, configuration and tokenizer to `folder`. Raises `ValueError` if the weights are over 12 MB."""
    state = rounded(model.state_dict())
    size = sum(values.numel() * values.element_size() for values in state.values())
    if size > MAX_BYTES:
        raise ValueError(f"the weights have {size} bytes; at most {MAX_BYTES} are shipped")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    # The library writes it for its owner alone.
    (folder / WEIGHTS).chmod(0o644)
    config = DeepseekV32Config(**model.shape.config(), architectures=["DeepseekV32ForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=model.shape.max_positions,
    )
    wrapped.save_pretrained(folder)


def served(model: Finder, device: torch.device) -> Finder:
    """The model as it will run: weights rounded to bfloat16; arithmetic in bfloat16 on a GPU, in float32 on a CPU.

    As in the stock class, the indexers' head weights are computed in float32.
    """
    copy = Finder(model.shape)
    copy.load_state_dict({name: values.float() for name, values in rounded(model.state_dict()).items()})
    if device.type == "cuda":
        copy.bfloat16()
        for layer in copy.blocks:
            layer.self_attn.indexer.weights_proj.float()
    return copy.to(device).eval()


def load_weights(model: Finder, folder: Path) -> None:
    """Take the weights of an exported checkpoint as a start. Raises what torch raises if the shapes differ."""
    model.load_state_dict({name: values.float() for name, values in load_file(folder / WEIGHTS).items()})


def stock_check(folder: Path, prompts: Sequence[FinderPrompt], device: torch.device) -> dict[str, Any]:
    """Load `folder` with stock classes and answer `prompts` with their own `generate`.

    Gives the number of right answers, whether the text is tokenised alike, and the largest difference of logits
    between the stock class and ours in float32 on a short text, beside the largest logit.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    load: Any = AutoModelForCausalLM.from_pretrained
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load(folder, dtype=dtype, attn_implementation="eager", local_files_only=True).to(device).eval()
    right = alike = 0
    for prompt in prompts:
        ids = tokenizer(prompt.text, return_tensors="pt").input_ids.to(device)
        alike += ids.shape[1] == prompt.num_tokens
        output = model.generate(ids, max_new_tokens=len(prompt.answer) - 1, do_sample=False, pad_token_id=0)
        right += tokenizer.decode(output[0, ids.shape[1] :]) == prompt.answer
    exact = load(folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True).eval()
    difference, scale = _logit_difference(exact, folder)
    return {
        "prompts": len(prompts),
        "hits": right,
        "tokenised_alike": alike,
        "max_logit_difference": difference,
        "max_logit": scale,
    }


@torch.no_grad()
def _logit_difference(stock: Any, folder: Path) -> tuple[float, float]:
    shape = shape_of(stock.config)
    ours = Finder(shape)
    load_weights(ours, folder)
    rng = random.Random(0)
    tokens = torch.tensor([[rng.randrange(shape.vocab) for _ in range(2 * shape.topk)]])
    theirs = stock(tokens).logits
    return float((ours.lm_head(ours(tokens, shape.topk)[0]) - theirs).abs().max()), float(theirs.abs().max())


def shape_of(config: Any) -> FinderShape:
    """The shape that a stock configuration describes: the inverse of `FinderShape.config`."""
    return FinderShape(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        q_lora=config.q_lora_rank,
        kv_lora=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        topk=config.index_topk,
        max_positions=config.max_position_embeddings,
        rope_theta=config.rope_parameters["rope_theta"],
    )
