"""`hisparse generate` on the built-in models, with nothing replaced."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse.cli.main import main

HISPARSE = [sys.executable, "-m", "hisparse"]
TEXT = "".join(f"def step_{number}(rows): return rows[{number * 7919 % 101}]\n" for number in range(48))
MODELS = ("builtin:tiny-v32", "builtin:tiny-glm")
SMALL = ("--max-tokens", "12", "--ignore-eos", "--device-kv", "330KiB", "--host-pool", "16MiB")

MISTAKES = {
    "missing model": ("nowhere", ["--prompt", "x"], "no model at nowhere"),
    "unknown built-in model": ("builtin:huge", ["--prompt", "x"], "builtin:tiny-v32"),
    "device budget": (MODELS[0], ["--prompt", "x", "--device-kv", "20KiB"], "the least that runs one request is"),
    "host pool": (MODELS[0], ["--prompt", TEXT, "--device-kv", "330KiB", "--host-pool", "48KiB"], "host pool"),
    "hot rows": (MODELS[0], ["--prompt", "x", "--hot-rows", "16"], "must be at least 32"),
    "staging rows": (MODELS[0], ["--prompt", "x", "--staging-rows", "16"], "must be at least top-k, 32"),
    "block size": (MODELS[0], ["--prompt", "x", "--block-size", "24"], "must be a power of two"),
    "dtype": (MODELS[0], ["--prompt", "x", "--dtype", "int3"], "unknown dtype 'int3'"),
    "kv dtype": (MODELS[0], ["--prompt", "x", "--kv-dtype", "fp8_ds_mla"], "512+64 wide; this model's are 64+16"),
    "token id": (MODELS[0], ["--prompt-ids", "65,256"], "token id 256 is outside the vocabulary of 256"),
    "negative token id": (MODELS[0], ["--prompt-ids=-1"], "token id -1 is outside the vocabulary"),
    "too long": (MODELS[0], ["--prompt", "x", "--max-tokens", "131072"], "131073 tokens, prompt and output together"),
    "temperature": (MODELS[0], ["--prompt", "x", "--temperature", "-1"], "temperature -1.0"),
    "top-p": (MODELS[0], ["--prompt", "x", "--top-p", "0"], "top-p 0.0"),
    "ranks": (MODELS[0], ["--prompt", "x", "--tp", "3"], "4 attention heads cannot be split over 3 ranks"),
    "host backing": (MODELS[0], ["--prompt", "x", "--host-backing", "private"], "name their number with --tp"),
    "stop": (MODELS[0], ["--prompt", "x", "--stop", ""], "stop string is empty"),
}


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("model", "arguments", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gives_one_line_and_exit_code_2(
    model: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", model, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("hisparse: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "has no config.json"),
        ("{", "cannot be read"),
        (json.dumps({"model_type": "deepseek_v32"}), "has no index_topk"),
        (json.dumps({"model_type": "llama", "index_topk": 4}), "'llama'"),
    ],
)
def test_a_directory_that_is_no_sparse_model_is_refused(
    config: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


def test_cuda_without_a_device_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["generate", MODELS[0], "--prompt", "x", "--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("model", MODELS)
def test_most_kv_on_the_host_changes_nothing(model: str, prompt_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", model, "--prompt-file", prompt_file, *SMALL, "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verify"]["identical"] is True
    assert report["verify"]["max_logit_diff"] < 1e-4
    assert report["requests"][0]["prompt_tokens"] == len(TEXT)
    assert report["requests"][0]["output_tokens"] == 12
    assert report["kv"]["host_bytes"] > 4 * report["kv"]["device_bytes"]
    assert report["kv"]["device_bytes"] <= 330 << 10
    assert report["rows"]["unreachable"] == 0
    assert min(report["rows"]["miss"], report["spills"], report["moved"]["device_to_host_bytes"]) > 0


def test_two_processes_say_the_same_over_one_host_pool(prompt_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for options in (["--tp", "1"], ["--tp", "2", "--verify"]):
        assert main(["generate", MODELS[0], "--prompt-file", prompt_file, *SMALL, *options, "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    alone, together = reports
    assert together["verify"]["identical"] is True
    assert together["requests"][0]["text"] == alone["requests"][0]["text"]
    assert together["kv"] == alone["kv"]
    assert together["rows"] == alone["rows"]


def test_piped_output_is_text_and_table_with_no_bars(prompt_file: str) -> None:
    done = subprocess.run(
        [*HISPARSE, "generate", MODELS[0], "--prompt-file", prompt_file, *SMALL],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "rows served" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("num_ranks", ["1", "2"])
def test_ctrl_c_prints_the_table_so_far(prompt_file: str, num_ranks: str) -> None:
    endless = ["--max-tokens", "60000", "--ignore-eos", "--device-kv", "330KiB", "--stream", "--tp", num_ranks]
    process = subprocess.Popen(
        [*HISPARSE, "generate", MODELS[0], "--prompt-file", prompt_file, *endless],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    try:
        assert process.stdout is not None
        first = process.stdout.read(1)  # the first text of the answer: prefill is over, decoding goes on
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    shown = (first + rest).decode("utf-8")
    assert process.returncode == 130, errors
    assert "interrupted" in shown
    assert "rows served" in shown
    assert errors.decode("utf-8") == "hisparse: interrupted\n"
