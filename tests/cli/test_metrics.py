"""`--metrics-port`: metrics while the command runs, and one line when the port cannot be had."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from hisparse.cli.main import main
from hisparse.metrics import EngineMetrics
from tests.metrics.scraped import Scrape

MODEL = "builtin:tiny-v32"
GENERATE = [sys.executable, "-m", "hisparse", "generate", MODEL, "--prompt", "hello " * 40, "--device-kv", "330KiB"]
WHERE = re.compile(r"hisparse: metrics at (http://127\.0\.0\.1:\d+/metrics)\n")


def test_metrics_are_served_while_it_runs_and_no_longer() -> None:
    endless = ["--max-tokens", "60000", "--ignore-eos", "--stream", "--metrics-port", "0"]
    with subprocess.Popen([*GENERATE, *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            where = WHERE.fullmatch(process.stderr.readline().decode())
            assert where is not None
            seen = []
            for num_more in (1, 50):
                process.stdout.read(num_more)  # the answer has begun, and went on
                with urllib.request.urlopen(where[1]) as answer:
                    seen.append(Scrape(answer.read().decode("utf-8")))
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(where[1])
    tokens = [scrape.one("hisparse_generated_tokens_total") for scrape in seen]
    assert 0 < tokens[0] < tokens[1]
    assert seen[1].one("hisparse_running_requests") == 1
    assert seen[1]["hisparse_prompt_tokens_total"]["computed",] == 240


def test_json_stays_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", MODEL, "--prompt", "hello", "--max-tokens", "2", "--json", "--metrics-port", "0"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["requests"][0]["output_tokens"] == 2
    assert WHERE.fullmatch(shown.err)


@pytest.mark.parametrize("command", [["generate", MODEL, "--prompt", "hello"], ["chat", MODEL]])
def test_a_port_in_use_is_one_line_before_a_model_is_loaded(
    command: list[str], backend: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main([*command, "--metrics-port", port]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        f"hisparse: metrics port {port} of 127.0.0.1 cannot be had: Address already in use; 0 takes a free one\n"
    )
    assert backend.loaded == []


def test_without_the_option_nothing_is_measured_or_served(backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", MODEL, "--prompt", "hello"]) == 0
    assert main(["generate", MODEL, "--prompt", "hello", "--verify", "--metrics-port", "0"]) == 0
    assert backend.meters[0] is None
    assert isinstance(backend.meters[1], EngineMetrics)
