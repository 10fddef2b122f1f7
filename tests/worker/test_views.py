"""Views read and write their own rows, only those, and refuse what they cannot hold."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.geometry import BlockGeometry, PagedLayout, RowFormat, device_blocks, host_blocks
from hisparse.worker.host_memory import AnonymousMapping
from hisparse.worker.views import Allocation, BlockCopies, PagedCacheView, all_layers, row_dtype

ROW = RowFormat("float32", 48)
DEVICE = device_blocks(ROW, num_layers=3, block_size=4)
HOST = host_blocks(ROW, num_layers=3, block_size=4)


def layers_of(geometry: BlockGeometry, num_blocks: int) -> list[PagedCacheView]:
    allocation = Allocation("test", torch.zeros(num_blocks * geometry.block_stride, dtype=torch.uint8))
    return [PagedCacheView(allocation, geometry.layer(layer, num_blocks)) for layer in range(geometry.num_layers)]


@pytest.mark.parametrize("geometry", [DEVICE, HOST], ids=["device", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_layer_reads_back_its_own_rows_and_leaves_every_other_byte_alone(
    geometry: BlockGeometry, dtype: torch.dtype
) -> None:
    views = layers_of(geometry, num_blocks=5)
    rows = torch.tensor([19, 4, 10])
    values = torch.randint(1, 100, (3, 48 // dtype.itemsize)).to(dtype)
    views[1].write(rows, values)
    assert torch.equal(views[1].read(rows, dtype), values)
    for index, row in enumerate(rows.tolist()):
        start = views[1].layout.row_offset(row)
        assert torch.equal(views[1].storage[start : start + 48], values[index].view(torch.uint8))
        views[1].storage[start : start + 48] = 0
    assert int(views[1].storage.count_nonzero()) == 0


def test_layers_of_one_allocation_do_not_share_a_row() -> None:
    views = layers_of(HOST, num_blocks=3)
    rows = torch.arange(4, 12)
    for layer, view in enumerate(views):
        view.write(rows, torch.full((8, 12), float(layer + 1)))
    for layer, view in enumerate(views):
        assert torch.equal(view.read(rows, torch.float32), torch.full((8, 12), float(layer + 1)))


def test_negative_rows_read_as_zeros_and_are_never_dereferenced() -> None:
    (view, *_) = layers_of(DEVICE, num_blocks=3)
    view.storage.fill_(7)
    got = view.read(torch.tensor([[-1, 4], [-(10**15), 5]]), torch.uint8)
    assert torch.equal(got[:, 0], torch.zeros(2, 48, dtype=torch.uint8))
    assert torch.equal(got[:, 1], torch.full((2, 48), 7, dtype=torch.uint8))


def test_rows_beyond_the_allocation_are_an_error() -> None:
    (view, *_) = layers_of(DEVICE, num_blocks=3)
    with pytest.raises(IndexError):
        view.read(torch.tensor([12]), torch.uint8)


@pytest.mark.parametrize("row", [-1, 0, 3])
def test_padding_and_the_null_block_are_no_place_to_write(row: int) -> None:
    (view, *_) = layers_of(DEVICE, num_blocks=3)
    with pytest.raises(InvariantError, match=f"row {row} is no place to write: data starts at row 4"):
        view.write(torch.tensor([5, row]), torch.ones(2, 12))
    assert int(view.storage.count_nonzero()) == 0


@pytest.mark.parametrize("shape", [(2, 11), (1, 12), (2, 1, 12)])
def test_values_that_do_not_fit_the_rows_are_refused_not_broadcast(shape: tuple[int, ...]) -> None:
    (view, *_) = layers_of(DEVICE, num_blocks=3)
    with pytest.raises(InvariantError, match="do not fit"):
        view.write(torch.tensor([5, 6]), torch.ones(shape))


@pytest.mark.parametrize(
    ("storage", "complaint"),
    [
        (lambda size: torch.zeros(size, dtype=torch.int8), "contiguous bytes"),
        (lambda size: torch.zeros(2 * size, dtype=torch.uint8)[::2], "contiguous bytes"),
        (lambda size: torch.zeros((1, size), dtype=torch.uint8), "contiguous bytes"),
        (lambda size: torch.zeros(size, dtype=torch.uint8)[:-1], "rows reach byte"),
        (lambda size: torch.zeros(0, dtype=torch.uint8), "null pointer"),
    ],
)
def test_what_cannot_hold_the_rows_is_refused_when_bound(
    storage: Callable[[int], torch.Tensor], complaint: str
) -> None:
    layout = DEVICE.layer(2, 3)
    PagedCacheView.over(torch.zeros(layout.end_bytes, dtype=torch.uint8), layout)
    with pytest.raises(InvariantError, match=complaint):
        PagedCacheView.over(storage(layout.end_bytes), layout)


def test_an_allocation_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(InvariantError, match="beside the null block"):
        PagedCacheView.over(torch.zeros(4096, dtype=torch.uint8), DEVICE.layer(0, 1))


def meta_view(num_bytes: int, layout: PagedLayout) -> PagedCacheView:
    return PagedCacheView.over(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), layout)


def test_offsets_demand_64_bits_from_the_first_row_that_passes_2_to_the_31() -> None:
    layout = PagedLayout(
        0, block_stride=1 << 20, row_stride=1 << 10, row_bytes=1 << 10, block_size=1 << 10, num_blocks=1 << 11
    )
    assert layout.end_bytes == 1 << 31
    assert meta_view(1 << 31, layout).index_dtype is torch.int32
    one_more = replace(layout, num_blocks=layout.num_blocks + 1)
    assert meta_view(1 << 32, one_more).index_dtype is torch.int64


def test_more_rows_than_an_int32_can_number_are_refused_when_bound() -> None:
    layout = PagedLayout(0, block_stride=1 << 12, row_stride=16, row_bytes=16, block_size=1 << 8, num_blocks=1 << 23)
    assert meta_view(1 << 36, layout).layout.num_rows == 1 << 31
    with pytest.raises(InvariantError, match="cannot be numbered in 32 bits"):
        meta_view(1 << 36, replace(layout, num_blocks=(1 << 23) + 1))


def test_a_row_beyond_2_to_the_32_bytes_is_read_where_it_was_written() -> None:
    stride = 1 << 24
    layout = PagedLayout(64, stride, row_stride=1 << 20, row_bytes=64, block_size=15, num_blocks=260)
    memory = AnonymousMapping(layout.num_blocks * stride)
    try:
        view = PagedCacheView.over(memory.storage, layout)
        last = layout.num_rows - 1
        assert layout.row_offset(last) > 1 << 32
        view.write(torch.tensor([last]), torch.full((1, 16), 3.0))
        assert view.read(torch.tensor([last], dtype=torch.int32), torch.float32).unique().tolist() == [3.0]
        wrapped = layout.row_offset(last) % (1 << 32)
        assert int(view.storage[wrapped : wrapped + 64].count_nonzero()) == 0
        del view
    finally:
        memory.release()


def test_elements_that_rows_are_not_aligned_for_are_refused() -> None:
    layout = PagedLayout(2, block_stride=66, row_stride=32, row_bytes=32, block_size=2, num_blocks=2)
    view = PagedCacheView.over(torch.zeros(256, dtype=torch.uint8), layout)
    assert view.rows(torch.bfloat16).shape == (2, 2, 16)
    with pytest.raises(InvariantError, match="not aligned for elements of 4 bytes"):
        view.rows(torch.float32)


def test_whole_blocks_are_copied_between_strides_and_the_padding_is_left_alone() -> None:
    device, host = layers_of(DEVICE, 6), layers_of(HOST, 6)
    for layer, view in enumerate(device):
        view.write(torch.arange(4, 24), torch.arange(240.0).reshape(20, 12) + 1000 * (layer + 1))
    host[0].storage.fill_(9)
    spill = BlockCopies(
        PagedCacheView(device[0].allocation, all_layers(DEVICE, 6)),
        PagedCacheView(host[0].allocation, all_layers(HOST, 6)),
        torch.tensor([5, 2]),
        torch.tensor([1, 4]),
    )
    spill.run()
    for view, copied in zip(device, host, strict=True):
        for source, destination in ((5, 1), (2, 4)):
            rows = torch.arange(4)
            assert torch.equal(
                copied.read(destination * 4 + rows, torch.float32), view.read(source * 4 + rows, torch.float32)
            )
    by_row = host[0].storage.view(6, 12, 128)
    assert by_row[:, :, 48:].unique().tolist() == [9]
    assert by_row[[0, 2, 3, 5]].unique().tolist() == [9]


def test_blocks_of_other_rows_do_not_copy() -> None:
    other = device_blocks(RowFormat("float32", 64), num_layers=3, block_size=4)
    one = torch.tensor([1])
    views = [
        PagedCacheView(layers_of(geometry, 3)[0].allocation, all_layers(geometry, 3)) for geometry in (DEVICE, other)
    ]
    with pytest.raises(InvariantError, match="do not hold the same rows"):
        BlockCopies(views[0], views[1], one, one)


def test_a_packed_row_is_bytes_and_a_float_row_its_elements() -> None:
    assert row_dtype(RowFormat("fp8_ds_mla", 656)) is torch.uint8
    assert row_dtype(RowFormat("bfloat16", 1152)) is torch.bfloat16
