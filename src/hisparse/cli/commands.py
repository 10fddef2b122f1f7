"""All commands under one name, with their options read and not yet checked."""

from importlib.metadata import version
from typing import Annotated

import typer

from hisparse.cli.chat import chat
from hisparse.cli.doctor import doctor
from hisparse.cli.eval import evaluate
from hisparse.cli.generate import generate
from hisparse.cli.kv import kv

app = typer.Typer(
    name="hisparse",
    add_completion=False,
    # Plain help and plain errors: a box drawn around an error is no longer one line.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hisparse {version('hisparse')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Sparse-attention decoding with most of the KV cache in host memory."""
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command(name="generate")(generate)
app.command(name="chat")(chat)
app.command(name="eval")(evaluate)
app.command(name="doctor")(doctor)
app.add_typer(kv)
