"""A run's report for people: the generated texts, then one table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hisparse.cli.report import RunReport

if TYPE_CHECKING:
    from hisparse.engine import EngineStats, RequestResult
    from hisparse.engine.reuse import ReusedTokens
    from hisparse.engine.verify import Mismatch, VerifyResult

NOT_MEASURED = "-"
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_texts(console: Console, results: "Sequence[RequestResult]") -> None:
    """Write every request's text, under a heading if there are several."""
    for number, result in enumerate(results, start=1):
        if len(results) > 1:
            console.print(Text(f"request {number}:", style="bold"))
        console.print(Text(visible(result.text)), soft_wrap=True)


def print_table(console: Console, report: RunReport) -> None:
    """Write the one table that ends a run."""
    table = Table(box=box.ROUNDED, show_header=False, show_lines=True, padding=(0, 1))
    table.add_column()
    table.add_row(_requests(report.results))
    table.add_row(_totals(report.stats))
    if report.verify is not None:
        table.add_row(_verdict(report.verify))
    console.print(table)


def print_totals(console: Console, stats: "EngineStats") -> None:
    """Write where the KV is and how it moved, without the table's other parts."""
    console.print(_totals(stats))


def describe_turn(result: "RequestResult") -> str:
    """One line about one turn of a conversation: what of its prompt was reused and from where, and how fast it was."""
    reused = result.reused
    parts = [
        f"reused: {reused.device} device, {reused.host} host, {reused.cpu_tier} cpu tier, {reused.files} files",
        f"computed: {reused.computed}",
        f"first token: {format_seconds(result.ttft_s)}",
        f"{1 / result.tpot_s:.1f} tokens/s" if result.tpot_s else f"{NOT_MEASURED} tokens/s",
    ]
    return f"[{' | '.join(parts)}]"


def describe_mismatch(mismatch: "Mismatch") -> str:
    """One line that says where a request left its reference."""
    expected, found = (
        "no token" if token is None else f"token {token}" for token in (mismatch.expected, mismatch.found)
    )
    return (
        f"{mismatch.request_id} differs from the {mismatch.reference} run at output token {mismatch.position}: "
        f"{found} instead of {expected}"
    )


def visible(text: str) -> str:
    """`text` with every control character but newline and tab replaced, so that output cannot steer a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def format_bytes(num_bytes: int) -> str:
    """A size with three digits or so and a binary unit: "512 KiB", "1.46 MiB"."""
    value, unit = float(num_bytes), _BINARY_UNITS[0]
    for unit in _BINARY_UNITS:
        if value < 1024 or unit == _BINARY_UNITS[-1]:
            break
        value /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def format_seconds(seconds: float | None) -> str:
    """A duration in seconds, or in milliseconds below one second."""
    if seconds is None:
        return NOT_MEASURED
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _requests(results: "Sequence[RequestResult]") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("request", "prompt", "output", "first token", "per token"):
        table.add_column(title, justify="right")
    table.add_column("ended by")
    for number, result in enumerate(results, start=1):
        table.add_row(
            str(number),
            str(result.prompt_tokens),
            str(len(result.output_ids)),
            format_seconds(result.ttft_s),
            format_seconds(result.tpot_s),
            result.finish_reason.value if result.finish_reason else "interrupted",
        )
    return table


def _totals(stats: "EngineStats") -> Table:
    kv, rows, moved = stats.kv, stats.rows, stats.moved
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    lines = {
        "KV total": format_bytes(kv.total_bytes),
        "KV on device": f"{format_bytes(kv.device_bytes)}{format_share(kv.device_bytes, kv.total_bytes)}",
        "KV on host": f"{format_bytes(kv.host_bytes)} in a pool of {format_bytes(kv.host_physical_bytes)}",
        "index keys": f"{format_bytes(kv.indexer_bytes)} on device",
        "pages": f"{kv.pages_resident} resident, {kv.pages_host} on host",
        "prompts": _reused(stats.reused),
        "rows served": f"{rows.resident} resident, {rows.hot} hot, {rows.miss} missed",
        "moved": f"{format_bytes(moved.host_to_device_bytes)} to device, "
        f"{format_bytes(moved.device_to_host_bytes)} to host",
        "events": f"{stats.spills} spills, {stats.restores} restores, {stats.preemptions} preemptions",
    }
    if rows.unreachable:
        lines["rows served"] += f", {rows.unreachable} UNREACHABLE"
    for name, value in lines.items():
        grid.add_row(name, value)
    return grid


def _reused(reused: "ReusedTokens") -> str:
    """Where the KV of prompts came from, those of which nothing came left out."""
    places = {"device": reused.device, "host": reused.host, "CPU tier": reused.cpu_tier, "files": reused.files}
    parts = [f"{count} {place}" for place, count in places.items() if count]
    return ", ".join([f"{reused.computed} tokens computed", *parts])


def _token(token: int | None) -> str:
    return "no token" if token is None else f"token {token}"


def format_share(part: int, whole: int) -> str:
    """Nothing where a budget holds more than there is of KV: such a share says nothing."""
    return f" ({part / whole:.1%} of the total)" if part <= whole and whole else ""


def _verdict(verify: "VerifyResult") -> Text:
    if verify.identical:
        return Text(f"verified: identical to {verify.reference}, logits within {verify.max_logit_diff:.2g}", "green")
    return Text(f"verified: DIFFERENT from {verify.reference}, logits up to {verify.max_logit_diff:.2g} apart", "red")
