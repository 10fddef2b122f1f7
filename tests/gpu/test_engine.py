"""The engine on a GPU: the tokens of the all-resident run, exactly, and the CPU's logits within rounding."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from hisparse.cli.main import main
from hisparse.config import KVDtype
from hisparse.engine import Engine, EngineConfig, LoadedModel, SamplingParams, cuda_graphs, load_model
from hisparse.engine.cuda_runner import CudaModelRunner
from hisparse.engine.result import RequestResult
from tests.engine.wide import wide_model
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

MODELS = ("builtin:tiny-v32", "builtin:tiny-glm")
TOKENS = 24
TEXT = "".join(f"def step_{number}(rows): return rows[{number * 7919 % 101}]\n" for number in range(48))
PROMPTS = [
    list(TEXT[start : start + length].encode()) for start, length in ((0, 1500), (300, 900), (77, 1210), (5, 40))
]
SMALL = EngineConfig(
    max_tokens=1600,
    slab_bytes=330 << 10,
    host_pool_bytes=16 << 20,
    block_size=16,
    max_running=4,
    chunk_tokens=256,
    keep_logits=True,
    fixed_shapes=True,
    debug=True,
)
LOGIT_BOUNDS = {"float32": 1e-4, "bfloat16": 0.3}
"""As `engine.verify` bounds them: norm of the difference over the norm, for the median token."""


def run(loaded: LoadedModel, config: EngineConfig, prompts: Sequence[list[int]] = PROMPTS) -> list[RequestResult]:
    with Engine(loaded, config) as engine:
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        for _ in engine.run():
            pass
        spills = engine.stats().spills
        assert engine.stats().rows.unreachable == 0
        assert (spills > 0) is (config.slab_bytes is not None)
        return engine.results()


def tokens(results: Sequence[RequestResult]) -> list[tuple[int, ...]]:
    return [result.output_ids for result in results]


def slab_for(loaded: LoadedModel, kv_dtype: KVDtype = "auto") -> EngineConfig:
    """A slab that holds far less than the four requests."""
    geometry = loaded.geometry_for(kv_dtype)
    page = geometry.num_layers * geometry.row.row_bytes * SMALL.block_size
    return replace(SMALL, slab_bytes=60 * page, kv_dtype=kv_dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_the_all_resident_run_and_logits_bit_for_bit(model: str, dtype: str) -> None:
    loaded = load_model(model, dtype, "cuda")
    config = slab_for(loaded)
    spilled, resident = run(loaded, config), run(loaded, replace(config, slab_bytes=None))
    assert tokens(spilled) == tokens(resident)
    for ours, theirs in zip(spilled, resident, strict=True):
        assert torch.equal(torch.stack(ours.logits), torch.stack(theirs.logits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_packed_rows_lie_changes_no_bit(dtype: str) -> None:
    loaded = wide_model(dtype, "cuda")
    config = slab_for(loaded, "fp8_ds_mla")
    spilled, resident = run(loaded, config), run(loaded, replace(config, slab_bytes=None))
    assert tokens(spilled) == tokens(resident)
    for ours, theirs in zip(spilled, resident, strict=True):
        assert torch.equal(torch.stack(ours.logits), torch.stack(theirs.logits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_cpu_s_within_the_bound(model: str, dtype: str) -> None:
    on_gpu = load_model(model, dtype, "cuda")
    found = run(on_gpu, slab_for(on_gpu), PROMPTS[1:])
    on_cpu = load_model(model, dtype)
    expected = run(on_cpu, replace(slab_for(on_cpu), fixed_shapes=False), PROMPTS[1:])
    assert median_difference(found, expected) < LOGIT_BOUNDS[dtype]
    if dtype == "float32":
        assert tokens(found) == tokens(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_over_packed_rows_are_the_cpu_s_within_the_bound_of_bfloat16(dtype: str) -> None:
    on_gpu, on_cpu = wide_model(dtype, "cuda"), wide_model(dtype)
    found = run(on_gpu, slab_for(on_gpu, "fp8_ds_mla"), PROMPTS[2:])
    expected = run(on_cpu, replace(slab_for(on_cpu, "fp8_ds_mla"), fixed_shapes=False), PROMPTS[2:])
    assert median_difference(found, expected) < LOGIT_BOUNDS["bfloat16"]


def median_difference(found: Sequence[RequestResult], expected: Sequence[RequestResult]) -> float:
    """Of the tokens up to and including the first one of each request that differs."""
    differences = []
    for ours, theirs in zip(found, expected, strict=True):
        for token, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
            differences.append(float((a.cpu() - b).norm() / b.norm()))
            if ours.output_ids[token] != theirs.output_ids[token]:
                break
    return sorted(differences)[len(differences) // 2]


@pytest.mark.parametrize("model", [*MODELS, "packed"])
def test_replayed_steps_compute_what_eager_ones_do(model: str) -> None:
    loaded = wide_model("float32", "cuda") if model == "packed" else load_model(model, "float32", "cuda")
    config = replace(slab_for(loaded, "fp8_ds_mla" if model == "packed" else "auto"), fixed_shapes=False)
    assert tokens(run(loaded, config)) == tokens(run(loaded, replace(config, cuda_graphs=False)))


def test_a_size_that_was_forgotten_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(MODELS[0], "float32", "cuda")
    config = replace(slab_for(loaded), fixed_shapes=False)
    expected = tokens(run(loaded, config))
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    assert tokens(run(loaded, config)) == expected
    with Engine(loaded, config) as engine:
        assert isinstance(engine.runner, CudaModelRunner)
        kept = []
        for prompt in PROMPTS:
            engine.add_request(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        for _ in engine.run():
            kept.append(engine.runner.graphs.num_captured)
        assert max(kept) == 1


def test_steps_are_replayed_and_each_size_is_captured_once() -> None:
    loaded = load_model(MODELS[0], "float32", "cuda")
    with Engine(loaded, replace(slab_for(loaded), fixed_shapes=False)) as engine:
        assert isinstance(engine.runner, CudaModelRunner)
        for prompt in PROMPTS:
            engine.add_request(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        steps = sum(step.decode_tokens > 0 for step in engine.run())
        assert 0 < engine.runner.graphs.num_captured < steps / 2


def test_the_model_is_as_before_when_the_engine_is_closed() -> None:
    loaded = load_model(MODELS[0], "float32", "cuda")
    before = loaded.model.config._experts_implementation
    run(loaded, replace(SMALL, slab_bytes=None), PROMPTS[3:])
    assert loaded.model.config._experts_implementation == before
    assert loaded.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_generate_verifies_itself(model: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--max-tokens", "12", "--ignore-eos", "--device-kv", "400KiB", "--host-pool", "16MiB", "--dtype", dtype]
    code = main(["generate", model, "--prompt", TEXT, *small, "--device", "cuda", "--verify", "--json"])
    report = json.loads(capsys.readouterr().out)
    print({key: report["verify"][key] for key in report["verify"] if key != "reference"}, report["rows"])
    assert report["verify"]["identical"] is True
    assert code == 0
    assert report["rows"]["miss"] > 0
    assert report["rows"]["unreachable"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generate_verifies_itself_over_packed_rows(
    dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hisparse.engine.load_model", lambda name, dtype, device: wide_model(dtype, device))
    small = ["--max-tokens", "12", "--ignore-eos", "--block-size", "16", "--device-kv", "600KiB", "--dtype", dtype]
    small += ["--kv-dtype", "fp8_ds_mla", "--device", "cuda"]
    code = main(["generate", "wide", "--prompt", TEXT, *small, "--verify", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["verify"]["identical"] is True
    assert code == 0
    assert report["rows"]["miss"] > 0
