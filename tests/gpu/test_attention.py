"""The Triton kernels against plain torch in float32, and against themselves in other company."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from hisparse.engine.attention import MlaWeights, attend
from hisparse.engine.indexer import index_scores
from hisparse.errors import InputError
from hisparse.geometry import RowFormat, device_blocks, latent_row
from hisparse.kernels import fp8_rows
from hisparse.kernels.attention_libraries import AttentionNeed, FlashMla, flashmla_misfit, flashmla_missing
from hisparse.kernels.row_elements import RowElements
from hisparse.kernels.triton_ops import attention
from hisparse.kernels.triton_ops.attention import attend_rows
from hisparse.kernels.triton_ops.attention_launch import chunks_per_program
from hisparse.kernels.triton_ops.index_scores import IndexRows, paged_index_scores
from hisparse.worker.views import PagedCacheView
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

BLOCK_SIZE = 64
NUM_BLOCKS = 80
SCALING = 0.13

BOUNDS = {"float32": 5e-6, "bfloat16": 8e-3, "float16": 1e-3, "fp8_ds_mla": 8e-3}
"""Norm of the difference over the norm of the result: what rounding the weights to the rows' dtype costs."""

FLASHMLA_BOUNDS = {"bfloat16": 8e-3, "fp8_ds_mla": 12e-3}
"""The library also rounds the scales of packed rows, to bfloat16."""


class Cache:
    """One layer, the second of three, full of random rows."""

    def __init__(self, name: str, lora: int, rope: int, num_blocks: int = NUM_BLOCKS) -> None:
        """Random rows fill the first `NUM_BLOCKS` blocks."""
        row = latent_row(name, lora, rope)
        geometry = device_blocks(row, 3, BLOCK_SIZE)
        storage = torch.zeros(num_blocks * geometry.block_stride, dtype=torch.uint8, device="cuda")
        self.view = PagedCacheView.over(storage, geometry.layer(1, num_blocks))
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(
            name, torch.uint8
        )
        self.elements = RowElements(self.dtype, lora, rope)
        values = torch.randn(NUM_BLOCKS * BLOCK_SIZE, lora + rope, device="cuda")
        stored = fp8_rows.pack_rows(values) if self.dtype is torch.uint8 else values.to(self.dtype)
        self.view.rows(self.dtype)[:NUM_BLOCKS].copy_(stored.view(NUM_BLOCKS, BLOCK_SIZE, -1))
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


def select(num_queries: int, topk: int, num_blocks: int = NUM_BLOCKS) -> torch.Tensor:
    """Distinct random rows, each query's own number of them at places of its own; none for the last of several."""
    rows = torch.full((num_queries, topk), -1, dtype=torch.int32, device="cuda")
    for query in range(num_queries):
        available = min(topk, (num_blocks - 1) * BLOCK_SIZE)
        count = available if query == 0 else int(torch.randint(1, available + 1, (), device="cpu"))
        places = torch.randperm(topk, device="cuda")[:count]
        rows[query, places] = (BLOCK_SIZE + torch.randperm((num_blocks - 1) * BLOCK_SIZE, device="cuda")[:count]).int()
    if num_queries > 1:
        rows[-1] = -1
    return rows


def expected_of(cache: Cache, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Attention in float64, a few queries at a time."""
    found = []
    for asked, at in zip(query.split(4), rows.split(4), strict=True):
        values = cache.read(at).double().masked_fill_((at < 0).unsqueeze(-1), 0.0)
        scores = torch.bmm(asked.double(), values.transpose(1, 2)) * SCALING
        weights = scores.masked_fill((at < 0).unsqueeze(1), -torch.inf).softmax(-1).nan_to_num(0.0)
        found.append(torch.bmm(weights, values[..., : cache.elements.lora]))
    return torch.cat(found)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(
    ("queries", "heads", "topk"),
    [
        (1, 128, 2048),
        (4, 128, 2048),
        (64, 64, 512),
        (33, 128, 600),
        (4, 4, 32),
        (3, 1, 64),
        (5, 20, 600),
        (2, 128, 4096),
    ],
)
def test_attention_is_plain_torch_s_within_rounding(name: str, queries: int, heads: int, topk: int) -> None:
    lora, rope = (512, 64) if name == "fp8_ds_mla" or heads > 32 else (64, 16)
    cache = Cache(name, lora, rope)
    rows = select(queries, topk)
    query = torch.randn(queries, heads, lora + rope, device="cuda").to(cache.query_dtype)
    found = attend_rows(query, rows, cache.view, cache.elements, SCALING)
    assert found.dtype is query.dtype
    assert error_of(found, expected_of(cache, query, rows)) < BOUNDS[name]
    if queries > 1:
        assert (found[-1] == 0).all()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_rows_of_odd_widths_are_padded_in_the_kernel(name: str) -> None:
    cache = Cache(name, 24, 8)
    rows = select(3, 40)
    query = torch.randn(3, 5, 32, device="cuda").to(cache.query_dtype)
    found = attend_rows(query, rows, cache.view, cache.elements, SCALING)
    assert error_of(found, expected_of(cache, query, rows)) < BOUNDS[name]


def test_it_is_the_engine_s_own_attention_on_a_cpu() -> None:
    cache = Cache("float32", 64, 16)
    rows = select(4, 32)
    query = torch.randn(4, 4, 80, device="cuda")
    found = attend_rows(query, rows, cache.view, cache.elements, SCALING)
    weights = MlaWeights(query.new_empty(4, 1, 64), query.new_empty(4, 1, 64), SCALING)
    expected = attend(query.cpu(), cache.read(rows).cpu(), (rows >= 0).cpu(), weights)
    assert error_of(found, expected.double().cuda()) < BOUNDS["float32"]


def test_a_wrong_row_is_seen_by_the_bound() -> None:
    cache = Cache("bfloat16", 512, 64)
    rows = select(1, 64)
    query = torch.randn(1, 16, 576, device="cuda").bfloat16()
    expected = expected_of(cache, query, rows)
    rows[0, 0] = BLOCK_SIZE if int(rows[0, 0]) != BLOCK_SIZE else BLOCK_SIZE + 1
    wrong = attend_rows(query, rows, cache.view, cache.elements, SCALING)
    assert error_of(wrong, expected) > BOUNDS["bfloat16"]


def test_rows_beyond_two_to_the_31_bytes_are_read_where_they_lie() -> None:
    num_blocks = (5 << 30) // (3 * BLOCK_SIZE * 1152)
    cache = Cache("bfloat16", 512, 64, num_blocks)
    rows = select(2, 2048)
    query = torch.randn(2, 128, 576, device="cuda").bfloat16()
    near = attend_rows(query, rows, cache.view, cache.elements, SCALING)
    shift = num_blocks - NUM_BLOCKS
    pages = cache.view.rows(cache.dtype)
    pages[shift + 1 :] = pages[1:NUM_BLOCKS].clone()
    far = torch.where(rows < 0, rows, rows + shift * BLOCK_SIZE)
    assert int(far.max()) // BLOCK_SIZE * cache.view.layout.block_stride > 1 << 32
    assert torch.equal(attend_rows(query, far, cache.view, cache.elements, SCALING), near)
    assert not torch.equal(attend_rows(query, far - BLOCK_SIZE, cache.view, cache.elements, SCALING), near)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8_ds_mla"])
def test_a_query_s_result_does_not_depend_on_the_queries_beside_it(name: str, heads: int) -> None:
    """From 1 query, whose chunks are many programs' work, to 64, where one program takes them all."""
    cache = Cache(name, 512, 64)
    rows = select(64, 2048)
    query = torch.randn(64, heads, 576, device="cuda").to(cache.query_dtype)
    together = attend_rows(query, rows, cache.view, cache.elements, SCALING)
    for size in (1, 2, 7, 16, 32, 33):
        parts = zip(query.split(size), rows.split(size), strict=True)
        apart = [attend_rows(q, r, cache.view, cache.elements, SCALING) for q, r in parts]
        assert torch.equal(together, torch.cat(apart)), size


def test_the_comparison_of_bits_sees_another_order_of_rows() -> None:
    cache = Cache("bfloat16", 512, 64)
    rows = select(1, 2048)
    query = torch.randn(1, 128, 576, device="cuda").bfloat16()
    found = attend_rows(query, rows, cache.view, cache.elements, SCALING)
    assert not torch.equal(attend_rows(query, rows.flip(1), cache.view, cache.elements, SCALING), found)


def test_many_ways_to_share_the_work_are_one_result() -> None:
    """Whatever number of processors the GPU had: the chunks are the same, and so is the order of their join."""
    cache = Cache("bfloat16", 512, 64)
    rows = select(3, 2048)
    query = torch.randn(3, 128, 576, device="cuda").bfloat16()
    shares = {chunks_per_program(4, 6, processors) for processors in (1, 12, 1000)}
    assert len(shares) > 1
    found, capability = [], torch.cuda.get_device_capability()
    with pytest.MonkeyPatch.context() as patch:
        for processors in (1, 12, 1000):
            patch.setattr(attention, "_gpu", lambda device, count=processors: (capability, count))
            found.append(attend_rows(query, rows, cache.view, cache.elements, SCALING))
    assert all(torch.equal(found[0], other) for other in found[1:])


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


NEEDS_FLASHMLA = pytest.mark.skipif(
    not torch.cuda.is_available() or flashmla_missing() is not None, reason="needs FlashMLA"
)


@NEEDS_FLASHMLA
@pytest.mark.parametrize("name", ["bfloat16", "fp8_ds_mla"])
@pytest.mark.parametrize(
    ("queries", "heads", "topk"), [(1, 128, 2048), (4, 128, 2048), (64, 128, 2048), (64, 64, 512), (3, 64, 128)]
)
def test_flashmla_is_plain_torch_s_within_rounding(name: str, queries: int, heads: int, topk: int) -> None:
    cache = Cache(name, 512, 64)
    capability = torch.cuda.get_device_capability()
    assert flashmla_misfit(AttentionNeed(cache.elements, cache.view.layout, heads, topk, capability, queries)) is None
    rows = select(queries, topk)
    query = torch.randn(queries, heads, 576, device="cuda").bfloat16()
    found = FlashMla(cache.view, cache.elements, SCALING)(query, rows)
    assert error_of(found, expected_of(cache, query, rows)) < FLASHMLA_BOUNDS[name]
    if queries > 1:
        assert (found[-1] == 0).all()
    rows[0, 0] = BLOCK_SIZE if int(rows[0, 0]) != BLOCK_SIZE else BLOCK_SIZE + 1
    assert not torch.equal(FlashMla(cache.view, cache.elements, SCALING)(query, rows)[0], found[0])


@NEEDS_FLASHMLA
@pytest.mark.parametrize("name", ["bfloat16", "fp8_ds_mla"])
def test_flashmla_s_bits_depend_neither_on_the_other_queries_nor_on_where_rows_lie(name: str) -> None:
    cache = Cache(name, 512, 64)
    rows = select(8, 2048)
    query = torch.randn(8, 128, 576, device="cuda").bfloat16()
    flashmla = FlashMla(cache.view, cache.elements, SCALING)
    found = flashmla(query, rows)
    pages = cache.view.rows(cache.dtype)
    moved = torch.arange(NUM_BLOCKS, device="cuda").roll(-1)
    moved[1:] = 1 + torch.randperm(NUM_BLOCKS - 1, device="cuda")
    moved[0] = 0
    elsewhere = torch.where(rows < 0, rows, moved[rows // BLOCK_SIZE].int() * BLOCK_SIZE + rows % BLOCK_SIZE)
    before = pages.clone()
    pages[moved] = before
    other = query.clone()
    other[1:] = torch.randn_like(other[1:])
    elsewhere[2:] = -1
    again = flashmla(other, elsewhere)
    assert torch.equal(again[0], found[0])
    assert not torch.equal(again[1], found[1])


@NEEDS_FLASHMLA
@pytest.mark.parametrize("name", ["bfloat16", "fp8_ds_mla"])
def test_flashmla_replays_from_a_graph_with_new_inputs(name: str) -> None:
    cache = Cache(name, 512, 64)
    flashmla = FlashMla(cache.view, cache.elements, SCALING)
    rows, query = select(4, 2048), torch.randn(4, 128, 576, device="cuda").bfloat16()
    flashmla(query, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flashmla(query, rows)
    for _ in range(3):
        rows.copy_(select(4, 2048))
        query.normal_()
        graph.replay()
        assert torch.equal(found, flashmla(query, rows))
