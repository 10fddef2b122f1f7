"""Absorbed attention equals expanded attention, and its bits depend on nothing but the row itself."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hisparse.engine import attention
from hisparse.engine.attention import LayerAttention, MlaWeights, absorb_query, absorbed_mla, attend, split_weights
from hisparse.engine.batch import ScheduledTokens, StepBatch, build_batch
from hisparse.engine.models import LoadedModel, load_model
from hisparse.protocol import Table

HEADS, NOPE, ROPE, LORA, VALUE, TOPK = 4, 16, 16, 64, 16, 32
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def layer_weights(dtype: torch.dtype = torch.float32) -> MlaWeights:
    return MlaWeights(draw(HEADS, NOPE, LORA, dtype=dtype), draw(HEADS, VALUE, LORA, dtype=dtype, seed=1), scaling=0.18)


def expanded_mla(
    q_nope: torch.Tensor, q_rope: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, weights: MlaWeights
) -> torch.Tensor:
    """The textbook form: expand each row to K and V of every head. Float64."""
    latent, rope = rows[..., :LORA].double(), rows[..., LORA:].double()
    keys = torch.einsum("tkl,hnl->tkhn", latent, weights.w_uk.double())
    values = torch.einsum("tkl,hvl->tkhv", latent, weights.w_uv.double())
    scores = torch.einsum("thn,tkhn->thk", q_nope.double(), keys) + torch.einsum("thr,tkr->thk", q_rope.double(), rope)
    scores = (scores * weights.scaling).masked_fill(~valid.unsqueeze(1), -torch.inf)
    return torch.einsum("thk,tkhv->thv", scores.softmax(-1), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_absorbed_attention_equals_expanded_attention(dtype: torch.dtype) -> None:
    weights = layer_weights(dtype)
    q_nope, q_rope = draw(9, HEADS, NOPE, dtype=dtype), draw(9, HEADS, ROPE, dtype=dtype, seed=2)
    rows = draw(9, TOPK, LORA + ROPE, dtype=dtype)
    valid = torch.arange(TOPK) <= torch.arange(9).unsqueeze(1) * 3
    expected = expanded_mla(q_nope, q_rope, rows, valid, weights)
    # Float32 inside for both dtypes: what is left is float32 rounding of values of size 10.
    absorbed = absorbed_mla(q_nope, q_rope, rows, valid, weights).double()
    torch.testing.assert_close(absorbed, expected, atol=2e-4, rtol=1e-4)


def test_a_row_that_is_not_valid_is_not_read() -> None:
    weights, query = layer_weights(), draw(3, HEADS, LORA + ROPE)
    rows = draw(3, TOPK, LORA + ROPE)
    valid = torch.ones((3, TOPK), dtype=torch.bool)
    valid[:, 20:] = False
    changed = rows.clone()
    changed[:, 20:] = 50.0
    assert torch.equal(attend(query, changed, valid, weights), attend(query, rows, valid, weights))
    changed[:, 19] = 50.0
    assert not torch.equal(attend(query, changed, valid, weights), attend(query, rows, valid, weights))


def test_a_query_without_a_valid_row_gives_zeros_and_not_nan() -> None:
    nothing = torch.zeros((2, TOPK), dtype=torch.bool)
    result = attend(draw(2, HEADS, LORA + ROPE), draw(2, TOPK, LORA + ROPE), nothing, layer_weights())
    assert torch.equal(result, torch.zeros(2, HEADS, LORA))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 33])
def test_bits_do_not_depend_on_how_many_rows_share_a_pass(size: int, dtype: torch.dtype, threads: int) -> None:
    weights = layer_weights(dtype)
    query = absorb_query(draw(67, HEADS, NOPE, dtype=dtype), draw(67, HEADS, ROPE, dtype=dtype), weights)
    rows, valid = draw(67, TOPK, LORA + ROPE, dtype=dtype), torch.arange(TOPK) <= torch.arange(67).unsqueeze(1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = attend(query, rows, valid, weights)
        passes = zip(query.split(size), rows.split(size), valid.split(size), strict=True)
        parts = [attend(*part, weights) for part in passes]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), whole)


def test_a_stock_up_projection_is_split_by_head() -> None:
    module = load_model("builtin:tiny-v32").model.model.layers[0].self_attn
    weights = split_weights(module)
    latent = draw(5, LORA)
    expanded = module.kv_b_proj(latent).view(5, HEADS, NOPE + VALUE)
    made = torch.cat([latent @ weights.w_uk.mT, latent @ weights.w_uv.mT], dim=-1).transpose(0, 1)
    torch.testing.assert_close(made, expanded, atol=1e-5, rtol=1e-5)


def test_a_sharded_up_projection_gives_its_local_heads() -> None:
    stock = load_model("builtin:tiny-v32").model.model.layers[0].self_attn
    local = stock.kv_b_proj.weight.detach()[: 2 * (NOPE + VALUE)]
    sharded = SimpleNamespace(detach=lambda: SimpleNamespace(to_local=lambda: local))
    module = SimpleNamespace(
        kv_b_proj=SimpleNamespace(weight=sharded), qk_nope_head_dim=NOPE, v_head_dim=VALUE, scaling=1.0
    )
    assert torch.equal(split_weights(module).w_uv, split_weights(stock).w_uv[:2])


class Layer:
    """Layer 0 of a plain worker with rows written, and a step of two decode rows and a chunk of 50 over it."""

    def __init__(self, loaded: LoadedModel, worker: Any) -> None:
        self.worker = worker
        self.handle = worker.handles[0]
        self.handle.write(torch.arange(4096), draw(4096, LORA + ROPE))
        self.query = draw(1, HEADS, 52, NOPE + ROPE)
        choose = torch.Generator().manual_seed(3)
        self.indices = (
            torch.stack([torch.randperm(200, generator=choose)[:TOPK].sort().values for _ in range(52)])
            .int()
            .unsqueeze(0)
        )
        # Decode rows select physical rows, of requests that nothing is evicted from.
        self.indices[0, :2] = worker.tables.rows[Table.RESIDENT][:2, :TOPK]
        items = [ScheduledTokens(slot, [1], 200, True, True) for slot in (0, 1)]
        self.batch: StepBatch = build_batch([*items, ScheduledTokens(2, [1] * 50, 200, True, False)])

    def run(self, staging_rows: int = 512) -> torch.Tensor:
        self.handle.staging_rows = staging_rows
        layer = LayerAttention(self.handle, layer_weights(), follows=False)
        return layer(self.query, self.indices, self.batch)


@pytest.fixture
def layer(make_worker: Callable[[LoadedModel], Any]) -> Layer:
    loaded = load_model("builtin:tiny-v32")
    return Layer(loaded, make_worker(loaded))


def test_a_prefill_goes_on_where_the_staging_blocks_were_full(layer: Layer) -> None:
    layer.run(staging_rows=100)
    assert layer.handle.passes == [3] * 16 + [2]
    assert sum(layer.handle.passes) == 50


def test_a_pass_is_planned_over_twice_the_rows_that_the_last_one_served(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    stage = layer.handle.stage

    def record(positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        given.append(positions.shape[0])
        rows: torch.Tensor = stage(positions, slots)
        return rows

    monkeypatch.setattr(layer.handle, "stage", record)
    layer.run(staging_rows=100)
    assert given == [50] + [6] * 14 + [5, 2]
    given.clear()
    layer.run(staging_rows=50 * TOPK)
    assert given == [50]


def test_bits_depend_neither_on_the_size_of_passes_nor_on_where_rows_lie(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = layer.run()
    hosted = torch.zeros((4, 1024), dtype=torch.bool)
    hosted[2, :200] = torch.rand(200, generator=torch.Generator().manual_seed(1)) < 0.8
    layer.worker.evict(hosted)
    for staging_rows in (TOPK, 100, 512):
        assert torch.equal(layer.run(staging_rows), expected)
    monkeypatch.setattr(attention, "PASS_BYTES", 1)
    assert torch.equal(layer.run(), expected)


def test_control_a_row_that_was_not_staged_is_seen(layer: Layer) -> None:
    expected = layer.run()
    hosted = torch.zeros((4, 1024), dtype=torch.bool)
    hosted[2, :200] = True
    layer.worker.evict(hosted)
    layer.handle.hosted = torch.zeros_like(hosted)
    assert not torch.equal(layer.run(), expected)


def test_decode_rows_read_the_physical_rows_they_were_given_and_prefill_rows_are_looked_up(layer: Layer) -> None:
    result = layer.run()
    weights = layer_weights()
    by_row = layer.query[0].transpose(0, 1)
    physical = layer.indices[0].long().clone()
    physical[2:] = layer.worker.tables.rows[Table.RESIDENT][2][physical[2:]]
    rows = layer.handle.storage[physical]
    valid = torch.ones(physical.shape, dtype=torch.bool)
    expected = expanded_mla(by_row[..., :NOPE], by_row[..., NOPE:], rows, valid, weights)
    torch.testing.assert_close(result[0].double(), expected, atol=2e-4, rtol=1e-4)
