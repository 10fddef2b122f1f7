"""`hisparse generate` around an engine: what it hands over, what it prints, how it ends."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hisparse.cli import session
from hisparse.cli.main import main
from hisparse.config import WriteBack
from hisparse.offload.config import FileOptions

FakeBackend = Any
MODEL = "builtin:tiny-v32"


def test_it_prints_the_text_and_one_table(backend: FakeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", MODEL, "--prompt", "hello"]) == 0
    shown = capsys.readouterr()
    text, table = shown.out.split("╭")
    assert text.strip() == "ok"
    for fact in (r"1 +5 +2 +250\.0 ms +12\.5 ms +length", "1.00 MiB .12.5% of the total.", "4 resident, 28 on host"):
        assert re.search(fact, table), fact
    assert "10 resident, 20 hot, 30 missed" in table
    assert "5 tokens computed, 3 device, 2 host, 1 CPU tier, 4 files" in table
    assert "UNREACHABLE" not in table
    assert shown.err == ""


def test_every_line_of_the_table_fits_eighty_columns(
    backend: FakeBackend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["generate", MODEL, "--prompt", "a", "--prompt", "b", "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_json_is_one_object_with_the_documented_keys(backend: FakeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", MODEL, "--prompt", "hello", "--json", "--verify"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["requests", "kv", "rows", "moved", "reused", "spills", "preemptions", "verify"]
    assert report["requests"] == [
        {"prompt_tokens": 5, "output_tokens": 2, "text": "ok", "ttft_s": 0.25, "tpot_s": 0.0125}
    ]
    assert set(report["kv"]) == {
        "total_bytes",
        "device_bytes",
        "indexer_bytes",
        "host_bytes",
        "host_physical_bytes",
        "pages_resident",
        "pages_host",
    }
    assert report["rows"] == {"resident": 10, "hot": 20, "miss": 30, "unreachable": 0}
    assert report["moved"] == {"host_to_device_bytes": 4096, "device_to_host_bytes": 1 << 20}
    assert report["reused"] == {"device": 3, "host": 2, "cpu_tier": 1, "files": 4, "computed": 5}
    assert (report["spills"], report["preemptions"]) == (28, 2)
    assert report["verify"] == {"reference": "transformers", "identical": True, "max_logit_diff": 1e-6}


def test_without_verify_the_json_says_null_and_nothing_is_verified(
    backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", MODEL, "--prompt", "hello", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verify"] is None
    assert backend.verified == []
    assert backend.engines[0].config.keep_logits is False


def test_a_difference_exits_1_and_is_named(backend: FakeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    backend.verdict = SimpleNamespace(
        reference="transformers",
        identical=False,
        max_logit_diff=float("inf"),
        mismatches=(SimpleNamespace(request_id="request-0", reference="stock", position=3, expected=7, found=None),),
    )
    assert main(["generate", MODEL, "--prompt", "hello", "--json", "--verify"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["verify"] == {
        "reference": "transformers",
        "identical": False,
        "max_logit_diff": None,
    }
    assert (
        shown.err == "hisparse: request-0 differs from the stock run at output token 3: no token instead of token 7\n"
    )
    assert main(["generate", MODEL, "--prompt", "hello", "--verify"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_prompts_come_in_the_documented_order(backend: FakeBackend, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("grün\n", encoding="utf-8")
    ids = ["--prompt-ids", "1, 2 3"]
    assert main(["generate", MODEL, *ids, "--prompt-file", str(file), "--prompt", "x", "--prompt", "y"]) == 0
    requests = [list(request) for request, _ in backend.engines[0].requests]
    assert requests == [[ord("x")], [ord("y")], list("grün\n".encode()), [1, 2, 3]]


def test_options_reach_the_engine(backend: FakeBackend) -> None:
    options = "--device-kv 512KiB --host-pool 2MiB --hot-rows 96 --staging-rows 64 --block-size 32 --max-running 3"
    options += " --chunk-size 100 --write-back eager --kv-dtype fp8_ds_mla --verify"
    sampling = "--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 5 --seed 11 --stop END --stop-token 4 --ignore-eos"
    prompts = ["--prompt", "hi"] * 4
    assert main(["generate", MODEL, *prompts, *options.split(), *sampling.split()]) == 0
    assert vars(backend.engines[0].config) == {
        "max_tokens": 2 + 7,
        "slab_bytes": 512 << 10,
        "host_pool_bytes": 2 << 20,
        "hot_rows": 96,
        "staging_rows": 64,
        "block_size": 32,
        "max_running": 3,
        "chunk_tokens": 100,
        "write_back": WriteBack.EAGER,
        "kv_dtype": "fp8_ds_mla",
        "offload": None,
        "parallel": None,
        "keep_logits": True,
        "fixed_shapes": True,
    }
    _, params = backend.engines[0].requests[0]
    assert vars(params) == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 11,
        "stop": ("END",),
        "stop_token_ids": (4,),
        "ignore_eos": True,
    }


def test_several_processes_compute_a_model_that_this_one_loads_to_verify_only(backend: FakeBackend) -> None:
    prompt = ["generate", MODEL, "--prompt", "hello", "--tp", "4"]
    assert main(prompt) == 0
    assert main([*prompt, "--host-backing", "private", "--verify"]) == 0
    first, second = (engine.config.parallel for engine in backend.engines)
    assert (first.num_ranks, first.device, first.backing.value) == (4, "cpu", "shared")
    assert (second.num_ranks, second.device, second.backing.value) == (4, "cpu", "private")
    assert [device for _, _, device in backend.loaded] == ["meta", "meta", "cpu"]


def test_tiers_reach_the_engine_with_defaults_for_what_is_not_said(backend: FakeBackend) -> None:
    prompt = ["generate", MODEL, "--prompt", "hello"]
    assert main([*prompt, "--cpu-tier", "8MiB"]) == 0
    assert main([*prompt, "--offload-dir", "kv"]) == 0
    assert main([*prompt, "--offload-dir", "kv", "--offload-capacity", "1GiB", "--cpu-tier", "2MiB"]) == 0
    memory, files, both = (engine.config.offload for engine in backend.engines)
    assert (memory.cpu_bytes, memory.files) == (8 << 20, None)
    assert (files.cpu_bytes, files.files) == (256 << 20, FileOptions((Path("kv"),), 16 << 30))
    assert (both.cpu_bytes, both.files) == (2 << 20, FileOptions((Path("kv"),), 1 << 30))


def test_where_nothing_may_leave_the_device_the_default_budget_holds_everything(backend: FakeBackend) -> None:
    prompt = ["generate", MODEL, "--prompt", "hello"]
    assert main([*prompt, "--write-back", "never"]) == 0
    assert main([*prompt, "--write-back", "never", "--device-kv", "1MiB"]) == 0
    assert main(prompt) == 0
    budgets = [engine.config.slab_bytes for engine in backend.engines]
    assert budgets[:2] == [None, 1 << 20]
    assert budgets[2] is not None


def test_a_share_of_the_kv_is_one_of_rows_as_they_are_stored(backend: FakeBackend) -> None:
    share = ["generate", MODEL, "--prompt", "hello", "--max-tokens", "95", "--device-kv", "50%"]
    assert main(share) == 0
    assert main([*share, "--kv-dtype", "fp8_ds_mla"]) == 0
    budgets = [engine.config.slab_bytes for engine in backend.engines]
    assert budgets == [100 * 4 * 320 // 2, 100 * 4 * 656 // 2]


def test_there_are_no_more_slots_than_prompts(backend: FakeBackend) -> None:
    assert main(["generate", MODEL, "--prompt", "a", "--prompt", "b", "--max-running", "8"]) == 0
    assert backend.engines[0].config.max_running == 2


@pytest.mark.parametrize(
    ("model", "dtype", "block_size"), [(MODEL, "float32", 16), ("/models/checkpoint", "bfloat16", 64)]
)
def test_defaults_depend_on_the_model(backend: FakeBackend, model: str, dtype: str, block_size: int) -> None:
    assert main(["generate", model, "--prompt", "hello"]) == 0
    assert backend.loaded == [(model, dtype, "cpu")]
    config = backend.engines[0].config
    assert (config.block_size, config.hot_rows, config.staging_rows) == (block_size, 64, 128)
    assert config.host_pool_bytes == 1 << 30


def test_ctrl_c_prints_the_table_so_far(backend: FakeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    backend.interrupt_after = 1
    assert main(["generate", MODEL, "--prompt", "hello", "--verify"]) == 130
    shown = capsys.readouterr()
    assert re.search(r"1 +5 +1 +250\.0 ms +- +interrupted", shown.out)
    assert shown.err == "hisparse: interrupted\n"
    assert backend.verified == []
    assert backend.engines[0].closed


def test_ctrl_c_while_verifying_keeps_the_results(
    backend: FakeBackend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "_verify", interrupted)
    assert main(["generate", MODEL, "--prompt", "hello", "--verify", "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert report["requests"][0]["text"] == "ok"
    assert report["verify"] is None


def test_streaming_writes_the_text_once(backend: FakeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", MODEL, "--prompt", "hello", "--stream"]) == 0
    assert capsys.readouterr().out.split("╭")[0] == "ok\n"


@pytest.mark.parametrize("extra", [[], ["--stream"]])
def test_generated_text_cannot_steer_the_terminal(
    backend: FakeBackend, capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    backend.text = "a\x1b[2Jb\x07"
    assert main(["generate", MODEL, "--prompt", "hello", *extra]) == 0
    out = capsys.readouterr().out
    assert "a\N{REPLACEMENT CHARACTER}[2Jb" in out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert main(["generate", MODEL, "--prompt", "hello", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"][0]["text"] == backend.text


def test_bars_are_drawn_on_a_terminal_only(
    backend: FakeBackend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal; only our own check can say otherwise
    assert main(["generate", MODEL, "--prompt", "hello"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(session, "on_terminal", lambda: True)
    assert main(["generate", MODEL, "--prompt", "hello", "--verify"]) == 0
    bars = capsys.readouterr().err
    assert "prefill" in bars
    assert "decode" in bars
