"""`hisparse eval`: mistakes are one line, runs end in JSON or tables, and a difference is an exit code."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hisparse.cli import interrupts
from hisparse.cli.eval import CHUNK_TOKENS, most_tokens, parse_contexts
from hisparse.cli.eval_render import ANSWER_WIDTH, shortened
from hisparse.cli.main import main
from hisparse.cli.progress import EvalProgress
from hisparse.evaluation.evaluate import RUNS
from hisparse.evaluation.report import EvalReport
from hisparse.evaluation.runs import Run
from tests.evaluation.wired import write_checkpoint

MISTAKES = {
    "contexts that are none": (["--context", "8k"], "contexts '8k' are not integers"),
    "empty context": (["--context", "512,"], "are not integers"),
    "no tokens": (["--context", "0"], "each at least 1"),
    "a context twice": (["--context", "512,512"], "must be different"),
    "no keys": (["--keys", "0"], "--keys"),
    "no prompts": (["--prompts", "0"], "--prompts"),
    "device budget": (["--device-kv", "lots"], "device KV budget 'lots' is not a size"),
    "device share": (["--device-kv", "120%"], "at most 100%"),
    "host pool": (["--host-pool", "1XiB"], "host pool '1XiB' is not a size"),
    "plot in no folder": (["--plot", "nowhere/plot.svg"], "name a file in a folder that exists"),
    "folder as plot": (["--plot", "."], "name a file"),
    "plot where nothing can be written": (["--plot", "/proc/plot.svg"], "name a file that may be written"),
    "plot without a name": (["--plot", ""], "'--plot': it is empty"),
    "empty dtype": (["--dtype", ""], "the name after --dtype is empty"),
}
RUN_MISTAKES = {
    "facts that do not fit": (["--context", "64", "--keys", "16"], "16 facts and a question do not fit"),
    "more names than there are": (["--context", "8192", "--keys", "2000"], "there are only"),
    "budget": (["--context", "400", "--device-kv", "4KiB"], "the least that runs one request is"),
    "positions": (["--context", "20000", "--prompts", "1", "--device-kv", "all"], "it has 16384 positions"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that answers every question."""
    folder = tmp_path_factory.mktemp("wired")
    write_checkpoint(folder)
    return str(folder)


def small(checkpoint: str, *more: str) -> list[str]:
    options = ["--context", "640", "--prompts", "2", "--keys", "2", "--seed", "5", "--device-kv", "20%"]
    return ["eval", checkpoint, "--dtype", "float32", "--block-size", "16", "--host-pool", "16MiB", *options, *more]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gives_one_line_and_exit_code_2(
    arguments: list[str], said: str, backend: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "builtin:finder", *arguments]) == 2
    assert_one_line(capsys, said)
    assert backend.loaded == []


@pytest.mark.parametrize(("arguments", "said"), RUN_MISTAKES.values(), ids=RUN_MISTAKES)
def test_what_the_model_cannot_do_is_one_line_too(
    arguments: list[str], said: str, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", checkpoint, "--dtype", "float32", "--block-size", "16", *arguments]) == 2
    assert_one_line(capsys, said)


def assert_one_line(capsys: pytest.CaptureFixture[str], said: str) -> None:
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("hisparse: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err


def test_json_has_all_runs_and_nothing_else_is_printed(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    assert main(small(checkpoint, "--json", "--stock", "--plot", str(plot))) == 0
    shown = capsys.readouterr()
    said = json.loads(shown.out)
    assert shown.err == ""
    assert said["accuracy"] == {"resident": 1.0, "hisparse": 1.0, "broken": 0.0, "stock": 1.0}
    assert 0.3 < said["needle_rows"]["share_from_host"] <= 1.0
    assert plot.read_text(encoding="utf-8").startswith("<svg")


def test_tables_show_questions_answers_and_the_verdict(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(small(checkpoint)) == 0
    shown = capsys.readouterr()
    assert "hisparse gave the tokens of resident on all 2 prompts" in shown.out
    assert "100.0%" in shown.out
    assert "5 of 5" in shown.out
    assert shown.err == ""


def test_a_difference_is_exit_code_1(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hisparse.evaluation import evaluate

    def wrong(*arguments: Any) -> Run:
        run = hisparse(*arguments)
        return replace(run, output_ids=((), *run.output_ids[1:]))

    hisparse = evaluate.RUNS["hisparse"]
    monkeypatch.setitem(evaluate.RUNS, "hisparse", wrong)
    assert main(small(checkpoint)) == 1
    assert "hisparse DIFFERS from resident on 1 of 2 prompts" in capsys.readouterr().out


def test_interrupted_is_one_line_and_exit_code_130(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> EvalReport:
        raise KeyboardInterrupt

    monkeypatch.setattr("hisparse.evaluation.evaluate.evaluate", interrupt)
    assert main(small(checkpoint)) == 130
    assert capsys.readouterr().err == "hisparse: interrupted\n"


def end_in(run: str, context: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a signal come when `run` is to answer questions of `context` tokens."""
    usual = RUNS[run]

    def answer(loaded: Any, questions: Any, *more: Any) -> Run:
        if len(questions[0].ids) > context - 64:
            signal.raise_signal(number)
        return usual(loaded, questions, *more)

    monkeypatch.setitem(RUNS, run, answer)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_finished_is_shown_when_it_is_ended_early(
    number: signal.Signals,
    code: int,
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plot = tmp_path / "plot.svg"
    interrupts.heed_endings()
    end_in("broken", 704, number, monkeypatch)
    command = small(checkpoint, "--context", "640,704", "--plot", str(plot))
    assert main([*command, "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert said["accuracy"] == {"resident": 1.0, "hisparse": 1.0, "broken": 0.0}
    assert [list(context["accuracy"]) for context in said["contexts"]] == [
        ["resident", "hisparse", "broken"],
        ["resident", "hisparse"],
    ]
    assert plot.read_text(encoding="utf-8").startswith("<svg")


def test_the_table_of_what_was_finished_has_no_number_for_what_was_not(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end_in("broken", 704, signal.SIGINT, monkeypatch)
    assert main(small(checkpoint, "--context", "640,704")) == 130
    shown = capsys.readouterr()
    assert re.search(r"704 │ +100.0% │ +100.0% │ +- │", shown.out)
    assert shown.err == "hisparse: interrupted\n"


def test_a_control_that_changes_no_answer_is_said_and_exits_1(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small(checkpoint, "--device-kv", "all")) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(
        "hisparse: the control proves nothing: with 640 tokens, a broken host changed no answer"
    )
    assert shown.err.count("\n") == 1
    assert "hisparse gave the tokens of resident on all 2 prompts" in shown.out


def test_without_a_budget_short_prompts_get_the_least_that_runs_one_and_most_of_them_is_on_the_host(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--dtype", "float32", "--block-size", "16", "--context", "512", "--prompts", "2", "--keys", "2", "--json"]
    assert main(["eval", checkpoint, *short]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["accuracy"]["broken"] < 1
    assert said["needle_rows"]["share_from_host"] > 0.5
    assert main(["eval", checkpoint, *short, "--device-kv", "10%"]) == 2


def test_looking_whether_a_plot_can_be_written_leaves_everything_as_it_was(tmp_path: Path) -> None:
    old = tmp_path / "old.svg"
    old.write_text("old")
    for path in (old, tmp_path / "new.svg"):
        assert main(["eval", "no/such/folder", "--plot", str(path)]) == 2
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.svg", "old")]


def test_a_model_that_is_not_there_is_one_line_that_names_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    for model in ("builtin:seeker", "no/such/folder"):
        assert main(["eval", model]) == 2
        assert_one_line(capsys, "builtin:finder, builtin:tiny-v32, builtin:tiny-glm")


def test_a_share_is_of_the_most_kv_that_there_is_at_one_time() -> None:
    # Eight long prompts hardly meet, as long as their answers are five tokens; eight short ones all do.
    assert most_tokens([8192] * 8, answer_tokens=5) == 8192 + 5 * CHUNK_TOKENS
    assert most_tokens([300] * 8, answer_tokens=5) == 8 * 300
    assert most_tokens([8192], answer_tokens=5) == 8192


def test_contexts_keep_their_order() -> None:
    assert parse_contexts("8192, 1024,2048") == (8192, 1024, 2048)


def test_what_a_model_says_is_shown_in_one_short_line() -> None:
    assert shortened(" 48213") == "48213"
    assert shortened("4\n\n 2\x1b[1m") == "4 2\N{REPLACEMENT CHARACTER}[1m"
    assert len(shortened("x" * 50)) == ANSWER_WIDTH


def test_progress_counts_no_token_twice() -> None:
    with EvalProgress(10, shown=False) as progress:
        for run, tokens in (("resident", 8), ("resident", 8), ("hisparse", 3)):
            progress.advance(run, tokens)
        assert [task.completed for task in progress._progress.tasks] == [10, 3]
