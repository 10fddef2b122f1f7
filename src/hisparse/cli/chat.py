"""`hisparse chat`: talk with a model, and see what of the conversation's KV was reused, and from where.

This file holds the options and nothing else; `hisparse.cli.chat_session` runs them.
"""

from typing import Annotated

import typer

from hisparse.cli.chat_session import DEFAULT_CONTEXT, run_chat
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
)
from hisparse.config import WriteBack


def chat(
    model: ModelArgument,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 256,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=f"Tokens of the whole conversation, at most. [default: {DEFAULT_CONTEXT}, or the model's positions if "
            "they are fewer]",
        ),
    ] = None,
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
    chunk_size: ChunkSizeOption = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = 0,
    stop: StopOption = None,
    stop_token: StopTokenOption = None,
    metrics_port: MetricsPortOption = None,
) -> None:
    """Hold a conversation with a DeepSeek-V3.2 or GLM-5 model, one line a turn, and say what each turn reused.

    The whole conversation is the prompt of every turn; what the caches still hold of it is not computed again. Models
    without a chat template go on where your line ends, up to the end of theirs.

    /quit, Ctrl-D or the end of the input leaves, /reset forgets the conversation, /stats says where its KV is. Ctrl-C
    ends an answer; twice, it leaves.
    """
    options = GenerateOptions(
        model=model,
        prompts=(),
        prompt_files=(),
        prompt_ids=(),
        sampling=SamplingOptions(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(stop_token or ()),
            ignore_eos=False,
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
            max_running=1,
            chunk_tokens=chunk_size,
            cpu_tier=cpu_tier,
            offload_dir=offload_dir,
            offload_capacity=offload_capacity,
            num_ranks=tp,
            host_backing=host_backing,
        ),
        output=OutputOptions(verify=False, json=False, stream=True, metrics_port=metrics_port),
    )
    raise typer.Exit(run_chat(options, context))
