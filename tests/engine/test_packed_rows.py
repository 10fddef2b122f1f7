"""With rows packed as fp8 the engine generates what it does with all of them on the device, and what stock
transformers does with the same numbers rounded; and the checks see a wrong row."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hisparse.cli.main import main
from hisparse.config import ModelGeometry
from hisparse.engine import Engine, EngineConfig, LoadedModel, RequestResult, SamplingParams
from hisparse.engine.stock import stock_generate, stock_model
from hisparse.engine.verify import LOGIT_BOUNDS, PACKED_LOGIT_BOUND, VerifyResult, logit_bound, verify
from hisparse.errors import InputError, InvariantError
from hisparse.kernels import fp8_rows
from hisparse.worker.runtime import LeaderRuntime
from tests.engine.blas import rows_are_independent
from tests.engine.parity import Case, Outcome, prompt, run
from tests.engine.test_parity import FirstMisses
from tests.engine.wide import wide_model

CASE = Case((prompt(1, 230), prompt(2, 97), prompt(3, 161)), max_tokens=10, copy_delay=2, kv_dtype="fp8_ds_mla")
SHORT = replace(CASE, prompts=(prompt(7, 20),))
"""Its selections hold all rows there are, so that every token depends on each of them."""


def logits(results: Sequence[RequestResult]) -> list[torch.Tensor]:
    return [torch.stack(result.logits) for result in results]


def same_bits(one: Outcome, other: Outcome) -> bool:
    pairs = zip(logits(one.results), logits(other.results), strict=True)
    return one.tokens == other.tokens and all(torch.equal(*pair) for pair in pairs)


def verified(loaded: LoadedModel, case: Case) -> VerifyResult:
    results = run(loaded, case).results
    params = [replace(case.params, max_tokens=case.max_tokens)] * len(case.prompts)
    return verify(loaded, case.prompts, params, case.config(loaded), results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_packed_rows_lie_changes_no_token(dtype: str) -> None:
    loaded = wide_model(dtype)
    small, resident = run(loaded, CASE), run(loaded, replace(CASE, spare_blocks=None))
    assert small.stats.spills > 0 == resident.stats.spills
    assert small.stats.rows.miss > 0 == resident.stats.rows.miss
    assert small.stats.rows.unreachable == 0
    assert small.tokens == resident.tokens


def test_where_packed_rows_lie_changes_no_bit() -> None:
    """One request at a time: in company, the model's own products round as the size of the step has it."""
    loaded, alone = wide_model(), replace(CASE, max_running=1)
    small, resident = run(loaded, alone), run(loaded, replace(alone, spare_blocks=None))
    assert small.stats.rows.miss > 0 == resident.stats.rows.miss
    assert same_bits(small, resident)


def test_a_prefill_stages_packed_rows() -> None:
    loaded = wide_model()
    # Nothing is decoded: whatever is loaded, a prefill staged.
    only = replace(CASE, max_tokens=1, chunk=50, max_running=1)
    small, resident = run(loaded, only), run(loaded, replace(only, spare_blocks=None))
    assert small.stats.moved.host_to_device_bytes == small.stats.rows.miss * 2 * 656 > 0
    assert same_bits(small, resident)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verification_rounds_the_rows_of_all_its_runs(dtype: str) -> None:
    result = verified(wide_model(dtype), CASE)
    assert result.identical
    # A logit of bfloat16 may be rounded otherwise, by 2**-5 at most, where the runs' sums differ in their last bits.
    rounds = dtype == "bfloat16" and not rows_are_independent()
    assert result.resident_logit_diff < (0.1 if rounds else 1e-4)
    assert "with rows rounded as fp8_ds_mla" in result.reference
    if dtype == "float32":
        assert result.relative_logit_diff < LOGIT_BOUNDS[torch.float32] < PACKED_LOGIT_BOUND


def test_no_bound_of_packed_rows_is_below_that_of_their_dtype() -> None:
    assert logit_bound(torch.float32, "auto") == LOGIT_BOUNDS[torch.float32]
    assert logit_bound(torch.float32, "fp8_ds_mla") == PACKED_LOGIT_BOUND
    assert logit_bound(torch.bfloat16, "fp8_ds_mla") == logit_bound(torch.bfloat16, "auto")


def test_packed_rows_take_a_smaller_share_of_the_same_pages() -> None:
    loaded = wide_model()
    packed, plain = run(loaded, SHORT), run(loaded, replace(SHORT, kv_dtype="auto"))
    assert packed.stats.kv.pages_resident == plain.stats.kv.pages_resident
    for name in ("total_bytes", "device_bytes"):
        assert getattr(packed.stats.kv, name) * 2304 == getattr(plain.stats.kv, name) * 656, name
    assert packed.stats.kv.indexer_bytes == plain.stats.kv.indexer_bytes


def test_the_command_line_packs_and_verifies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hisparse.engine.load_model", lambda name, dtype, device: wide_model(dtype, device))
    text = "".join(f"def step_{number}(rows): return rows[{number}]\n" for number in range(8))
    small = ["--max-tokens", "4", "--dtype", "float32", "--block-size", "16", "--device-kv", "330KiB"]
    assert main(["generate", "wide", "--prompt", text, *small, "--kv-dtype", "fp8_ds_mla", "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verify"]["identical"] is True
    assert report["kv"]["total_bytes"] % (16 * 2 * 656) == 0
    assert report["rows"]["miss"] > 0


def test_a_model_of_other_rows_is_refused_before_anything_is_allocated(tiny: LoadedModel) -> None:
    with pytest.raises(InputError, match="this model's are 64"):
        Engine(tiny, EngineConfig(max_tokens=64, kv_dtype="fp8_ds_mla"))
    with pytest.raises(InputError, match="unknown KV dtype 'int4': use one of auto, fp8_ds_mla"):
        EngineConfig(max_tokens=64, kv_dtype="int4")  # type: ignore[arg-type]


def test_a_plan_for_packed_rows_wants_their_geometry() -> None:
    loaded, config = wide_model(), EngineConfig(max_tokens=64, kv_dtype="fp8_ds_mla")
    packed: ModelGeometry = loaded.geometry_for("fp8_ds_mla")
    assert config.plan(packed).device.row_bytes == 656
    with pytest.raises(InvariantError, match="float32 rows is none of fp8_ds_mla rows"):
        config.plan(loaded.geometry)


# Controls.


def test_control_stock_without_rounding_is_out_of_the_bound() -> None:
    loaded = wide_model()
    ours = run(loaded, SHORT).results[0]
    stock = stock_generate(stock_model(loaded), SHORT.prompts[0], SamplingParams(), len(ours.output_ids))
    assert (ours.logits[0] - stock.logits[0]).norm() / stock.logits[0].norm() > PACKED_LOGIT_BOUND


@pytest.mark.parametrize("damage", [lambda row: row[:512].bitwise_xor_(0x80), lambda row: row[512:528].zero_()])
def test_control_one_wrong_row_in_both_of_our_runs_is_out_of_the_bound(
    monkeypatch: pytest.MonkeyPatch, damage: object
) -> None:
    sound, damaged = fp8_rows.pack_rows, 0

    def pack_rows(rows: torch.Tensor) -> torch.Tensor:
        nonlocal damaged
        packed = sound(rows)
        if rows.shape[0] == len(SHORT.prompts[0]):
            damaged += 1
            damage(packed[3])  # type: ignore[operator]
        return packed

    monkeypatch.setattr(fp8_rows, "pack_rows", pack_rows)
    result = verified(wide_model(), SHORT)
    assert damaged == 2 * 2, "two layers of two runs"
    assert result.mismatches == ()
    assert result.relative_logit_diff > PACKED_LOGIT_BOUND
    assert not result.identical


def test_control_one_wrong_bit_on_the_host_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(runtime: LeaderRuntime, slot: int, position: int) -> None:
        block = int(runtime.context.tables.host[slot, position // 16])
        start = runtime.views.host.layout.row_offset(block * 16 + position % 16)
        runtime.views.host.storage[start + 3] ^= 0x80

    loaded, alone = wide_model(), replace(CASE, max_running=1)
    sound = run(loaded, alone)
    first_misses = FirstMisses(monkeypatch, flip, layer=0)
    assert not same_bits(run(loaded, alone), sound)
    assert first_misses.num_damaged == 1
