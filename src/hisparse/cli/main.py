"""The `hisparse` command and its error boundary.

Exit codes: 0 done; 1 a comparison found a difference, a process of the run was lost, or the output could not be
written; 2 bad input, or a machine that lacks something; 130 interrupted, 143 and 129 ended by SIGTERM and SIGHUP. Bad
input gives one line on standard error; any other exception is a fault of the library and keeps its traceback.

Next to nothing is loaded before a signal is waited for: the commands come with what `main` imports.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from hisparse.cli import interrupts
from hisparse.cli.streams import complain, discard, finish_errors, open_closed_streams
from hisparse.errors import BackendError, InputError, RankError

EXIT_RUN_FAILED = 1
EXIT_BAD_INPUT = 2

OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What a write to standard output may end with through no fault of the library."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv[1:]` by default) and return its exit code. See the module for the codes."""
    try:
        code = _run(arguments)
    except KeyboardInterrupt:
        code = interrupts.EXIT_INTERRUPTED
    if code == interrupts.EXIT_INTERRUPTED:
        complain(interrupts.describe())
        return interrupts.exit_code()
    return code


def _run(arguments: Sequence[str] | None) -> int:
    import typer

    from hisparse.cli.commands import app
    from hisparse.cli.mistakes import describe

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Generated text is any Unicode; a terminal that cannot show a character should not end the run.
            stream.reconfigure(errors="replace")
    try:
        return int(app(args=arguments, prog_name="hisparse", standalone_mode=False) or 0)
    except typer.TyperException as error:
        return _fail(describe(error), error.exit_code)
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
        interrupts.heed_endings()
        open_closed_streams()
        code = _write_all()
    except KeyboardInterrupt:
        # Once more, while what there was is being written.
        code = interrupts.exit_code()
    interrupts.ignore_endings()
    finish_errors()
    raise SystemExit(code)


def _write_all() -> int:
    try:
        code = main()
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS:
            raise
        # The interpreter would flush again while it exits, and complain in its own words.
        discard(sys.stdout)
        if error.errno != errno.EPIPE:
            reason = "standard output is closed" if error.errno == errno.EBADF else error.strerror
            complain(f"the output could not be written: {reason}")
        # A terminal that is gone takes no output, and is why the process was told to end.
        return interrupts.exit_code() if interrupts.is_told_to_end() else EXIT_RUN_FAILED
    return code


def _fail(message: str, code: int) -> int:
    complain(message)
    return code
