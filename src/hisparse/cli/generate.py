"""`hisparse generate`: continue prompts with part of the KV in host memory, and say where it was.

This file holds the options and nothing else; `hisparse.cli.session` runs them. Neither loads torch or the engine before
it must, so that help and most mistakes answer at once.
"""

from pathlib import Path
from typing import Annotated

import typer

from hisparse.cli.options import (
    BlockSizeOption,
    ChunkSizeOption,
    CpuTierOption,
    Device,
    DeviceKVOption,
    DeviceOption,
    DeviceOptions,
    DtypeOption,
    GenerateOptions,
    HostBackingOption,
    HostPoolOption,
    HotRowsOption,
    KVDtypeOption,
    MetricsPortOption,
    ModelArgument,
    OffloadCapacityOption,
    OffloadDirOption,
    OutputOptions,
    SamplingOptions,
    SeedOption,
    StagingRowsOption,
    StopOption,
    StopTokenOption,
    TemperatureOption,
    TensorParallelOption,
    TopKOption,
    TopPOption,
    WriteBackOption,
    named_path,
)
from hisparse.cli.session import run_generate
from hisparse.config import WriteBack


def generate(
    model: ModelArgument,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A prompt; may be repeated.")] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(parser=named_path, metavar="FILE", help="A UTF-8 file with one prompt; may be repeated."),
    ] = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option(metavar="IDS", help="A prompt as token ids, 72,101,108; may be repeated.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt, at most.")] = 64,
    device: DeviceOption = Device.CPU,
    dtype: DtypeOption = None,
    kv_dtype: KVDtypeOption = "auto",
    device_kv: DeviceKVOption = None,
    host_pool: HostPoolOption = "1GiB",
    hot_rows: HotRowsOption = None,
    staging_rows: StagingRowsOption = None,
    block_size: BlockSizeOption = None,
    write_back: WriteBackOption = WriteBack.PRESSURE,
    cpu_tier: CpuTierOption = None,
    offload_dir: OffloadDirOption = None,
    offload_capacity: OffloadCapacityOption = None,
    tp: TensorParallelOption = 1,
    host_backing: HostBackingOption = None,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that run at once, at most.")] = 8,
    chunk_size: ChunkSizeOption = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = 0,
    stop: StopOption = None,
    stop_token: StopTokenOption = None,
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
    metrics_port: MetricsPortOption = None,
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
            cpu_tier=cpu_tier,
            offload_dir=offload_dir,
            offload_capacity=offload_capacity,
            num_ranks=tp,
            host_backing=host_backing,
        ),
        output=OutputOptions(verify=verify, json=json, stream=stream, metrics_port=metrics_port),
    )
    raise typer.Exit(run_generate(options))
