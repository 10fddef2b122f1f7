"""`hisparse chat` as a process, on a terminal and in a pipe: Ctrl-C, Ctrl-D and what is shown."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.engine.tp.leftovers import is_alive

CHAT = [sys.executable, "-m", "hisparse", "chat", "builtin:tiny-v32"]
ENDLESS = ("--max-tokens", "16000", "--device-kv", "330KiB")
LIMIT_S = 120
AGAIN_S = 5


@contextmanager
def talking(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    """A chat in a pipe, its input and its output. It is killed if it is still there at the end."""
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen([*CHAT, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process, process.stdin, process.stdout
        finally:
            process.kill()


def interrupt_until_it_ends(process: subprocess.Popen[bytes]) -> bytes:
    """Interrupt, and again where that came in the instant before a read that then waits; returns standard error."""
    while True:
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=AGAIN_S)[1]
        except subprocess.TimeoutExpired:
            continue


def say(stream: IO[bytes], line: bytes) -> None:
    stream.write(line + b"\n")
    stream.flush()


def test_ctrl_c_ends_an_answer_and_the_conversation_goes_on() -> None:
    with talking(*ENDLESS) as (process, written, read):
        say(written, b"hello")
        read.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        answer, status = read.readline(), read.readline()
        assert status.startswith(b"[reused: 0 device")
        say(written, b"again")
        read.read(1)
        process.send_signal(signal.SIGINT)
        read.readline()
        assert read.readline().startswith(b"[reused: ")
        written.close()
        assert process.wait(LIMIT_S) == 0
    assert len(answer) < 16000


def test_ctrl_c_twice_leaves() -> None:
    with talking(*ENDLESS) as (process, written, read):
        say(written, b"hello")
        read.read(1)
        process.send_signal(signal.SIGINT)
        read.readline()
        read.readline()  # the answer has ended: the second comes while the next line is waited for
        errors = interrupt_until_it_ends(process)
        assert process.returncode == 130
        assert errors == b"hisparse: interrupted\n"


def test_a_chat_that_is_told_to_end_shows_what_there_is_of_its_answer() -> None:
    with talking(*ENDLESS) as (process, written, read):
        say(written, b"hello")
        answer = read.read(1)
        process.send_signal(signal.SIGHUP)
        rest, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 129
        assert errors == b"hisparse: ended by SIGHUP\n"
        assert b"\n[reused: 0 device" in answer + rest


def ranks_of(process: subprocess.Popen[bytes]) -> set[int]:
    """The processes in which ranks of a chat are."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return {int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()}


def test_ranks_outlive_an_answer_that_ctrl_c_ends_and_go_with_a_chat_that_is_told_to_end() -> None:
    # Told by SIGTERM while it waits for a line.
    with talking(*ENDLESS, "--tp", "2") as (process, written, read):
        ranks = set()
        for line in (b"hello", b"again"):
            say(written, line)
            read.read(1)
            ranks |= ranks_of(process)
            process.send_signal(signal.SIGINT)
            read.readline()
            assert read.readline().startswith(b"[reused: ")
        assert len(ranks) == 2
        assert ranks_of(process) == ranks
        process.terminate()
        assert process.wait(LIMIT_S) == 143
        assert process.stderr is not None
        assert process.stderr.read() == b"hisparse: ended by SIGTERM\n"
        until_s = time.monotonic() + LIMIT_S
        while any(map(is_alive, ranks)):
            assert time.monotonic() < until_s, "ranks are left"
            time.sleep(0.02)


def read_until(terminal: int, text: bytes) -> bytes:
    """All that a terminal shows up to `text`, which has to come."""
    shown = b""
    while not shown.endswith(text):
        shown += os.read(terminal, 1)
    return shown


def test_on_a_terminal_it_greets_and_prompts_and_ctrl_d_leaves() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*CHAT, "--max-tokens", "4"], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        greeting = read_until(ours, b"> ")
        os.write(ours, b"hello\n")
        answer = read_until(ours, b"\n> ")
        os.write(ours, b"\x04")
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"conversations of up to 16384 tokens" in greeting
    assert b"[reused: 0 device" in answer


def press_ctrl_c(terminal: int) -> bytes:
    """What it shows. It is pressed again where it came just before a read that then waits: both count as one."""
    os.write(terminal, b"\x03")
    shown = b""
    while b"hisparse" not in shown and b"again" not in shown:
        if not select.select([terminal], [], [], AGAIN_S)[0]:
            os.write(terminal, b"\x03")
        else:
            shown += os.read(terminal, 1)
    return shown


def test_on_a_terminal_ctrl_c_twice_leaves_and_once_does_not() -> None:
    ours, theirs = pty.openpty()
    # A session of its own, so that the terminal is its terminal and Ctrl-C is sent by it.
    become = "import os, sys; os.setsid(); os.close(os.open(os.ttyname(0), os.O_RDWR)); "
    become += "os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", become, *CHAT], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        read_until(ours, b"> ")
        assert b"Ctrl-C again" in press_ctrl_c(ours)
        assert read_until(ours, b"\n> ").startswith(b" leaves")
        assert press_ctrl_c(ours).endswith(b"hisparse")
        assert process.wait(LIMIT_S) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
