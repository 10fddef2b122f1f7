"""Which library computes attention, why not, and that it is given the rows where they lie.

The library itself needs a GPU; a stand-in with its signatures shows what it is handed.
"""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from hisparse.errors import InputError
from hisparse.geometry import device_blocks, latent_row
from hisparse.kernels import attention_libraries, fp8_rows
from hisparse.kernels.attention_libraries import AttentionNeed, FlashMla, choose_attention, describe, flashmla_misfit
from hisparse.kernels.row_elements import RowElements
from hisparse.worker.views import PagedCacheView

BLOCK_SIZE, NUM_BLOCKS, TOPK, HEADS = 64, 6, 128, 64
SCALING = 0.07
GEOMETRY = device_blocks(latent_row("bfloat16", 512, 64), 3, BLOCK_SIZE)
FITS = AttentionNeed(
    RowElements(torch.bfloat16, 512, 64),
    GEOMETRY.layer(1, NUM_BLOCKS),
    num_heads=128,
    topk=2048,
    capability=(9, 0),
    max_rows=64,
)


def attend(query: torch.Tensor, values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    scores = torch.bmm(query.float(), values.float().transpose(1, 2)) * SCALING
    weights = scores.masked_fill(~valid.unsqueeze(1), -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.bmm(weights, values[..., :512].float()).bfloat16()


class StandIn(ModuleType):
    """The library's signatures over plain torch."""

    def __init__(self) -> None:
        super().__init__("flash_mla")
        self.schedules: list[Any] = []

    def has_legacy(self) -> bool:
        return True

    def get_mla_metadata(self) -> tuple[object, None]:
        return object(), None

    def flash_mla_with_kvcache(self, q: torch.Tensor, k_cache: torch.Tensor, **given: Any) -> tuple[torch.Tensor, None]:
        assert given["use_legacy"]
        assert given["softmax_scale"] == SCALING
        assert k_cache.shape[1:] == (BLOCK_SIZE, 1, fp8_rows.ROW_BYTES)
        self.schedules.append(given["tile_scheduler_metadata"])
        rows = given["indices"].squeeze(1).long()
        at = rows.clamp(min=0)
        packed = k_cache[at // BLOCK_SIZE, at % BLOCK_SIZE, 0]
        values = fp8_rows.unpack_rows(packed.flatten(0, 1)).view(*rows.shape, -1)
        return attend(q.squeeze(1), values, rows >= 0).unsqueeze(1), None

    def flash_mla_sparse_fwd(
        self, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scaling: float, **given: Any
    ) -> tuple[torch.Tensor, None, None]:
        assert given["use_legacy"]
        assert scaling == SCALING
        rows = indices.squeeze(1).long()
        valid = (rows >= 0) & (rows < kv.shape[0])
        return attend(q, kv[rows.clamp(min=0), 0], valid), None, None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "flash_mla", stand_in)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return stand_in


@pytest.fixture(params=["bfloat16", "fp8_ds_mla"])
def layer(request: pytest.FixtureRequest) -> tuple[PagedCacheView, RowElements]:
    """The second of three layers, of random rows. Those of other layers are none of its numbers."""
    geometry = device_blocks(latent_row(request.param, 512, 64), 3, BLOCK_SIZE)
    storage = torch.zeros(NUM_BLOCKS * geometry.block_stride, dtype=torch.uint8)
    dtype = torch.uint8 if request.param == "fp8_ds_mla" else torch.bfloat16
    for index in range(3):
        view = PagedCacheView.over(storage, geometry.layer(index, NUM_BLOCKS))
        values = torch.randn(view.layout.num_rows, 576) * (1 + index)
        stored = fp8_rows.pack_rows(values) if dtype is torch.uint8 else values.bfloat16()
        view.rows(dtype).copy_(stored.view(NUM_BLOCKS, BLOCK_SIZE, -1))
    return PagedCacheView.over(storage, geometry.layer(1, NUM_BLOCKS)), RowElements(dtype, 512, 64)


def test_the_library_reads_this_layer_s_rows_and_leaves_out_those_of_no_one(
    library: StandIn, layer: tuple[PagedCacheView, RowElements]
) -> None:
    view, elements = layer
    rows = (BLOCK_SIZE + torch.stack([torch.randperm((NUM_BLOCKS - 1) * BLOCK_SIZE)[:TOPK] for _ in range(3)])).int()
    rows[0, 5] = NUM_BLOCKS * BLOCK_SIZE - 1
    rows[1, ::3] = -1
    rows[2] = -1
    query = torch.randn(3, HEADS, 576).bfloat16()
    stored = view.read(rows, elements.dtype)
    values = fp8_rows.unpack_rows(stored.flatten(0, 1)).view(*rows.shape, -1) if elements.is_packed else stored
    found = FlashMla(view, elements, SCALING)(query, rows)
    assert torch.equal(found, attend(query, values, rows >= 0))
    assert (found[2] == 0).all()
    assert not torch.equal(found, attend(query, values.roll(1, dims=1), (rows >= 0).roll(1, dims=0)))


def test_no_query_asks_the_library_nothing(library: StandIn, layer: tuple[PagedCacheView, RowElements]) -> None:
    view, elements = layer
    found = FlashMla(view, elements, SCALING)(torch.zeros(0, HEADS, 576).bfloat16(), torch.zeros(0, TOPK).int())
    assert found.shape == (0, HEADS, 512)
    assert library.schedules == []


def test_a_schedule_is_kept_for_its_shape_but_not_one_that_belongs_to_a_graph(
    library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = device_blocks(latent_row("fp8_ds_mla", 512, 64), 1, BLOCK_SIZE)
    storage = torch.zeros(NUM_BLOCKS * geometry.block_stride, dtype=torch.uint8)
    view = PagedCacheView.over(storage, geometry.layer(0, NUM_BLOCKS))
    attend_packed = FlashMla(view, RowElements(torch.uint8, 512, 64), SCALING)
    for num_queries, is_capturing in ((1, False), (2, False), (1, True), (3, True), (3, False)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=is_capturing: capturing)
        rows = torch.full((num_queries, TOPK), BLOCK_SIZE).int()
        attend_packed(torch.zeros(num_queries, HEADS, 576).bfloat16(), rows)
    first, second, again, in_graph, after = library.schedules
    assert first is again
    assert first is not second
    assert in_graph is not after


LARGE = replace(GEOMETRY.layer(1, NUM_BLOCKS), num_blocks=1 << 26)
MISFITS = {
    "compute capability 8.0": {"capability": (8, 0)},
    "compute capability 10.0": {"capability": (10, 0)},
    "rows are 64+16 wide": {"elements": RowElements(torch.bfloat16, 64, 16)},
    "20 heads are neither": {"num_heads": 20},
    "neither bfloat16 nor fp8_ds_mla": {"elements": RowElements(torch.float16, 512, 64)},
    "a top-k of 2000 is no multiple of 128": {"topk": 2000},
    "a top-k of 32 is no multiple of 64": {"elements": RowElements(torch.uint8, 512, 64), "topk": 32},
    "rows beyond 32-bit numbers": {"layout": LARGE},
    "rows of 1152 bytes lie 1280 apart": {
        "layout": replace(GEOMETRY.layer(1, NUM_BLOCKS), row_stride=1280, block_stride=300000)
    },
}


@pytest.mark.parametrize("reason", MISFITS)
def test_what_the_library_does_not_serve_is_named(reason: str) -> None:
    assert flashmla_misfit(FITS) is None
    changes: Any = MISFITS[reason]
    assert reason in str(flashmla_misfit(replace(FITS, **changes)))


def test_auto_takes_the_library_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_libraries, "flashmla_missing", lambda: None)
    monkeypatch.setattr(attention_libraries, "AUTO_FLASHMLA", {torch.bfloat16: 16})
    assert choose_attention("auto", FITS) == "flashmla"
    assert choose_attention("auto", replace(FITS, max_rows=16)) == "flashmla"
    assert choose_attention("auto", replace(FITS, max_rows=15)) == "triton", "faster for few rows"
    assert choose_attention("flashmla", replace(FITS, max_rows=1)) == "flashmla"
    assert choose_attention("triton", FITS) == "triton"
    assert choose_attention("auto", replace(FITS, num_heads=20)) == "triton"
    packed = replace(FITS, elements=RowElements(torch.uint8, 512, 64))
    assert choose_attention("auto", packed) == "triton"
    assert choose_attention("flashmla", packed) == "flashmla"


def test_a_library_that_is_asked_for_and_cannot_serve_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"FlashMLA cannot serve .*: 20 heads .*\. Use attention auto or triton"):
        choose_attention("flashmla", replace(FITS, num_heads=20))
    monkeypatch.setattr(attention_libraries, "flashmla_missing", lambda: "it was not found")
    with pytest.raises(InputError, match="it was not found"):
        choose_attention("flashmla", FITS)
    assert choose_attention("auto", FITS) == "triton"


@pytest.fixture
def flashmla_missing(monkeypatch: pytest.MonkeyPatch) -> Any:
    attention_libraries.flashmla_missing.cache_clear()
    yield attention_libraries.flashmla_missing
    attention_libraries.flashmla_missing.cache_clear()


def test_a_package_that_is_absent_broken_or_without_the_kernels_says_so(
    flashmla_missing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_libraries.importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps sgl-flash-mla" in flashmla_missing()

    def fail(name: str) -> ModuleType:
        raise OSError("libcudart.so.13: cannot open shared object file\nmore")

    flashmla_missing.cache_clear()
    monkeypatch.setattr(attention_libraries.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(attention_libraries.importlib, "import_module", fail)
    assert flashmla_missing() == "flash_mla does not load: libcudart.so.13: cannot open shared object file"

    flashmla_missing.cache_clear()
    monkeypatch.setattr(attention_libraries.importlib, "import_module", lambda name: ModuleType(name))
    assert "no kernels for compute capability 9.0" in flashmla_missing()

    flashmla_missing.cache_clear()
    monkeypatch.setattr(attention_libraries.importlib, "import_module", lambda name: StandIn())
    assert flashmla_missing() is None


def test_the_description_names_what_would_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe((8, 0)) == ("Triton", None)
    monkeypatch.setattr(attention_libraries, "flashmla_missing", lambda: "it is not there")
    value, install = describe((9, 0))
    assert value.startswith("Triton; FlashMLA would be faster")
    assert install == "pip install --no-deps sgl-flash-mla"
    monkeypatch.setattr(attention_libraries, "flashmla_missing", lambda: None)
    monkeypatch.setattr(attention_libraries.importlib.metadata, "version", lambda name: "1.2")
    value, install = describe((9, 0))
    assert value.startswith("FlashMLA 1.2 for ")
    assert install is None
