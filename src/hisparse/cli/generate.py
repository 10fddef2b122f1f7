"""`hisparse generate`: continue prompts with part of the KV in host memory, and say where it was.

This file holds the options and nothing else; `hisparse.cli.session` runs them. Neither loads torch or the engine before
it must, so that help and most mistakes answer at once.
"""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from hisparse.cli.options import DeviceOptions, GenerateOptions, OutputOptions, SamplingOptions
from hisparse.cli.session import run_generate
from hisparse.config import KVDtype, WriteBack


class Device(Enum):
    """Where the model and its device KV live."""

    CPU = "cpu"
    CUDA = "cuda"


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A checkpoint directory, builtin:finder, builtin:tiny-v32 or builtin:tiny-glm."
        ),
    ],
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A prompt; may be repeated.")] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A UTF-8 file with one prompt; may be repeated.")
    ] = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option(metavar="IDS", help="A prompt as token ids, 72,101,108; may be repeated.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt, at most.")] = 64,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.CPU,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Element type of weights and KV: float32, bfloat16 or float16. [default: float32 for built-in "
            "models, bfloat16 otherwise]",
        ),
    ] = None,
    kv_dtype: Annotated[
        KVDtype,
        typer.Option(
            help="How KV rows are stored: in the dtype of the weights, or packed in 656 bytes (latents of 512 + 64)."
        ),
    ] = "auto",
    device_kv: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Device memory for resident and hot KV: a size (512KiB), a share of all KV (15%), or all. [default: "
            "25%, or more where that is too little to decode every running request at once]",
        ),
    ] = None,
    host_pool: Annotated[str, typer.Option(metavar="SIZE", help="Usable host memory for KV.")] = "1GiB",
    hot_rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Device rows per request that cache host rows. [default: 2 x top-k]"),
    ] = None,
    staging_rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Device rows through which prefill reads host pages. [default: 4 x top-k]"),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens per page. [default: 16 for built-in models, 64 otherwise]"),
    ] = None,
    write_back: Annotated[
        WriteBack,
        typer.Option(help="Copy a full page to the host when its block is needed, as soon as it is full, or never."),
    ] = WriteBack.PRESSURE,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that run at once, at most.")] = 8,
    chunk_size: Annotated[int, typer.Option(min=1, help="Prompt tokens per step, at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text that ends a request; may be repeated.")
    ] = None,
    stop_token: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="Token that ends a request; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate past the end-of-text token.")] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare with stock transformers and with everything resident; exit 1 on a difference.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text and table.")] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Write the text of the only prompt as it comes, instead of bars.")
    ] = False,
) -> None:
    """Continue prompts with a DeepSeek-V3.2 or GLM-5 model while most of the KV cache is in host memory.

    Prompts are numbered in the order --prompt, --prompt-file, --prompt-ids. Sizes are written like 512KiB, 64MiB or
    1.5GiB. Ctrl-C prints what there is so far.
    """
    options = GenerateOptions(
        model=model,
        prompts=tuple(prompt or ()),
        prompt_files=tuple(prompt_file or ()),
        prompt_ids=tuple(prompt_ids or ()),
        sampling=SamplingOptions(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(stop_token or ()),
            ignore_eos=ignore_eos,
        ),
        device=DeviceOptions(
            device=device.value,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device_kv=device_kv,
            host_pool=host_pool,
            hot_rows=hot_rows,
            staging_rows=staging_rows,
            block_size=block_size,
            write_back=write_back,
            max_running=max_running,
            chunk_tokens=chunk_size,
        ),
        output=OutputOptions(verify=verify, json=json, stream=stream),
    )
    raise typer.Exit(run_generate(options))
