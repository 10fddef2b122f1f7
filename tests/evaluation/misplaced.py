"""One page on its way to a broken host and back, on any backend."""

import torch

from hisparse.evaluation.broken import BrokenHostBackend
from hisparse.geometry import RowFormat, device_blocks, host_blocks
from hisparse.worker import Backend, BlockCopies, HostPool, PagedCacheView
from hisparse.worker.views import all_layers

SHAPES = [(1, 2), (1, 16), (2, 16), (3, 4), (4, 16)]
"""Layers, and tokens of a page."""
BLOCKS = 4


def assert_misplaced(sound: Backend, num_layers: int, block_size: int, row_bytes: int = 64) -> None:
    """Every row of a page arrives once, at another position; what comes back is what arrived."""
    backend, row = BrokenHostBackend(sound), RowFormat("float32", row_bytes)
    device_geometry = device_blocks(row, num_layers, block_size)
    memory = backend.allocate_device(BLOCKS * device_geometry.block_stride)
    slab = PagedCacheView.over(memory, all_layers(device_geometry, BLOCKS))
    with HostPool(host_blocks(row, num_layers, block_size), BLOCKS, backend.allocate_host) as pool:
        host, stream = pool.pages(), backend.make_stream()
        rows = slab.rows(torch.int64)
        numbers = torch.arange(rows.shape[1])
        rows[2] = (numbers + 1).to(rows.device)[:, None]
        stream.submit(BlockCopies(slab, host, torch.tensor([2]), torch.tensor([3]))).wait()
        arrived = host.rows(torch.int64)[3, :, 0].cpu() - 1
        assert sorted(arrived.tolist()) == numbers.tolist()
        assert (arrived % block_size != numbers % block_size).all()
        stream.submit(BlockCopies(host, slab, torch.tensor([3]), torch.tensor([1]))).wait()
        assert torch.equal(rows[1, :, 0].cpu() - 1, arrived)
        stream.synchronize()
