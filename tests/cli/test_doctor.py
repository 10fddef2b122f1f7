"""`hisparse doctor` says in lines or in JSON what is there, and its exit code whether that is enough."""

import json

import pytest

from hisparse.cli.main import main
from hisparse.worker.cuda import machine
from hisparse.worker.cuda.machine import Finding, Status

FINE = Finding("driver", Status.OK, "CUDA 13.0")
SLOW = Finding("link", Status.ADVICE, "3 GB/s", "look for other traffic", {"to_device_gbps": 3.0})
ABSENT = Finding("nvrtc", Status.MISSING, "not installed", "pip install it")


def found(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    monkeypatch.setattr(machine, "inspect_machine", lambda device: findings)


def test_a_machine_with_all_that_it_takes_exits_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, FINE, SLOW)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "CUDA 13.0" in shown
    assert "fix: look for other traffic" in shown
    assert shown.endswith("the GPU can be used\n")


def test_what_is_missing_exits_1_and_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, FINE, ABSENT)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "missing  nvrtc" in shown
    assert "fix: pip install it" in shown


def test_json_holds_every_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found(monkeypatch, FINE, SLOW, ABSENT)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["usable"] is False
    assert [finding["status"] for finding in report["findings"]] == ["ok", "advice", "missing"]
    assert report["findings"][1]["numbers"] == {"to_device_gbps": 3.0}


def test_this_machine_is_described_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr()
    assert shown.err == ""
    assert {"driver", "torch", "nvrtc", "triton", "memlock", "numa"} <= {
        line.split()[1] for line in shown.out.splitlines() if line.split()[0] in ("ok", "advice", "missing")
    }


def test_a_gpu_that_is_not_there_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert main(["doctor", "--device", "2"]) == 2
    assert "there is no GPU 2" in capsys.readouterr().err
