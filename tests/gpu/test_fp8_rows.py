"""Rows packed on the GPU are byte for byte those that the plain code packs, and go nowhere else."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from hisparse.errors import InputError
from hisparse.geometry import RowFormat, device_blocks, latent_row
from hisparse.kernels.fp8_rows import LEAST, pack_rows, unpack_rows
from hisparse.kernels.triton_ops.fp8_write import write_packed_rows
from hisparse.worker.cuda import CudaBackend
from hisparse.worker.views import PagedCacheView
from tests.gpu.marks import NEEDS_GPU
from tests.gpu.waiting import nothing_waits
from tests.worker.world import World, make_plan

pytestmark = NEEDS_GPU

PACKED = latent_row("fp8_ds_mla", 512, 64)
BLOCK_SIZE = 64
RUBBISH = 0xA5


def view(num_blocks: int = 12, layers: int = 3, layer: int = 1) -> PagedCacheView:
    """One layer's rows among others', full of rubbish."""
    geometry = device_blocks(PACKED, layers, BLOCK_SIZE)
    storage = torch.full((num_blocks * geometry.block_stride,), RUBBISH, dtype=torch.uint8, device="cuda")
    return PagedCacheView.over(storage, geometry.layer(layer, num_blocks))


def rows_and_values(dtype: torch.dtype, count: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    """At least 8 distinct rows outside the null block; values of many sizes, with groups of zeros, of tiny values and
    of one large value."""
    rows = BLOCK_SIZE + torch.randperm(11 * BLOCK_SIZE, device="cuda")[:count]
    decades = (-4, 3) if dtype is torch.float16 else (-30, 30)
    values = torch.randn(count, 576, device="cuda") * torch.logspace(*decades, count, device="cuda").unsqueeze(1)
    values[3] = 0
    values[4, :256] = 0
    values[5, 130] *= 1e3
    values[6] = LEAST * torch.linspace(0.5, 1.5, 576, device="cuda")
    values[7, :128] = values[7, :1]
    return rows, values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bytes_are_those_of_the_plain_code_and_no_other_byte_changes(dtype: torch.dtype) -> None:
    rows, values = rows_and_values(dtype)
    found, expected = view(), view()
    write_packed_rows(found, rows, values)
    expected.write(rows, pack_rows(values.cpu()).cuda())
    assert torch.equal(found.storage, expected.storage)
    assert not torch.equal(found.read(rows, torch.uint8), pack_rows(values.cpu() * 1.07).cuda())


def test_every_code_every_halfway_and_what_is_beside_it_are_rounded_alike() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[1:] + codes[:-1]) / 2
    numbers = torch.cat([codes, halves, halves.nextafter(halves + 1), halves.nextafter(halves - 1)])
    numbers = torch.cat([numbers, -numbers, numbers.new_zeros(-2 * len(numbers) % 127)]).view(-1, 127)
    values = torch.zeros(len(numbers), 576)
    values[:, :127], values[:, 127] = numbers, 448.0  # which makes the scale 1
    rows = torch.arange(BLOCK_SIZE, BLOCK_SIZE + len(values), device="cuda")
    found = view()
    write_packed_rows(found, rows, values.cuda())
    assert torch.equal(found.read(rows, torch.uint8).cpu(), pack_rows(values))


def test_padding_writes_nothing() -> None:
    rows, values = rows_and_values(torch.bfloat16, count=9)
    padded = rows.clone()
    padded[[0, 4, 8]] = torch.tensor([-1, 0, BLOCK_SIZE - 1], device="cuda")
    found, expected = view(), view()
    write_packed_rows(found, padded, values)
    kept = padded >= BLOCK_SIZE
    write_packed_rows(expected, rows[kept], values[kept])
    write_packed_rows(expected, rows[:0], values[:0])
    assert torch.equal(found.storage, expected.storage)
    assert (found.rows(torch.uint8)[0] == RUBBISH).all()


def test_rows_beyond_4_gib_are_written_where_they_are_read() -> None:
    large = view(num_blocks=1800, layers=61, layer=60)
    rows, values = rows_and_values(torch.bfloat16, count=8)
    rows[-1] = large.layout.num_rows - 1
    assert large.layout.row_offset(int(rows[-1])) > 1 << 32
    write_packed_rows(large, rows.int(), values)
    assert torch.equal(large.read(rows, torch.uint8).cpu(), pack_rows(values.cpu()))


def test_a_replayed_write_takes_what_its_inputs_hold_then_and_waits_for_nothing() -> None:
    found = view()
    rows, values = rows_and_values(torch.bfloat16, count=8)
    other_rows, other_values = rows_and_values(torch.bfloat16, count=8)
    write_packed_rows(view(), rows, values)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_packed_rows(found, rows, values)
    with nothing_waits():
        rows.copy_(other_rows)
        values.copy_(other_values)
        graph.replay()
    assert torch.equal(found.read(other_rows, torch.uint8).cpu(), pack_rows(other_values.cpu()))


def test_a_handle_packs_numbers_and_reads_them_back(on_cuda: torch.device) -> None:
    world = World(CudaBackend(), plan=make_plan(RowFormat("fp8_ds_mla", 656)))
    try:
        (block,) = world.admit_pages(0, 1)
        rows = block * 4 + torch.arange(4)
        values = torch.randn(4, 576).bfloat16()
        for handle in world.worker.handles:
            handle.write(rows, values * (1 + handle.layer))
        for handle in world.worker.handles:
            expected = unpack_rows(pack_rows((values * (1 + handle.layer)).cpu()))
            assert torch.equal(handle.gather(rows).cpu(), expected)
    finally:
        world.worker.close()


def test_what_does_not_fit_is_one_clear_line() -> None:
    rows, values = rows_and_values(torch.bfloat16, count=8)
    with pytest.raises(InputError, match="not 576 numbers for each of"):
        write_packed_rows(view(), rows, values[:, :575])
    with pytest.raises(InputError, match="not 576 numbers for each of"):
        write_packed_rows(view(), rows[:7], values)
    with pytest.raises(InputError, match="must be integers on the device of values and cache"):
        write_packed_rows(view(), rows.cpu(), values)
    plain = device_blocks(latent_row("bfloat16", 512, 64), 1, BLOCK_SIZE)
    storage = torch.zeros(3 * plain.block_stride, dtype=torch.uint8, device="cuda")
    with pytest.raises(InputError, match="are not packed rows of 656 bytes"):
        write_packed_rows(PagedCacheView.over(storage, plain.layer(0, 3)), rows, values)
