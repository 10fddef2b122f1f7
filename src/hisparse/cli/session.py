"""One `hisparse generate` from options to exit code: check, load, run, verify, report."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from hisparse.cli.budget import EVERYTHING, Workload, check_budget, device_budget
from hisparse.cli.interrupts import EXIT_INTERRUPTED
from hisparse.cli.metrics import metrics_for
from hisparse.cli.options import DeviceOptions, GenerateOptions, OutputOptions, SamplingOptions
from hisparse.cli.progress import RunProgress, VerifyProgress, on_terminal
from hisparse.cli.prompts import Prompt, encode_prompts, read_prompts, require_room, require_text
from hisparse.cli.render import describe_mismatch, print_table, print_texts, visible
from hisparse.cli.report import RunReport, report_json
from hisparse.cli.streams import complain
from hisparse.config import ModelGeometry, WriteBack, parse_size
from hisparse.errors import InputError

if TYPE_CHECKING:
    from hisparse.engine import Engine, EngineConfig, EngineMeter, LoadedModel, SamplingParams, TensorParallel
    from hisparse.engine.verify import VerifyResult
    from hisparse.offload.config import OffloadConfig

EXIT_DONE = 0
EXIT_DIFFERENT = 1

DEFAULT_HOT_FACTOR = 2
DEFAULT_STAGING_FACTOR = 4
DEFAULT_CPU_TIER = "256MiB"
DEFAULT_OFFLOAD_CAPACITY = "16GiB"


def run_generate(options: GenerateOptions) -> int:
    """Run the command and return its exit code: 0, 1 when a verification found a difference, 130 when interrupted.

    Raises `InputError` and `BackendError`, with everything that can be checked without a model checked first.
    """
    prompts = read_prompts(options.prompts, options.prompt_files, options.prompt_ids)
    check_options(options)
    _check_output(options.output, len(prompts))

    with metrics_for(options.output.metrics_port) as meter:
        return _run(options, prompts, meter)


def _run(options: GenerateOptions, prompts: Sequence[Prompt], meter: "EngineMeter | None") -> int:
    from hisparse.engine import Engine

    params = sampling_params(options.sampling)
    loaded = load(options)
    prompt_ids = encode_prompts(prompts, loaded.tokenizer.encode)
    require_room(prompts, prompt_ids, params.max_tokens, loaded.max_tokens)
    config = engine_config(options, loaded.geometry_for(options.device.kv_dtype), [len(ids) for ids in prompt_ids])
    report, interrupted = None, False
    try:
        with Engine(loaded, config, meter=meter) as engine:
            _add_requests(engine, prompts, prompt_ids, params)
            interrupted = not _drive(engine, options, prompt_ids)
            report = RunReport(engine.results(), engine.stats())
        if options.output.verify and not interrupted:
            if config.parallel is not None:
                loaded = load(options, with_weights=True)
            report = RunReport(report.results, report.stats, _verify(loaded, prompt_ids, params, config, report))
    except KeyboardInterrupt:
        if report is None:
            raise
        interrupted = True
    _print(report, options)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_DIFFERENT if report.verified_different else EXIT_DONE


def _add_requests(
    engine: "Engine", prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], params: "SamplingParams"
) -> None:
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        try:
            engine.add_request(ids, params)
        except InputError as error:
            raise InputError(f"{prompt.label}: {error}") from error


def load(options: GenerateOptions, *, with_weights: bool = False) -> "LoadedModel":
    """The model; where other processes compute it, without its weights, unless they are asked for.

    Raises `InputError` and `BackendError` as `load_model` does.
    """
    if options.device.num_ranks > 1 and not with_weights:
        from hisparse.engine import describe_model

        return describe_model(options.model, options.dtype)
    from hisparse.engine import load_model

    return load_model(options.model, options.dtype, options.device.device)


def engine_config(options: GenerateOptions, model: ModelGeometry, prompt_tokens: Sequence[int]) -> "EngineConfig":
    """The engine's configuration, with every default that depends on the model or the prompts filled in.

    `model` is the geometry of rows as they are stored, `prompt_tokens` are the lengths of the prompts. Raises
    `InputError` for sizes that do not parse.
    """
    from hisparse.engine import EngineConfig

    sizes = options.device
    hot_rows = sizes.hot_rows if sizes.hot_rows is not None else DEFAULT_HOT_FACTOR * model.index_topk
    staging = sizes.staging_rows if sizes.staging_rows is not None else DEFAULT_STAGING_FACTOR * model.index_topk
    # A slot that no prompt can take would only cost memory: the indexer's pool is sized for all of them.
    num_running = min(sizes.max_running, len(prompt_tokens))
    device_kv = sizes.device_kv
    if device_kv is None and sizes.write_back is WriteBack.NEVER:
        # A share of the KV would refuse prompts that nobody said must not fit.
        device_kv = EVERYTHING
    workload = Workload(
        model=model,
        block_size=options.block_size,
        hot_rows=hot_rows,
        staging_rows=staging,
        num_running=num_running,
        total_tokens=sum(prompt_tokens) + len(prompt_tokens) * options.sampling.max_tokens,
    )
    return EngineConfig(
        max_tokens=max(prompt_tokens) + options.sampling.max_tokens,
        slab_bytes=device_budget(device_kv, workload),
        host_pool_bytes=parse_size(sizes.host_pool, "host pool"),
        hot_rows=hot_rows,
        staging_rows=staging,
        block_size=options.block_size,
        max_running=num_running,
        chunk_tokens=sizes.chunk_tokens,
        write_back=sizes.write_back,
        kv_dtype=sizes.kv_dtype,
        offload=offload_config(sizes),
        parallel=_parallel(sizes),
        keep_logits=options.output.verify,
        # Two runs are compared token by token, and the same requests meet in other steps.
        fixed_shapes=options.output.verify,
    )


def check_options(options: GenerateOptions) -> None:
    """Raise `InputError` for sizes and names that are none: whatever can be told before a model is loaded."""
    check_names(options.model, options.device.dtype)
    for text in options.sampling.stop:
        require_text(text, f"the stop string {text!r}")
    _check_sizes(options.device)


def check_names(model: str, dtype: str | None) -> None:
    """Raise `InputError` for names that are empty, as those of shell variables are that were never set."""
    if not model:
        raise InputError("the model's name is empty: name a checkpoint directory or a built-in model")
    if dtype == "":
        raise InputError("the name after --dtype is empty: use one of float32, bfloat16, float16")


def _check_sizes(options: DeviceOptions) -> None:
    check_budget(options.device_kv)
    parse_size(options.host_pool, "host pool")
    if options.host_backing is not None and options.num_ranks == 1:
        raise InputError("--host-backing is for several processes: name their number with --tp")
    if options.offload_capacity is not None and options.offload_dir is None:
        raise InputError("--offload-capacity is the capacity of a directory: name one with --offload-dir")
    offload_config(options)
    if options.block_size is not None and options.block_size <= 0:
        raise InputError(f"block size {options.block_size} must be a power of two, such as 16 or 64")


def _parallel(options: DeviceOptions) -> "TensorParallel | None":
    if options.num_ranks == 1:
        return None
    from hisparse.engine import HostBacking, TensorParallel

    backing = HostBacking.SHARED if options.host_backing is None else HostBacking(options.host_backing.value)
    return TensorParallel(options.num_ranks, options.device, backing)


def offload_config(options: DeviceOptions) -> "OffloadConfig | None":
    """How KV is kept below the pools; None where it is not. Raises `InputError` for sizes that do not parse."""
    if options.cpu_tier is None and options.offload_dir is None:
        return None
    from hisparse.offload.config import FileOptions, OffloadConfig

    files = None
    if options.offload_dir is not None:
        capacity = parse_size(options.offload_capacity or DEFAULT_OFFLOAD_CAPACITY, "offload capacity")
        files = FileOptions((options.offload_dir,), capacity)
    cpu_bytes = parse_size(options.cpu_tier or DEFAULT_CPU_TIER, "CPU tier")
    return OffloadConfig(cpu_bytes, files=files)


def sampling_params(options: SamplingOptions) -> "SamplingParams":
    """The options as the engine takes them. Raises `InputError` for values out of range."""
    from hisparse.engine import SamplingParams

    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )


def _check_output(options: OutputOptions, num_prompts: int) -> None:
    if options.stream and options.json:
        raise InputError("--stream and --json both want standard output: use one of them")
    if options.stream and num_prompts > 1:
        raise InputError(f"--stream follows one prompt, and there are {num_prompts}")


def _drive(engine: "Engine", options: GenerateOptions, prompt_ids: Sequence[Sequence[int]]) -> bool:
    """Run until every request has ended. Returns False when Ctrl-C ended the run before."""
    shown = on_terminal() and not options.output.stream
    output_tokens = len(prompt_ids) * options.sampling.max_tokens
    with RunProgress(sum(map(len, prompt_ids)), output_tokens, shown) as progress:
        try:
            for step in engine.run():
                progress.advance(step)
                if options.output.stream:
                    print(visible("".join(token.text for token in step.tokens)), end="", flush=True)
        except KeyboardInterrupt:
            return False
        finally:
            if options.output.stream:
                print()
    return True


def _verify(
    loaded: "LoadedModel",
    prompt_ids: Sequence[Sequence[int]],
    params: "SamplingParams",
    config: "EngineConfig",
    report: RunReport,
) -> "VerifyResult":
    from hisparse.engine.verify import verify

    with VerifyProgress(on_terminal()) as progress:
        result = verify(loaded, prompt_ids, [params] * len(prompt_ids), config, report.results, progress.advance)
    for mismatch in result.mismatches:
        complain(describe_mismatch(mismatch))
    return result


def _print(report: RunReport, options: GenerateOptions) -> None:
    if options.output.json:
        print(json.dumps(report_json(report), allow_nan=False, indent=2))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    if not options.output.stream:
        print_texts(console, report.results)
    print_table(console, report)
