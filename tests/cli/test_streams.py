"""Standard streams that are closed or full: exit codes are those of what was done, and nothing gives a traceback."""

import shlex
import subprocess
import sys

import pytest

HISPARSE = shlex.join([sys.executable, "-m", "hisparse"])
CLOSED = "hisparse: the output could not be written: standard output is closed\n"
SHORT = "generate builtin:tiny-v32 --prompt x --max-tokens 2"


def shell(arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line with redirections."""
    command = ["sh", "-c", f"{HISPARSE} {arguments}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", ["--version", "--help", "kv", SHORT])
def test_a_closed_output_is_one_line_and_a_failure(arguments: str) -> None:
    assert shell(f"{arguments} >&-") == (1, "", CLOSED)


def test_bad_input_comes_before_a_closed_output() -> None:
    code, _, errors = shell("generate >&-")
    assert code == 2
    assert errors.startswith("hisparse: Missing argument 'MODEL'")


@pytest.mark.parametrize("errors", ["2>/dev/full", "2>&-", "2>&- >&- <&-"])
def test_bad_input_keeps_its_exit_code_where_nobody_can_be_told(errors: str) -> None:
    assert shell(f"generate {errors}") == (2, "", "")


def test_a_chat_without_an_input_ends_as_at_the_end_of_one() -> None:
    assert shell("chat builtin:tiny-v32 <&-") == (0, "", "")
