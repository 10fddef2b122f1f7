"""The `hisparse` command and its error boundary.

Exit codes: 0 done; 1 a comparison found a difference, a process of the run was lost, or the output could not be
written; 2 bad input, or a machine that lacks something; 130 interrupted. Bad input gives one line on standard error;
any other exception is a fault of the library and keeps its traceback.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from hisparse.cli.chat import chat
from hisparse.cli.doctor import doctor
from hisparse.cli.eval import evaluate
from hisparse.cli.generate import generate
from hisparse.cli.kv import kv
from hisparse.errors import BackendError, InputError, RankError

EXIT_RUN_FAILED = 1
EXIT_BAD_INPUT = 2

OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a write to standard output may end with through no fault of the library."""

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv[1:]` by default) and return its exit code. See the module for the codes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Generated text is any Unicode; a terminal that cannot show a character should not end the run.
            stream.reconfigure(errors="replace")
    try:
        return int(app(args=arguments, prog_name="hisparse", standalone_mode=False) or 0)
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except RankError as error:
        return _fail(str(error), EXIT_RUN_FAILED)
    except (InputError, BackendError) as error:
        return _fail(str(error), EXIT_BAD_INPUT)


def run() -> NoReturn:
    """The console script: `main`, and one line instead of a traceback when the output has nowhere to go."""
    # Before torch is loaded: threads that wait for each other sleep. Where other programs want the same cores, one that
    # spins costs the one it waits for a whole time slice.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        code = main()
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS:
            raise
        # The interpreter would flush again while it exits, and complain in its own words.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_RUN_FAILED
        if error.errno != errno.EPIPE:
            _fail(f"the output could not be written: {error.strerror}", code)
    raise SystemExit(code)


def _fail(message: str, code: int) -> int:
    print("hisparse:", " ".join(message.split()), file=sys.stderr)
    return code
