"""The Triton kernels against plain torch in float32, and against themselves in other company."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from hisparse.engine.attention import MlaWeights, attend
from hisparse.engine.indexer import index_scores
from hisparse.errors import InputError
from hisparse.geometry import RowFormat, device_blocks, latent_row
from hisparse.kernels import fp8_rows
from hisparse.kernels.triton_ops.attention import RowElements, attend_rows
from hisparse.kernels.triton_ops.index_scores import IndexRows, paged_index_scores
from hisparse.worker.views import PagedCacheView
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

BLOCK_SIZE = 64
NUM_BLOCKS = 80
SCALING = 0.13

BOUNDS = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3, "fp8_ds_mla": 8e-3}
"""Norm of the difference over the norm of the result: what rounding the weights to the rows' dtype costs."""


class Cache:
    """One layer, the second of three, full of random rows."""

    def __init__(self, name: str, lora: int, rope: int) -> None:
        row = latent_row(name, lora, rope)
        geometry = device_blocks(row, 3, BLOCK_SIZE)
        storage = torch.zeros(NUM_BLOCKS * geometry.block_stride, dtype=torch.uint8, device="cuda")
        self.view = PagedCacheView.over(storage, geometry.layer(1, NUM_BLOCKS))
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(
            name, torch.uint8
        )
        self.elements = RowElements(self.dtype, lora, rope)
        values = torch.randn(self.view.layout.num_rows, lora + rope, device="cuda")
        stored = fp8_rows.pack_rows(values) if self.dtype is torch.uint8 else values.to(self.dtype)
        self.view.rows(self.dtype).copy_(stored.view(NUM_BLOCKS, BLOCK_SIZE, -1))
        # Row 0 is nobody's: reading it where there is no row would show.
        self.view.rows(self.dtype)[0] = 0xFF if self.dtype is torch.uint8 else torch.nan

    @property
    def query_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype is torch.uint8 else self.dtype

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        values = self.view.read(rows, self.dtype)
        if self.dtype is torch.uint8:
            return fp8_rows.unpack_rows(values.flatten(0, -2)).view(*rows.shape, -1)
        return values.float()


def select(num_queries: int, topk: int) -> torch.Tensor:
    """Distinct random rows; fewer for later queries, and none for the last."""
    first = BLOCK_SIZE
    rows = torch.stack(
        [first + torch.randperm((NUM_BLOCKS - 1) * BLOCK_SIZE, device="cuda")[:topk] for _ in range(num_queries)]
    ).int()
    for query in range(1, num_queries):
        rows[query, topk // query :] = -1
    rows[-1] = -1
    return rows


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(("heads", "topk"), [(128, 2048), (4, 32), (20, 600)])
def test_attention_is_the_torch_path_s_within_rounding(name: str, heads: int, topk: int) -> None:
    lora, rope = (512, 64) if name == "fp8_ds_mla" or heads == 128 else (64, 16)
    cache = Cache(name, lora, rope)
    rows = select(4, topk)
    query = torch.randn(4, heads, lora + rope, device="cuda").to(cache.query_dtype)
    found = attend_rows(query, rows, cache.view, cache.elements, SCALING)
    weights = MlaWeights(query.new_empty(heads, 1, lora), query.new_empty(heads, 1, lora), SCALING)
    expected = attend(query.float(), cache.read(rows), rows >= 0, weights)
    assert (found[-1] == 0).all()
    assert (found - expected).norm() / expected.norm() < BOUNDS[name]


def test_a_wrong_row_is_seen_by_the_bound() -> None:
    cache = Cache("bfloat16", 512, 64)
    rows = select(2, 64)
    query = torch.randn(2, 16, 576, device="cuda").bfloat16()
    right = attend_rows(query, rows, cache.view, cache.elements, SCALING)
    rows[0, 0] = BLOCK_SIZE if int(rows[0, 0]) != BLOCK_SIZE else BLOCK_SIZE + 1
    wrong = attend_rows(query, rows, cache.view, cache.elements, SCALING)
    assert (right - wrong).norm() / right.norm() > BOUNDS["bfloat16"]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8_ds_mla"])
def test_a_query_s_result_does_not_depend_on_the_queries_beside_it(name: str) -> None:
    cache = Cache(name, 512, 64)
    rows = select(8, 512)
    query = torch.randn(8, 16, 576, device="cuda").to(cache.query_dtype)
    together = attend_rows(query, rows, cache.view, cache.elements, SCALING)
    alone = [attend_rows(query[i : i + 1], rows[i : i + 1], cache.view, cache.elements, SCALING) for i in range(8)]
    assert torch.equal(together, torch.cat(alone))


def test_tensors_that_do_not_fit_are_one_clear_line() -> None:
    cache = Cache("bfloat16", 64, 16)
    rows = select(2, 8)
    with pytest.raises(InputError, match=r"queries are torch\.float32"):
        attend_rows(torch.zeros(2, 4, 80, device="cuda"), rows, cache.view, cache.elements, SCALING)
    with pytest.raises(InputError, match="do not fit rows of 80 elements"):
        attend_rows(torch.zeros(2, 4, 96, device="cuda").bfloat16(), rows, cache.view, cache.elements, SCALING)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
@pytest.mark.parametrize(("heads", "dim"), [(64, 128), (16, 24)])
def test_index_scores_are_torch_s_and_end_at_each_row_s_own_position(
    heads: int, dim: int, dtype: torch.dtype, bound: float
) -> None:
    geometry = device_blocks(RowFormat("index key", dim * dtype.itemsize), 2, BLOCK_SIZE)
    view = PagedCacheView.over(
        torch.zeros(NUM_BLOCKS * geometry.block_stride, dtype=torch.uint8, device="cuda"),
        geometry.layer(1, NUM_BLOCKS),
    )
    table = (1 + torch.randperm(NUM_BLOCKS - 1, device="cuda"))[:60].view(3, 20).int()
    keys = torch.randn(NUM_BLOCKS, BLOCK_SIZE, dim, device="cuda").to(dtype)
    view.rows(dtype).copy_(keys)
    slots, positions = torch.tensor([2, 0, -1, 1], device="cuda"), torch.tensor([1279, 63, 0, 64], device="cuda")
    queries, weights = torch.randn(4, heads, dim, device="cuda").to(dtype), torch.randn(4, heads, device="cuda")
    found = paged_index_scores(queries, weights, view, IndexRows(slots, positions, table, 1300), 0.1)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        seen = position + 1 if slot >= 0 else 0
        assert (found[row, seen:] == -torch.inf).all()
        if seen:
            own = keys[table[slot].long()].flatten(0, 1)[:seen].float()
            expected = index_scores(queries[row : row + 1].float(), weights[row : row + 1], own, 0.1)[0]
            assert (found[row, :seen] - expected).norm() / expected.norm() < bound
