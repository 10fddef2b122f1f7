"""The demo keeps its own promises: long prompts, several at once, and a small share of the KV on the device."""

import subprocess
from pathlib import Path

import pytest

from hisparse.cli.budget import Workload, device_budget
from hisparse.config import ModelGeometry
from hisparse.geometry import RowFormat
from tools import demo


def test_prompts_are_long_and_differ_in_length(tmp_path: Path) -> None:
    sizes = [path.stat().st_size for path in demo.write_prompts(tmp_path)]
    assert len(sizes) == len(set(sizes)) == 4
    assert min(sizes) >= 4000


def test_the_device_gets_at_most_fifteen_percent() -> None:
    model = ModelGeometry(RowFormat("float32", 320), leader_of=(0, 1, 2, 3), index_topk=32, index_row_bytes=64)
    tokens = sum(demo.SOURCES.values()) + len(demo.SOURCES) * demo.MAX_TOKENS
    workload = Workload(model, block_size=16, hot_rows=64, staging_rows=128, num_running=4, total_tokens=tokens)
    budget = device_budget(demo.DEVICE_SHARE, workload)
    assert budget is not None
    # The last token of a request is never written, and pages round up: the margin below 15 % covers both.
    least_kv = (tokens - len(demo.SOURCES)) * model.num_layers * model.row.row_bytes
    assert budget <= 0.15 * least_kv


def test_both_models_are_verified() -> None:
    for model in demo.MODELS:
        arguments = demo.command(model, [Path("a"), Path("b")])
        assert model in arguments
        assert "--verify" in arguments


@pytest.mark.parametrize("is_there", [False, True])
def test_the_finder_is_asked_where_it_is_installed(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def start(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, returncode=0)

    monkeypatch.setattr(demo.subprocess, "run", start)
    monkeypatch.setattr(demo, "has_finder", lambda: is_there)
    assert demo.main() == 0
    assert [command[3:5] for command in started[2:]] == ([["eval", "builtin:finder"]] if is_there else [])
    assert started[0][3] == started[1][3] == "generate"
