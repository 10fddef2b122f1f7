"""`hisparse eval`: does a model find facts in long texts with most of its KV on the host, as it does without?

Neither torch nor the engine is loaded before it must be, so that help and most mistakes answer at once.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hisparse.cli.budget import Workload, check_budget, device_budget
from hisparse.cli.eval_render import print_report
from hisparse.cli.interrupts import EXIT_INTERRUPTED
from hisparse.cli.options import (
    BUILTIN_PREFIX,
    BlockSizeOption,
    Device,
    DeviceOption,
    DtypeOption,
    HostPoolOption,
    named_path,
)
from hisparse.cli.progress import EvalProgress, on_terminal
from hisparse.cli.session import check_names
from hisparse.cli.streams import complain
from hisparse.config import parse_size
from hisparse.errors import InputError

if TYPE_CHECKING:
    from hisparse.config import ModelGeometry
    from hisparse.engine import EngineConfig
    from hisparse.evaluation.questions import Question
    from hisparse.evaluation.report import ContextReport, EvalReport

EXIT_DONE = 0
EXIT_DIFFERENT = 1

DEFAULT_SHARE = "10%"
CHUNK_TOKENS = 512
"""Prompt tokens of a step, of all prompts together."""
HOT_FACTOR = 2
STAGING_FACTOR = 4
STAGING_SHARE = 4
"""One in so many rows of the slab stages prefill, if that is more than `STAGING_FACTOR` times top-k: with few rows, a
long prompt is read in very many passes."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """One `hisparse eval` command line, contexts parsed and the rest as it was written."""

    model: str
    contexts: tuple[int, ...]
    num_keys: int
    num_prompts: int
    device_kv: str | None
    host_pool: str
    seed: int
    with_stock: bool
    json: bool
    plot: Path | None
    device: str
    dtype: str
    block_size: int
    max_running: int


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="builtin:finder, or a checkpoint directory.")],
    context: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Tokens per prompt, the answer included; several lengths in turn.")
    ] = "8192",
    keys: Annotated[int, typer.Option(min=1, metavar="K", help="Facts in each prompt, one of which is asked for.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, metavar="P", help="Prompts per context length.")] = 16,
    device_kv: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Device memory for resident and hot KV: a size (4MiB), or a share (10%) of the most KV that is there "
            f"at a time, or all. [default: {DEFAULT_SHARE}, or more where that is too little to run one prompt]",
        ),
    ] = None,
    host_pool: HostPoolOption = "1GiB",
    seed: Annotated[int, typer.Option(help="Seed of texts, names and values.")] = 0,
    stock: Annotated[bool, typer.Option("--stock", help="Ask stock transformers too; slow.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(parser=named_path, metavar="FILE", help="Write a plot of accuracy by context length, as SVG."),
    ] = None,
    device: DeviceOption = Device.CPU,
    dtype: DtypeOption = None,
    block_size: BlockSizeOption = None,
    max_running: Annotated[int, typer.Option(min=1, help="Prompts that run at once, at most.")] = 8,
) -> int:
    """Hide facts in long texts, ask for one of them, and compare the answers of several runs.

    The runs: all KV on the device (resident), most of it on the host (hisparse), a host tier that is broken on purpose
    (broken), stock transformers (stock). Says how many answers are right, whether hisparse gives the tokens of resident
    on every prompt, and how many of the rows that answers rest on came from the host.

    Exit code 0 when hisparse equals resident on every prompt, 1 when not, or when broken equals hisparse on all of a
    length: then nothing shows that the host was needed.
    """
    is_builtin = model.startswith(BUILTIN_PREFIX)
    options = EvalOptions(
        model=model,
        contexts=parse_contexts(context),
        num_keys=keys,
        num_prompts=prompts,
        device_kv=device_kv,
        host_pool=host_pool,
        seed=seed,
        with_stock=stock,
        json=json_output,
        plot=plot,
        device=device.value,
        dtype=("float32" if is_builtin else "bfloat16") if dtype is None else dtype,
        block_size=(16 if is_builtin else 64) if block_size is None else block_size,
        max_running=max_running,
    )
    reports: list[EvalReport] = []
    try:
        run(options, reports.append)
    except KeyboardInterrupt:
        if reports:
            _show(reports[-1], options)
        return EXIT_INTERRUPTED
    report = reports[-1]
    _show(report, options)
    useless = [of_length for of_length in report.contexts if of_length.control_failed]
    for of_length in useless:
        complain(describe_useless(of_length))
    return EXIT_DONE if report.identical and not useless else EXIT_DIFFERENT


def describe_useless(context: "ContextReport") -> str:
    """One line that says why a run of `hisparse` that is right says nothing here, and what would help."""
    needles = context.needles
    return (
        f"the control proves nothing: with {context.context} tokens, a broken host changed no answer, and "
        f"{needles.from_host} of {needles.read} rows of the values came from the host: "
        "ask for a longer --context, or give less --device-kv"
    )


def _show(report: "EvalReport", options: EvalOptions) -> None:
    if options.json:
        print(json.dumps(report.to_json(), allow_nan=False, indent=2))
    else:
        print_report(Console(highlight=False, markup=False, emoji=False), report)
    if options.plot is not None:
        _write(options.plot, report.plot())


def run(options: EvalOptions, finished: "Callable[[EvalReport], None]") -> None:
    """Check what can be checked without a model, load, ask. Raises `InputError` and `BackendError`.

    `finished` is given what there is so far, more each time, and everything at the end.
    """
    check_names(options.model, options.dtype)
    check_budget(options.device_kv)
    parse_size(options.host_pool, "host pool")
    if options.plot is not None:
        # Before anything runs, not after minutes.
        _require_writable(options.plot)

    from hisparse.engine import load_model
    from hisparse.evaluation.evaluate import evaluate as evaluate_model
    from hisparse.evaluation.questions import QuestionSet

    loaded = load_model(options.model, options.dtype, options.device)
    longest = max(options.contexts)
    if longest > loaded.max_tokens:
        raise InputError(f"prompts of {longest} tokens do not fit {loaded.name}: it has {loaded.max_tokens} positions")
    asked = QuestionSet(options.contexts, options.num_keys, options.num_prompts, options.seed)
    questions = asked.questions(loaded.tokenizer.encode)
    total = sum(len(question.ids) for of_context in questions.values() for question in of_context)
    with EvalProgress(total, on_terminal()) as progress:
        report = evaluate_model(
            loaded,
            asked,
            questions,
            lambda of_context: engine_config(options, loaded.geometry, of_context),
            with_stock=options.with_stock,
            progress=progress.advance,
            finished=finished,
        )
        finished(report)


def engine_config(options: EvalOptions, model: "ModelGeometry", questions: "Sequence[Question]") -> "EngineConfig":
    """The `hisparse` run's configuration for the questions of one context."""
    from hisparse.engine import EngineConfig

    lengths = sorted((len(question.ids) + question.answer_tokens for question in questions), reverse=True)
    num_running = min(options.max_running, len(lengths))
    hot_rows, staging_rows = HOT_FACTOR * model.index_topk, STAGING_FACTOR * model.index_topk
    workload = Workload(
        model=model,
        block_size=options.block_size,
        hot_rows=hot_rows,
        staging_rows=staging_rows,
        num_running=num_running,
        total_tokens=most_tokens(lengths[:num_running], max(question.answer_tokens for question in questions)),
    )
    slab_bytes = device_budget(DEFAULT_SHARE if options.device_kv is None else options.device_kv, workload)
    if slab_bytes is not None and options.device_kv is None:
        # Of short prompts the share is too little to run any: with the least, nearly all of them is on the host too.
        slab_bytes = max(slab_bytes, replace(workload, num_running=1).all_host_backed_bytes)
    if slab_bytes is not None:
        slab_rows = slab_bytes // (model.num_layers * model.row.row_bytes)
        staging_rows = max(staging_rows, slab_rows // STAGING_SHARE)
    return EngineConfig(
        max_tokens=lengths[0],
        slab_bytes=slab_bytes,
        host_pool_bytes=parse_size(options.host_pool, "host pool"),
        block_size=options.block_size,
        hot_rows=hot_rows,
        staging_rows=staging_rows,
        max_running=num_running,
        chunk_tokens=CHUNK_TOKENS,
        # Runs are compared token by token, and the same requests meet in other steps.
        fixed_shapes=True,
    )


def most_tokens(lengths: "Sequence[int]", answer_tokens: int) -> int:
    """How many tokens of the prompts that run at once have KV at one time, at most. `lengths`: the longest first.

    The oldest prompt is read first. While it answers, a step reads a chunk of the others: answers are so short that few
    prompts meet, and a share of all of them would be most of what is ever there.
    """
    return min(sum(lengths), lengths[0] + answer_tokens * CHUNK_TOKENS)


def parse_contexts(text: str) -> tuple[int, ...]:
    """The lengths of "2048" or "2048,8192". Raises `InputError` for anything but different positive integers."""
    try:
        contexts = tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise InputError(f"contexts {text!r} are not integers: write them like 2048,8192") from error
    if min(contexts) < 1 or len(set(contexts)) < len(contexts):
        raise InputError(f"contexts {text!r} must be different numbers of tokens, each at least 1")
    return contexts


def _require_writable(path: Path) -> None:
    """Raise `InputError` where no plot can be written. Leaves everything as it is."""
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"cannot write the plot to {path}: name a file in a folder that exists")
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise InputError(
            f"cannot write the plot to {path}: {error.strerror}: name a file that may be written"
        ) from error
    if is_new:
        path.unlink()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the plot to {path}: {error.strerror}") from error
