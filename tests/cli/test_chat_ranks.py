"""`hisparse chat --tp`: what one process says, several say together, and the end of one of them is the end."""

import multiprocessing
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from hisparse.cli.main import main
from hisparse.engine.tp import ProcessExecutor
from tests.cli.test_chat import LINE, TINY, chat
from tests.engine.tp.faults import At, kill
from tests.engine.tp.quick_ranks import quick_ranks

MODEL = TINY[0]
TWO = ("--tp", "2")
QUESTIONS = [f"{number}: {'the rows of a conversation ' * 4}" for number in range(2)]
SQUEEZED = ("--device-kv", "225KiB", "--host-pool", "16MiB", "--max-tokens", "6", "--context", "4096")


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with quick_ranks():
        yield


@pytest.fixture(autouse=True)
def _quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessExecutor, "start_method", "forkserver")


def ranks() -> list[int]:
    """The processes that this one has started and that have not ended."""
    return sorted(process.pid or 0 for process in multiprocessing.active_children())


def noting_ranks(lines: Iterable[str], seen: list[list[int]]) -> Iterator[str]:
    """`lines`, and in `seen` the ranks that there are when each of them is asked for."""
    for line in lines:
        seen.append(ranks())
        yield line


def timeless(shown: str) -> str:
    """What a chat shows, without what the clock says in it."""
    return re.sub(r"first token: .*", "", shown)


def killed(rank: int) -> str:
    return rf"hisparse: rank {rank} \(process \d+\) was ended by SIGKILL; before, it decodes, and said nothing\n"


def test_two_processes_say_what_one_says_and_the_driving_one_has_no_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [*QUESTIONS, "/stats", "/reset", "and now", "/quit"]
    assert chat(monkeypatch, lines, MODEL, *SQUEEZED) == 0
    alone = capsys.readouterr().out
    monkeypatch.setattr("hisparse.engine.load_model", lambda *_: pytest.fail("the driving process loads weights"))
    seen: list[list[int]] = []
    assert chat(monkeypatch, noting_ranks(lines, seen), MODEL, *SQUEEZED, *TWO) == 0
    together = capsys.readouterr().out
    turns = LINE.findall(together)
    assert len(turns) == 3
    assert int(turns[1][1]) > 0, "nothing was on the host"
    assert timeless(together) == timeless(alone)
    assert len(seen[0]) == 2
    assert seen == [seen[0]] * len(lines)
    assert ranks() == []


def test_each_process_may_have_a_host_pool_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[str] = []
    for backing in ("shared", "private"):
        assert chat(monkeypatch, ["/stats"], MODEL, "--host-pool", "2MiB", *TWO, "--host-backing", backing) == 0
        sizes += re.findall(r"in a pool of ([\d.]+) MiB", capsys.readouterr().out)
    shared, private = map(float, sizes)
    assert private == pytest.approx(2 * shared, abs=0.02)


def test_what_one_process_left_in_files_several_do_not_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for num_ranks, more in ((0, ()), (2, TWO)):
        seen: list[list[int]] = []
        lines = noting_ranks(QUESTIONS, seen)
        assert chat(monkeypatch, lines, MODEL, *SQUEEZED, "--offload-dir", str(tmp_path), *more) == 0
        assert list(map(len, seen)) == [num_ranks] * len(QUESTIONS)
        shown = capsys.readouterr()
        assert shown.err == ""
        told.append((LINE.sub("", shown.out), [int(turn[3]) for turn in LINE.findall(shown.out)]))
    (alone, none), (together, files) = told
    assert together == alone
    assert none == [0, 0]
    assert min(files) >= 80


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_a_turn_is_named_and_ends_the_chat(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ProcessExecutor, "prepare", At(kill, rank, "decodes"))
    assert chat(monkeypatch, [*QUESTIONS, "never asked"], MODEL, *SQUEEZED, *TWO) == 1
    shown = capsys.readouterr()
    assert re.fullmatch(killed(rank), shown.err)
    assert LINE.findall(shown.out) == []
    assert ranks() == []


def kill_one() -> None:
    """Kill rank 1, and return when it is gone."""
    victim = next(process for process in multiprocessing.active_children() if process.name == "hisparse-1")
    victim.kill()
    victim.join()


@pytest.mark.parametrize("then", ["more", "/stats", "/reset"])
def test_a_rank_that_is_killed_between_turns_is_named_and_ends_the_chat(
    then: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def murderous() -> Iterator[str]:
        yield QUESTIONS[0]
        kill_one()
        yield then
        pytest.fail("it went on")

    assert chat(monkeypatch, murderous(), MODEL, *SQUEEZED, *TWO) == 1
    shown = capsys.readouterr()
    assert re.fullmatch(killed(1), shown.err)
    assert len(LINE.findall(shown.out)) == 1
    assert ranks() == []


def test_it_ends_at_once_when_a_rank_is_killed_while_a_line_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def murderous() -> Iterator[str]:
        yield QUESTIONS[0]
        kill_one()
        signal.raise_signal(signal.SIGCHLD)  # these ranks are children of a server, which is sent the system's
        pytest.fail("it waited on")

    assert chat(monkeypatch, murderous(), MODEL, *SQUEEZED, *TWO) == 1
    assert re.fullmatch(killed(1), capsys.readouterr().err)
    assert ranks() == []


def test_generate_ends_as_a_chat_does_when_a_rank_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ProcessExecutor, "prepare", At(kill, 1, "decodes"))
    assert main(["generate", MODEL, "--prompt", "rows", "--max-tokens", "4", *TWO]) == 1
    shown = capsys.readouterr()
    assert re.fullmatch(killed(1), shown.err)
    assert shown.out == ""
    assert ranks() == []
