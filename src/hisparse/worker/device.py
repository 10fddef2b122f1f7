"""What lies on the device: the slab of resident, hot and staging blocks, and the indexer's keys beside it."""

from collections.abc import Callable

import torch

from hisparse.config import CachePlan
from hisparse.errors import InvariantError
from hisparse.worker.views import ELEMENT_DTYPES, Allocation, PagedCacheView, all_layers, row_dtype

DeviceAllocator = Callable[[int], torch.Tensor]
"""Given a number of bytes, returns uint8 `[num_bytes]` of the device, zero at first, or raises `BackendError`."""


class Slab:
    """One device allocation that resident, hot and staging blocks share. Which is which only the tables say."""

    def __init__(self, plan: CachePlan, allocate: DeviceAllocator) -> None:
        """Raises `BackendError` when the device has no room, `InvariantError` for a plan over its own budget."""
        self.geometry = plan.device
        self.num_blocks = plan.num_device_blocks
        if self.num_bytes > plan.config.slab_bytes:
            raise InvariantError(f"a slab of {self.num_bytes} bytes is over its budget of {plan.config.slab_bytes}")
        self._allocation = Allocation("slab", allocate(self.num_bytes))

    @property
    def num_bytes(self) -> int:
        """What the allocation occupies: never more than the budget."""
        return self.num_blocks * self.geometry.block_stride

    @property
    def storage(self) -> torch.Tensor:
        """uint8 `[num_bytes]`. Raises `InvariantError` after `close`."""
        return self._allocation.storage

    def layer(self, layer: int) -> PagedCacheView:
        """One layer's rows."""
        return PagedCacheView(self._allocation, self.geometry.layer(layer, self.num_blocks))

    def pages(self) -> PagedCacheView:
        """Whole blocks, as transfers copy them."""
        return PagedCacheView(self._allocation, all_layers(self.geometry, self.num_blocks))

    def close(self) -> None:
        """Let go of the memory. Every view raises from here on. Idempotent."""
        self._allocation.close()


class IndexerStore:
    """The index keys of all leaders, in a pool and an allocation of their own. Keys never leave the device."""

    def __init__(self, plan: CachePlan, allocate: DeviceAllocator) -> None:
        """Keys have the element type that the model's geometry names; beside packed rows they are bytes without it."""
        self.num_bytes = plan.num_indexer_blocks * plan.indexer.block_stride
        named = plan.model.index_dtype
        self.dtype = row_dtype(plan.model.row) if named is None else ELEMENT_DTYPES[named]
        self._allocation = Allocation("indexer's store", allocate(self.num_bytes))
        self._views = tuple(
            PagedCacheView(self._allocation, plan.indexer.layer(index, plan.num_indexer_blocks))
            for index in range(plan.indexer.num_layers)
        )

    def write(self, leader_index: int, rows: torch.Tensor, keys: torch.Tensor) -> None:
        """Store keys `[n, dim]` in physical rows `[n]` of the indexer's pool.

        `leader_index` counts leaders, not layers. Raises `InvariantError` for keys of another type or width, and for
        rows of the null block or below.
        """
        if keys.dtype != self.dtype:
            raise InvariantError(f"index keys are {self.dtype}, not {keys.dtype}")
        self._views[leader_index].write(rows, keys)

    def read(self, leader_index: int, rows: torch.Tensor) -> torch.Tensor:
        """Copies of the keys in physical rows `[...]`, as `[..., dim]`. Negative rows give zeros."""
        return self._views[leader_index].read(rows, self.dtype)

    def view(self, leader_index: int) -> PagedCacheView:
        """One leader's keys, for kernels that read them in place."""
        return self._views[leader_index]

    def close(self) -> None:
        """Let go of the memory. Every use raises from here on. Idempotent."""
        self._allocation.close()
