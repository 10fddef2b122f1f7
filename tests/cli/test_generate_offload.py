"""`hisparse generate` with tiers below the pools, on the built-in models, with nothing replaced."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hisparse.cli.main import main

MODELS = ("builtin:tiny-v32", "builtin:tiny-glm")
TEXT = "".join(f"def step_{number}(rows): return rows[{number * 7919 % 101}]\n" for number in range(12))
SMALL = ("--max-tokens", "6", "--ignore-eos", "--device-kv", "330KiB", "--host-pool", "16MiB", "--json")


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def in_a_new_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hisparse", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def generate(*arguments: str) -> dict[str, Any]:
    ended = in_a_new_process("generate", *arguments)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def texts(report: dict[str, Any]) -> list[str]:
    return [request["text"] for request in report["requests"]]


@pytest.mark.parametrize("model", MODELS)
def test_a_second_process_reads_what_the_first_left_and_a_flipped_byte_is_a_miss(
    model: str, prompt_file: str, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    command = (model, *SMALL, "--prompt-file", prompt_file, "--prompt-file", prompt_file, "--offload-dir", str(folder))
    first = generate(*command)
    assert sum(first["reused"].values()) == 2 * len(TEXT)
    assert first["reused"]["files"] == 0
    second = generate(*command, "--verify")
    assert second["verify"]["identical"]
    assert texts(second) == texts(first)
    assert second["reused"]["files"] > 0
    assert second["reused"]["computed"] < first["reused"]["computed"]
    assert in_a_new_process("kv", "verify", str(folder)).returncode == 0

    victim = sorted(folder.glob("v1-*/*/*.kv"))[0]
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 4
    victim.write_bytes(raw)
    checked = in_a_new_process("kv", "verify", str(folder))
    assert checked.returncode == 1
    assert victim.stem in checked.stdout + checked.stderr
    third = generate(*command, "--verify")
    assert third["verify"]["identical"]
    assert texts(third) == texts(first)
    # The run set it aside, and stored the chunk again.
    assert in_a_new_process("kv", "verify", str(folder)).returncode == 0
    assert list(folder.glob("v1-*/quarantine/*.bad"))


def test_memory_alone_is_enough_and_leaves_no_file(prompt_file: str, tmp_path: Path) -> None:
    report = generate(MODELS[0], *SMALL, "--prompt-file", prompt_file, "--cpu-tier", "8MiB")
    assert report["reused"]["computed"] == len(TEXT)
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.txt"]
    assert not list(Path("/dev/shm").glob("*hisparse*engine*"))


def _file(path: Path) -> Path:
    path.write_text("a file")
    return path


def _foreign(path: Path) -> Path:
    """A directory whose namespace says that it is something else."""
    path.mkdir()
    assert main(["generate", MODELS[0], *SMALL, "--prompt", "x" * 40, "--offload-dir", str(path)]) == 0
    for identity in path.glob("v1-*/identity.json"):
        identity.write_text('{"format": 99}\n')
    return path


MISTAKES: dict[str, tuple[Any, list[str], str]] = {
    "a file": (_file, [], "kv"),
    "below a file": (lambda path: _file(path) / "deeper", [], "deeper"),
    "foreign": (_foreign, [], "identity.json does not describe its directory: move it away"),
    "small CPU tier": (None, ["--cpu-tier", "20KiB"], "CPU tier of 20480 bytes holds no chunk"),
    "huge CPU tier": (None, ["--cpu-tier", "900TiB"], "the machine has"),
    "small capacity": (Path, ["--offload-capacity", "4KiB"], "holds no block"),
    "/dev/null": (None, ["--offload-dir", "/dev/null"], "/dev/null"),
    "/proc": (None, ["--offload-dir", "/proc/kv"], "/proc/kv"),
}


@pytest.mark.parametrize(("make", "arguments", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_tier_that_cannot_be_had_is_one_line_and_exit_code_2(
    make: Any, arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--offload-dir", str(make(tmp_path / "kv"))] if make is not None else []
    capsys.readouterr()
    assert main(["generate", MODELS[0], "--prompt", "x" * 40, *where, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("hisparse: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
