"""The host pool: the bytes of spilled pages, for all layers."""

import logging
import math
from collections.abc import Callable
from types import TracebackType

import torch

from hisparse.config import GIB
from hisparse.errors import InputError, InvariantError
from hisparse.geometry import NULL_BLOCK, BlockGeometry
from hisparse.worker.host_memory import HostMemory
from hisparse.worker.views import Allocation, PagedCacheView, all_layers

logger = logging.getLogger(__name__)


def host_pool_bytes(gib: float) -> int:
    """Bytes of a `host_pool_gib` option: the usable capacity of one data-parallel replica, not of a node.

    It counts payload. Alignment comes on top, and whole blocks are what is realised of it. Raises `InputError` for
    a size that is not a positive number.
    """
    if not math.isfinite(gib) or gib <= 0 or int(gib * GIB) == 0:
        raise InputError(f"a host pool of {gib} GiB is not a size: give a positive number, such as 64 or 0.5")
    return int(gib * GIB)


class HostPool:
    """Owns host memory of `num_blocks` blocks, the null block included. Close it, or use it as a context manager."""

    def __init__(self, geometry: BlockGeometry, num_blocks: int, allocate: Callable[[int], HostMemory]) -> None:
        """`allocate` is given the physical size in bytes.

        Raises `BackendError` when the memory cannot be had, `InvariantError` for a pool without a usable block.
        """
        if num_blocks <= NULL_BLOCK + 1:
            raise InvariantError(f"a host pool of {num_blocks} blocks has none beside the null block")
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._memory = allocate(self.physical_bytes)
        self._allocation = Allocation("host pool", self._memory.storage)
        logger.info(
            "host pool: %d bytes usable in %d blocks of %d tokens, %d bytes of memory",
            self.usable_bytes,
            num_blocks - 1,
            geometry.block_size,
            self.physical_bytes,
        )

    @property
    def usable_bytes(self) -> int:
        """What pages can fill, counted in payload: whole blocks, without the null block."""
        return (self.num_blocks - 1) * self.geometry.payload_bytes

    @property
    def physical_bytes(self) -> int:
        """What the allocation occupies, alignment and the null block included."""
        return self.num_blocks * self.geometry.block_stride

    @property
    def storage(self) -> torch.Tensor:
        """uint8 `[physical_bytes]`. Raises `InvariantError` after `close`."""
        return self._allocation.storage

    def layer(self, layer: int) -> PagedCacheView:
        """One layer's rows."""
        return PagedCacheView(self._allocation, self.geometry.layer(layer, self.num_blocks))

    def pages(self) -> PagedCacheView:
        """Whole blocks, as transfers copy them."""
        return PagedCacheView(self._allocation, all_layers(self.geometry, self.num_blocks))

    def close(self) -> None:
        """Give the memory back. Every view raises from here on. Idempotent."""
        self._allocation.close()
        self._memory.release()

    def __enter__(self) -> "HostPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
