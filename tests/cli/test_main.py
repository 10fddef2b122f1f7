"""The command as a process: help, version, and what happens when its output has nowhere to go."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from hisparse.cli.main import main, run

OPTIONS = (
    *("--prompt", "--prompt-file", "--max-tokens", "--device", "--device-kv", "--host-pool", "--hot-rows"),
    *("--block-size", "--dtype", "--seed", "--verify", "--json"),
    *("--temperature", "--top-p", "--top-k", "--stop", "--write-back"),
)

HISPARSE = [sys.executable, "-m", "hisparse"]


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hisparse {version('hisparse')}\n"


def test_without_arguments_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out


def test_kv_without_a_command_explains_itself_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv"]) == 0
    shown = capsys.readouterr()
    assert "\n  quarantine  " in shown.out
    assert shown.err == ""


def test_generate_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in OPTIONS:
        assert option in shown


def test_chat_help_names_its_options_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--help"]) == 0
    shown = capsys.readouterr().out
    shared = set(OPTIONS) - {"--prompt", "--prompt-file", "--verify", "--json"}
    for word in (*shared, "--context", "--metrics-port", "--offload-dir", "/quit", "/reset", "/stats", "Ctrl-C"):
        assert word in shown


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    program = (
        "import sys\n"
        "from hisparse.cli.main import main\n"
        "assert main(['generate', '--help']) == 0\n"
        "assert main(['generate', 'm', '--prompt', '']) == 2\n"
        "assert main(['chat', '--help']) == 0\n"
        "assert main(['chat', 'm', '--context', '8', '--metrics-port', '0']) == 2\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([*HISPARSE, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"hisparse {version('hisparse')}\n", "")


def test_a_full_disk_is_one_line_and_a_failure() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*HISPARSE, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "hisparse: the output could not be written: No space left on device\n"


def test_a_reader_that_leaves_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*HISPARSE, "--version"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.usefixtures("signals")
def test_threads_that_wait_sleep_unless_the_user_wants_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse.cli.main.main", lambda: 0)
    for chosen, expected in ((None, "passive"), ("active", "active")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if chosen is not None:
            monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
        with pytest.raises(SystemExit) as ended:
            run()
        assert ended.value.code == 0
        assert os.environ["OMP_WAIT_POLICY"] == expected
