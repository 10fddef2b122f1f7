"""Each mistake that the command line can see gives one clear line and exit code 2, before any model is loaded."""

from pathlib import Path
from typing import Any

import pytest

from hisparse.cli.main import main
from hisparse.errors import InputError

MODEL = "builtin:tiny-v32"

MISTAKES = {
    "no prompt": ([], "there is no prompt"),
    "empty prompt": (["--prompt", ""], "prompt 1 is empty: it needs at least one character"),
    "prompt that is no text": (["--prompt", "x", "--prompt", "a\udcff"], "prompt 2 is not UTF-8 text (byte 1)"),
    "stop that is no text": (["--prompt", "x", "--stop", "\udcff"], "is not UTF-8 text (byte 0)"),
    "empty folder name": (["--prompt", "x", "--offload-dir", ""], "'--offload-dir': it is empty"),
    "empty dtype": (["--prompt", "x", "--dtype", ""], "the name after --dtype is empty: use one of float32"),
    "more than there is": (["--prompt", "x", "--device-kv", "9" * 21 + "TiB"], "is more than any machine has"),
    "more than a float": (["--prompt", "x", "--host-pool", "9" * 400], "is more than any machine has"),
    "missing prompt file": (["--prompt-file", "nowhere.txt"], "nowhere.txt: No such file"),
    "directory as prompt file": (["--prompt-file", "."], "Is a directory"),
    "prompt ids that are none": (["--prompt-ids", "1,x"], "not integers"),
    "empty prompt ids": (["--prompt-ids", " "], "is empty"),
    "device budget": (["--prompt", "x", "--device-kv", "lots"], "device KV budget 'lots' is not a size"),
    "device share": (["--prompt", "x", "--device-kv", "120%"], "at most 100%"),
    "no device share": (["--prompt", "x", "--device-kv", "0%"], "above 0%"),
    "host pool": (["--prompt", "x", "--host-pool", "1XiB"], "host pool '1XiB' is not a size"),
    "empty host pool": (["--prompt", "x", "--host-pool", "0"], "at least one byte"),
    "CPU tier": (["--prompt", "x", "--cpu-tier", "much"], "CPU tier 'much' is not a size"),
    "offload capacity": (
        ["--prompt", "x", "--offload-dir", "d", "--offload-capacity", "1XB"],
        "offload capacity '1XB' is not",
    ),
    "capacity of nothing": (["--prompt", "x", "--offload-capacity", "1GiB"], "name one with --offload-dir"),
    "block size": (["--prompt", "x", "--block-size", "0"], "block size 0 must be a power of two"),
    "device": (["--prompt", "x", "--device", "tpu"], "'tpu' is not one of 'cpu', 'cuda'"),
    "kv dtype": (["--prompt", "x", "--kv-dtype", "int4"], "'int4' is not one of 'auto', 'fp8_ds_mla'"),
    "max tokens": (["--prompt", "x", "--max-tokens", "0"], "'--max-tokens': '0' is too small: it must be at least 1"),
    "seed": (["--prompt", "x", "--seed", "red"], "'--seed': 'red' is no whole number, such as 8"),
    "no number": (["--prompt", "x", "--top-p", "most"], "'--top-p': 'most' is no number, such as 0.7"),
    "backing": (["--prompt", "x", "--host-backing", "both"], "'--host-backing': 'both' is not one of"),
    "unknown option": (["--prompt", "x", "--fast"], "--fast"),
    "one word too many": (["--prompt", "x", "y"], "(y): hisparse generate --help lists what there is"),
    "stream and json": (["--prompt", "x", "--stream", "--json"], "--stream and --json"),
    "stream of two": (["--prompt", "x", "--prompt", "y", "--stream"], "there are 2"),
}


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gives_one_line_and_exit_code_2(
    arguments: list[str], said: str, backend: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", MODEL, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("hisparse: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
    assert "Value error" not in shown.err
    assert backend.loaded == []


def test_a_prompt_that_is_too_long_is_named(backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt", "short", "--prompt", "x" * 16380]
    assert main(["generate", MODEL, *prompts, "--max-tokens", "8"]) == 2
    assert capsys.readouterr().err == (
        "hisparse: prompt 2: 16388 tokens, prompt and output together, do not fit the model, which has 16384 "
        "positions: it has 16380, and --max-tokens is 8\n"
    )
    assert main(["generate", MODEL, *prompts, "--max-tokens", "4"]) == 0


@pytest.mark.parametrize("command", ["generate", "chat", "eval"])
def test_a_model_without_a_name_is_not_the_current_folder(
    command: str, backend: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "", *(["--prompt", "x"] if command == "generate" else [])]) == 2
    assert capsys.readouterr().err.startswith("hisparse: the model's name is empty: name a checkpoint directory")
    assert backend.loaded == []


def test_a_directory_too_small_for_a_block_is_said_with_the_name_of_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--offload-dir", str(tmp_path), "--offload-capacity", "1"]
    assert main(["generate", MODEL, "--prompt", "x", *folder]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("hisparse: a file capacity of 1 bytes (--offload-capacity) holds no block")
    assert "it must be at least" in shown


@pytest.mark.parametrize(("temperature", "said"), [("1e-310", "at least 1e-06"), ("nan", "must be 0 (greedy)")])
def test_a_temperature_that_cannot_be_divided_by_is_refused(
    temperature: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", MODEL, "--prompt", "x", "--temperature", temperature]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "size", "said"),
    [
        ("--host-pool", "900TiB", "the host pool takes"),
        ("--device-kv", "900TiB", "there is no memory to keep account of"),
        ("--staging-rows", "100000000000", "there is no memory to keep account of"),
        ("--cpu-tier", "900TiB", "a shared region of"),
    ],
)
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_pools_that_no_machine_has_are_one_line(
    option: str, size: str, said: str, ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", MODEL, "--prompt", "x", option, size, "--tp", ranks]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"hisparse: {said}")
    assert shown.err.count("\n") == 1


def test_a_prompt_that_is_not_text_is_named(backend: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(b"ok\xff")
    assert main(["generate", MODEL, "--prompt-file", str(file)]) == 2
    assert capsys.readouterr().err == f"hisparse: prompt file {file} is not UTF-8 text (byte 2)\n"


def test_a_command_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generte"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "use one of generate, chat, eval, doctor, kv" in shown


def test_a_missing_model_argument_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("hisparse: Missing argument 'MODEL': name a checkpoint directory, builtin:finder")
    assert shown.count("\n") == 1


def test_a_fault_of_the_library_keeps_its_traceback(backend: Any) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("broken")

    backend.load_model = fault
    with pytest.raises(RuntimeError, match="broken"):
        main(["generate", MODEL, "--prompt", "x"])


def test_a_message_of_several_lines_is_put_on_one(backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise InputError("first\n  second")

    backend.load_model = refuse
    assert main(["generate", MODEL, "--prompt", "x"]) == 2
    assert capsys.readouterr().err == "hisparse: first second\n"
