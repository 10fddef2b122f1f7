"""One `hisparse generate` from options to exit code: check, load, run, verify, report."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from hisparse.cli.budget import EVERYTHING, Workload, check_budget, device_budget
from hisparse.cli.options import GenerateOptions, SamplingOptions
from hisparse.cli.progress import RunProgress, VerifyProgress, on_terminal
from hisparse.cli.prompts import encode_prompts, read_prompts
from hisparse.cli.render import describe_mismatch, print_table, print_texts, visible
from hisparse.cli.report import RunReport, report_json
from hisparse.config import ModelGeometry, WriteBack, parse_size
from hisparse.errors import InputError

if TYPE_CHECKING:
    from hisparse.engine import Engine, EngineConfig, LoadedModel, SamplingParams
    from hisparse.engine.verify import VerifyResult

EXIT_DONE = 0
EXIT_DIFFERENT = 1
EXIT_INTERRUPTED = 130

DEFAULT_HOT_FACTOR = 2
DEFAULT_STAGING_FACTOR = 4


def run_generate(options: GenerateOptions) -> int:
    """Run the command and return its exit code: 0, 1 when a verification found a difference, 130 when interrupted.

    Raises `InputError` and `BackendError`, with everything that can be checked without a model checked first.
    """
    prompts = read_prompts(options.prompts, options.prompt_files, options.prompt_ids)
    _check_options(options, len(prompts))

    from hisparse.engine import Engine, load_model

    params = _sampling(options.sampling)
    loaded = load_model(options.model, options.dtype, options.device.device)
    prompt_ids = encode_prompts(prompts, loaded.tokenizer.encode)
    config = engine_config(options, loaded.geometry_for(options.device.kv_dtype), [len(ids) for ids in prompt_ids])
    with Engine(loaded, config) as engine:
        for ids in prompt_ids:
            engine.add_request(ids, params)
        interrupted = not _drive(engine, options, prompt_ids)
        report = RunReport(engine.results(), engine.stats())
    if options.output.verify and not interrupted:
        try:
            report = RunReport(report.results, report.stats, _verify(loaded, prompt_ids, params, config, report))
        except KeyboardInterrupt:
            interrupted = True
    _print(report, options)
    if interrupted:
        print("hisparse: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DIFFERENT if report.verified_different else EXIT_DONE


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
        keep_logits=options.output.verify,
        # Two runs are compared token by token, and the same requests meet in other steps.
        fixed_shapes=options.output.verify,
    )


def _check_options(options: GenerateOptions, num_prompts: int) -> None:
    check_budget(options.device.device_kv)
    parse_size(options.device.host_pool, "host pool")
    if options.device.block_size is not None and options.device.block_size <= 0:
        raise InputError(f"block size {options.device.block_size} must be a power of two, such as 16 or 64")
    if options.output.stream and options.output.json:
        raise InputError("--stream and --json both want standard output: use one of them")
    if options.output.stream and num_prompts > 1:
        raise InputError(f"--stream follows one prompt, and there are {num_prompts}")


def _sampling(options: SamplingOptions) -> "SamplingParams":
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
        print(f"hisparse: {describe_mismatch(mismatch)}", file=sys.stderr)
    return result


def _print(report: RunReport, options: GenerateOptions) -> None:
    if options.output.json:
        print(json.dumps(report_json(report), allow_nan=False, indent=2))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    if not options.output.stream:
        print_texts(console, report.results)
    print_table(console, report)
