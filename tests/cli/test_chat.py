"""`hisparse chat` read from a pipe: what it answers, what it reuses, and that a mistake does not end it."""

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hisparse.cli.main import main
from hisparse.engine import Engine, RequestResult, SamplingParams, load_model
from hisparse.engine.reuse import ReusedTokens
from hisparse.errors import InputError
from tests.engine.parity import stock

FINDER = "builtin:finder"
TINY = ("builtin:tiny-v32", "builtin:tiny-glm")
FACT = "# the key of lantern is 48213"
QUESTION = "# the key of lantern is"
LINE = re.compile(
    r"^\[reused: (\d+) device, (\d+) host, (\d+) cpu tier, (\d+) files \| computed: (\d+) \| first token: [\d.]+ m?s "
    r"\| ([\d.]+|-) tokens/s\]$",
    re.MULTILINE,
)
BAD_INPUT = {
    "no room for a question": (["--context", "64", "--max-tokens", "64"], "leaves no room for a question"),
    "more than the model has": (["--context", "200000"], "it has 131072 positions"),
    "device budget": (["--device-kv", "lots"], "device KV budget 'lots' is not a size"),
    "host pool": (["--host-pool", "1XiB"], "host pool '1XiB' is not a size"),
    "block size": (["--block-size", "24"], "must be a power of two"),
    "metrics port": (["--metrics-port", "70000"], "--metrics-port"),
    "temperature": (["--temperature", "-1"], "temperature -1.0"),
    "ranks": (["--tp", "3"], "4 attention heads cannot be split over 3 ranks"),
    "no ranks": (["--tp", "0"], "--tp"),
    "host backing": (["--host-backing", "private"], "name their number with --tp"),
    "verify is not for conversations": (["--verify"], "--verify"),
}


@dataclass
class Talk:
    """What engines were asked, and what they gave."""

    num_engines: int = 0
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    results: list[RequestResult] = field(default_factory=list)

    @property
    def reused(self) -> list[ReusedTokens]:
        return [result.reused for result in self.results]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Everything that passes between the command and its engine."""
    seen = Talk()
    make, add, take = Engine.__init__, Engine.add_request, Engine.take_result

    def making(self: Engine, *arguments: Any, **options: Any) -> None:
        seen.num_engines += 1
        make(self, *arguments, **options)

    def adding(self: Engine, prompt_ids: Any, params: SamplingParams) -> str:
        seen.prompts.append(tuple(prompt_ids))
        seen.params.append(params)
        return add(self, prompt_ids, params)

    def taking(self: Engine, request_id: str) -> RequestResult:
        seen.results.append(take(self, request_id))
        return seen.results[-1]

    monkeypatch.setattr(Engine, "__init__", making)
    monkeypatch.setattr(Engine, "add_request", adding)
    monkeypatch.setattr(Engine, "take_result", taking)
    return seen


class Lines(io.StringIO):
    """A pipe to read from. Each line is made when it is asked for."""

    def __init__(self, lines: Iterable[str]) -> None:
        super().__init__()
        self._lines = iter(lines)

    def readline(self, size: int | None = -1) -> str:
        return next((f"{line}\n" for line in self._lines), "")


def chat(monkeypatch: pytest.MonkeyPatch, lines: Iterable[str], *arguments: str) -> int:
    """The exit code of a chat that is given `lines`."""
    monkeypatch.setattr("sys.stdin", Lines(lines))
    return main(["chat", *arguments])


def test_the_finder_remembers_what_it_was_told(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [FACT, "# the key of anchor is 99182", QUESTION, "# the key of anchor is"]
    assert chat(monkeypatch, lines, FINDER, "--max-tokens", "16") == 0
    shown = capsys.readouterr()
    answers = LINE.split(shown.out)[::7]
    assert [answer.strip() for answer in answers[2:4]] == ["48213", "99182"]
    assert shown.err == ""
    assert talk.num_engines == 1


@pytest.mark.parametrize("model", TINY)
def test_every_answer_is_stock_transformers_of_the_whole_conversation(
    model: str, talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a slab that holds little, so that the conversation's beginning is read from the host in later turns."""
    lines = [f"{number}: {'the rows of a conversation ' * 9}" for number in range(3)]
    squeezed = ("--device-kv", "330KiB", "--host-pool", "16MiB", "--max-tokens", "12", "--context", "4096")
    assert chat(monkeypatch, lines, model, *squeezed) == 0
    for prompt, params, result in zip(talk.prompts, talk.params, talk.results, strict=True):
        assert result.output_ids == stock(model, prompt, params, 12).tokens[: len(result.output_ids)]
    for before, prompt, result in zip(talk.prompts, talk.prompts[1:], talk.results, strict=False):
        assert prompt[: len(before) + len(result.output_ids)] == (*before, *result.output_ids)
    for result, reused in zip(talk.results, talk.reused, strict=True):
        assert reused.total == result.prompt_tokens
    assert all(reused.host > 0 and reused.computed < 300 for reused in talk.reused[1:])
    told = [tuple(map(int, numbers[:5])) for numbers in LINE.findall(capsys.readouterr().out)]
    assert told == [tuple(reused.as_dict().values()) for reused in talk.reused]


def test_with_room_on_the_device_a_turn_computes_what_is_new(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, ["a" * 100, "b" * 10, "c" * 10], TINY[0], "--max-tokens", "8", "--device-kv", "all") == 0
    for before, after in zip(talk.results, talk.results[1:], strict=False):
        known = (before.prompt_tokens + len(before.output_ids) - 1) // 16 * 16
        assert after.reused == ReusedTokens(device=known, computed=after.prompt_tokens - known)


def test_a_conversation_that_is_held_again_finds_its_kv_in_files(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = ("--offload-dir", str(tmp_path), "--cpu-tier", "8MiB", "--max-tokens", "8", "--device-kv", "all")
    for _ in range(2):
        assert chat(monkeypatch, ["a" * 200, "b" * 40], TINY[1], *tiers) == 0
    first, second = talk.results[:2], talk.results[2:]
    assert [result.output_ids for result in first] == [result.output_ids for result in second]
    assert [result.reused.files for result in first] == [0, 0]
    assert second[0].reused.files == 192
    assert "192 files" in capsys.readouterr().out


def test_a_reset_forgets_the_conversation_and_nothing_else(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [FACT, "/reset", QUESTION, "/reset", FACT, QUESTION]
    assert chat(monkeypatch, lines, FINDER, "--max-tokens", "16") == 0
    decode = load_model(FINDER).tokenizer.decode
    assert [decode(prompt) for prompt in (talk.prompts[1], talk.prompts[2])] == [QUESTION, FACT]
    assert "48213" not in talk.results[1].text
    assert talk.results[3].text.strip() == "48213"
    assert talk.num_engines == 1


def test_stats_say_where_the_kv_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, [FACT, "/stats"], TINY[0], "--max-tokens", "4") == 0
    shown = capsys.readouterr().out
    assert re.search(r"KV on device +\d", shown)
    assert re.search(r"rows served +\d+ resident", shown)


def test_quit_ends_it_and_so_does_the_end_of_the_input(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, ["", "  ", "hello", "/quit", "never asked"], TINY[0], "--max-tokens", "2") == 0
    assert len(talk.prompts) == 1
    assert chat(monkeypatch, [], TINY[0]) == 0


def test_an_unknown_command_is_one_line_and_is_not_sent(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, ["/rest", " /as text"], TINY[0], "--max-tokens", "2") == 0
    errors = capsys.readouterr().err
    assert errors.startswith("hisparse: there is no command /rest: /quit")
    assert errors.count("\n") == 1
    assert talk.prompts == [tuple(b" /as text")]


def test_a_conversation_that_is_too_long_is_one_line_and_is_kept(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [FACT, "x = 1 " * 200, QUESTION]
    assert chat(monkeypatch, lines, FINDER, "--max-tokens", "16", "--context", "120") == 0
    errors = capsys.readouterr().err
    assert re.fullmatch(r"hisparse: the conversation would have \d+ tokens, and 120 is the limit .*/reset.*\n", errors)
    assert len(talk.prompts) == 2
    assert talk.results[-1].text.strip() == "48213"


def test_an_answer_gets_shorter_where_the_limit_is_near(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, ["x" * 60], TINY[0], "--max-tokens", "16", "--context", "64") == 0
    assert (talk.params[0].max_tokens, len(talk.results[0].output_ids)) == (4, 4)


def test_a_conversation_that_no_pool_can_hold_is_one_line_and_is_kept(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tight = ("--device-kv", "330KiB", "--host-pool", "48KiB", "--max-tokens", "4")
    assert chat(monkeypatch, ["short", "x" * 3000, "short"], TINY[0], *tight) == 0
    errors = capsys.readouterr().err
    assert "host pool" in errors
    assert errors.count("\n") == 1
    assert len(talk.results) == 2
    assert talk.prompts[-1][: len(b"short")] == tuple(b"short")


def test_an_engine_that_finds_its_input_wrong_in_a_turn_is_not_asked_again(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is refused before a turn leaves the engine as it was; a step that was broken off does not."""

    def refuse(_: Engine) -> None:
        raise InputError("rank 1: this is not to be had")

    monkeypatch.setattr(Engine, "_step", refuse)
    assert chat(monkeypatch, ["one", "two"], TINY[0]) == 2
    assert capsys.readouterr().err == "hisparse: rank 1: this is not to be had\n"
    assert talk.prompts == [tuple(b"one")]


def test_generated_text_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--max-tokens", "200", "--temperature", "9", "--seed", "1")
    assert chat(monkeypatch, ["hello"], TINY[0], *options) == 0
    shown = capsys.readouterr().out
    assert "\N{REPLACEMENT CHARACTER}" in shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", shown)


@pytest.mark.parametrize(("arguments", "said"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_a_mistake_gives_one_line_and_exit_code_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, ["hello"], TINY[0], *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("hisparse: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err


def test_a_missing_model_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, [], "nowhere") == 2
    assert "no model at nowhere" in capsys.readouterr().err
