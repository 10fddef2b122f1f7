"""The demo keeps its own promises: long prompts, several at once, and a small share of the KV on the device."""

import json
import subprocess
from pathlib import Path
from typing import Any

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


def test_the_finder_is_asked_after_both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def start(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, returncode=0, stdout="")

    monkeypatch.setattr(demo.subprocess, "run", start)
    assert demo.main() == 0
    assert [command[3:5] for command in started] == [
        ["generate", "builtin:tiny-v32"],
        ["generate", "builtin:tiny-glm"],
        ["eval", "builtin:finder"],
    ]


def test_a_person_sees_question_answer_and_where_it_was_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "FINDER_TOKENS", 1024)
    monkeypatch.setattr(demo, "FINDER_PROMPTS", 1)
    monkeypatch.setattr(demo, "FINDER_SHARE", "50%")
    assert demo.ask_finder() == 0
    shown = capsys.readouterr().out
    told, asked, answer = (line.split("  ")[-1].strip() for line in shown.splitlines()[3:6])
    assert told.startswith("# the key of ")
    assert asked == " ".join(told.split()[:-1])
    assert answer == f"{told.split()[-1]}, right"
    assert "of them fetched from host memory" in shown
    assert "0% right over a host tier that is broken on purpose" in shown


@pytest.mark.parametrize(("hisparse", "from_host", "code"), [(1.0, 4, 0), (0.75, 4, 1), (1.0, 0, 1)])
def test_an_answer_that_is_wrong_or_did_not_come_from_the_host_fails_the_demo(
    hisparse: float, from_host: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {
        "contexts": [{"answers": []}],
        "identical": True,
        "accuracy": {"hisparse": hisparse, "broken": 0.0},
        "needle_rows": {"from_host": from_host},
    }
    done = subprocess.CompletedProcess([], returncode=0, stdout=json.dumps(report))
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: done)
    assert demo.ask_finder() == code
