"""An evaluation's report for people: what was asked and said, then accuracy by context length."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hisparse.cli.render import NOT_MEASURED, format_bytes, format_seconds, visible

if TYPE_CHECKING:
    from hisparse.evaluation.provenance import NeedleRows
    from hisparse.evaluation.report import ContextReport, EvalReport

HISPARSE = "hisparse"
ANSWER_WIDTH = 7
"""With it, all columns of all runs fit a terminal of 80."""
MAX_ANSWERS = 8
"""Prompts of a context that are shown one by one."""


def print_report(console: Console, report: "EvalReport") -> None:
    """Write the answers to the first prompts of each context, the table of all contexts, and the verdict."""
    for context in report.contexts:
        console.print(_answers(context))
    console.print(_accuracy(report))
    console.print("from host: of the KV rows of the value asked for that were read to answer, those that the host held")
    console.print(_verdict(report))


def format_needles(rows: "NeedleRows") -> str:
    """How many of the rows came from the host, such as "20 of 20"."""
    return f"{rows.from_host} of {rows.read}" if rows.read else NOT_MEASURED


def shortened(text: str) -> str:
    """What a model said, in one line of at most `ANSWER_WIDTH` characters."""
    line = " ".join(visible(text).split())
    return line if len(line) <= ANSWER_WIDTH else line[: ANSWER_WIDTH - 1] + "…"


def _answers(report: "ContextReport") -> Table:
    hidden = len(report.questions) - MAX_ANSWERS
    table = _table(f"prompts of {report.context} tokens" + (f", {hidden} more are not shown" if hidden > 0 else ""))
    table.add_column("key of")
    for title in ("is", *report.runs, "token", "from host"):
        table.add_column(title, justify="right")
    for index, question in enumerate(report.questions[:MAX_ANSWERS]):
        said = [
            Text(shortened(run.texts[index]), "green" if run.right[index] else "red") for run in report.runs.values()
        ]
        needles = format_needles(report.runs[HISPARSE].needles[index])
        table.add_row(question.prompt.name, question.prompt.answer.strip(), *said, f"{question.needle.start}", needles)
    return table


def _accuracy(report: "EvalReport") -> Table:
    asked = report.asked
    seconds = sum(run.seconds for context in report.contexts for run in context.runs.values())
    table = _table(
        f"right answers: {asked.num_keys} keys, {asked.num_prompts} prompts, seed {asked.seed}, "
        f"after {format_seconds(seconds)}"
    )
    for title in ("tokens", *report.accuracy, "device KV", "from host"):
        table.add_column(title, justify="right")
    for context in report.contexts:
        stats, needles = context.runs[HISPARSE].stats, context.needles
        assert stats is not None
        share = NOT_MEASURED if needles.share_from_host is None else f"{needles.share_from_host:.0%}"
        table.add_row(
            str(context.context),
            *(f"{context.accuracy[run]:.1%}" if run in context.runs else NOT_MEASURED for run in report.accuracy),
            format_bytes(stats.kv.device_bytes),
            share,
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, box=box.ROUNDED, title_justify="left", title_style="bold", header_style="")


def _verdict(report: "EvalReport") -> Text:
    differing = sum(len(context.differing) for context in report.contexts)
    total = sum(len(context.questions) for context in report.contexts)
    if not differing:
        return Text(f"hisparse gave the tokens of resident on all {total} prompts", "green")
    return Text(f"hisparse DIFFERS from resident on {differing} of {total} prompts", "red")
