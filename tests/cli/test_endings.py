"""A command that is told to end, by Ctrl-C or a signal, says what there is so far and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hisparse.cli import interrupts
from hisparse.cli.main import main
from tests.cli.conftest import FakeBackend
from tests.engine.tp.leftovers import is_alive

HISPARSE = [sys.executable, "-m", "hisparse"]
ENDLESS = ["generate", "builtin:tiny-v32", "--prompt", "a", "--max-tokens", "16000"]
LIMIT_S = 120


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, that is killed if it is still there at the end."""
    pipe = subprocess.PIPE
    command = [*HISPARSE, *arguments]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def assert_all_end(pids: Sequence[int]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < until_s, "processes are left"
        time.sleep(0.02)


def test_a_hangup_of_a_whole_session_ends_all_ranks_and_leaves_text_and_table() -> None:
    with running(*ENDLESS, "--tp", "2", "--stream") as process:
        assert process.stdout is not None
        process.stdout.read(1)
        ranks = ranks_of(process)
        os.killpg(process.pid, signal.SIGHUP)
        shown, errors = process.communicate(timeout=LIMIT_S)
    assert len(ranks) == 2
    assert (process.returncode, errors) == (129, "hisparse: ended by SIGHUP\n")
    assert "interrupted" in shown
    assert_all_end(ranks)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_json_object_says_what_there_was(
    number: signal.Signals,
    code: int,
    backend: FakeBackend,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hisparse.cli.progress import RunProgress

    interrupts.heed_endings()
    monkeypatch.setattr(RunProgress, "advance", lambda _, step: step.tokens and signal.raise_signal(number))
    assert main(["generate", "builtin:tiny-v32", "--prompt", "x", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["requests"][0]["output_tokens"] == 1
    assert backend.engines[0].closed


@pytest.mark.usefixtures("signals")
def test_a_signal_while_the_engine_is_closed_does_not_cost_the_results(
    backend: FakeBackend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.cli.conftest import FakeEngine

    interrupts.heed_endings()
    monkeypatch.setattr(FakeEngine, "__exit__", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert main(["generate", "builtin:tiny-v32", "--prompt", "x", "--json"]) == 143
    assert json.loads(capsys.readouterr().out)["requests"][0]["text"] == "ok"


@pytest.mark.usefixtures("signals")
def test_what_waits_with_ctrl_c_waits_with_a_signal_too_and_one_signal_interrupts_once() -> None:
    from hisparse.engine.tp.sending import uninterrupted

    interrupts.heed_endings()
    reached = []

    def send() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        send()
    assert reached
    signal.raise_signal(signal.SIGTERM)
    assert interrupts.exit_code() == 143


@pytest.mark.usefixtures("signals")
def test_in_the_background_ctrl_c_stays_ignored_and_a_signal_still_ends_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts.heed_endings()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGHUP)
    assert not interrupts.is_told_to_end()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("module", ["typer", "hisparse.cli.generate", "torch"])
@pytest.mark.parametrize(
    ("number", "code", "said"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "ended by SIGTERM")]
)
def test_a_signal_while_modules_are_loaded_is_one_line(module: str, number: str, code: int, said: str) -> None:
    program = f"""
import signal, sys
from hisparse.cli.main import run
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.{number})
sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["generate", "builtin:tiny-v32", "--prompt", "x"]
run()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"hisparse: {said}\n")
