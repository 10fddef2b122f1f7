"""A rank that ends interrupts whoever waits for a line, and nobody else."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from hisparse.cli.rank_watch import RankEnded, RankWatch

SOON_S = 0.2


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def pipe() -> Iterator[int]:
    """To read from. Nothing ever comes."""
    ours, theirs = os.pipe()
    yield ours
    os.close(ours)
    os.close(theirs)


def test_a_read_ends_when_a_watched_process_does_and_its_exit_code_is_still_there(
    child: subprocess.Popen[bytes], pipe: int
) -> None:
    with RankWatch([os.getpid(), child.pid]) as watch:
        threading.Timer(SOON_S, child.kill).start()
        with pytest.raises(RankEnded), watch.raising():
            os.read(pipe, 1)
    assert child.wait() == -signal.SIGKILL


def test_one_that_has_ended_before_is_seen_at_once(child: subprocess.Popen[bytes]) -> None:
    with RankWatch([child.pid]) as watch:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RankEnded), watch.raising():
            pytest.fail("the line was waited for")
        child.wait()
        with pytest.raises(RankEnded), watch.raising():
            pytest.fail("the line was waited for")


def test_whoever_does_not_wait_and_whoever_is_not_watched_is_left_alone(child: subprocess.Popen[bytes]) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    with RankWatch([child.pid]) as watch:
        with watch.raising():
            subprocess.run(["true"], check=True)
        child.kill()
        child.wait()
    assert signal.getsignal(signal.SIGCHLD) is before
    with RankWatch([]) as watch, watch.raising():
        assert signal.getsignal(signal.SIGCHLD) is before
