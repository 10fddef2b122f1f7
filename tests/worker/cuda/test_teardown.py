"""SIGTERM runs what must run, once and in bounded time, then does what it did before."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from hisparse.worker.cuda import teardown

PROCESS = """
import signal, sys, time
from hisparse.worker.cuda import teardown
{before}
teardown.add(lambda: print("given back", flush=True))
print("ready", flush=True)
time.sleep(30)
"""
HANDLED = "signal.signal(signal.SIGTERM, lambda *_: (print('theirs', flush=True), sys.exit(7)))"
IGNORED = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def terminate(before: str) -> tuple[int | None, str]:
    """Exit code (None for a process that lives on) and output of a process that is told to end."""
    command = [sys.executable, "-c", PROCESS.format(before=before)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            return process.wait(timeout=0.5 if before == IGNORED else 5), process.stdout.read()
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            process.kill()


def test_a_process_gives_back_and_dies_of_the_signal() -> None:
    assert terminate("") == (-signal.SIGTERM, "given back\n")


def test_a_process_with_a_handler_of_its_own_gives_back_when_that_ends_it() -> None:
    assert terminate(HANDLED) == (7, "theirs\ngiven back\n")


def test_a_process_that_ignores_the_signal_still_does() -> None:
    assert terminate(IGNORED) == (None, "")


def test_an_action_that_was_removed_does_not_run() -> None:
    ran: list[str] = []
    kept, removed = teardown.add(lambda: ran.append("kept")), teardown.add(lambda: ran.append("removed"))
    teardown.remove(removed)
    assert teardown.run_all()
    assert ran == ["kept"]
    teardown.remove(kept)


def test_an_action_that_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    ran: list[str] = []
    teardown.add(lambda: bool(release.wait(30)))
    teardown.add(lambda: ran.append("other"))
    begin = time.monotonic()
    assert not teardown.run_all(seconds=0.2)
    assert time.monotonic() - begin < 2
    assert ran == ["other"]
    assert "not unpinned" in caplog.text
    release.set()


def test_an_action_that_fails_keeps_no_other_from_running(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise OSError("no")

    teardown.add(fail)
    teardown.add(lambda: ran.append("other"))
    assert teardown.run_all()
    assert ran == ["other"]
    assert "could not be given back" in caplog.text
