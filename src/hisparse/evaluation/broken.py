"""A host tier that is broken on purpose: what evaluations of a sound one are compared with.

If answers stayed right over a broken host tier, right answers would prove nothing about it.
"""

from dataclasses import replace

import torch

from hisparse.kernels.contract import Resolver
from hisparse.worker import Backend, BlockCopies, CopyEvent, CopyStream, PagedCacheView
from hisparse.worker.host_memory import HostMemory
from hisparse.worker.side import SideStream


class BrokenHostBackend:
    """A backend whose copies to the host land on the wrong rows. Everything else is the backend that it is given.

    So every byte that comes back from the host is a wrong one, however it comes: row by row or as a whole page.
    """

    def __init__(self, sound: Backend) -> None:
        self._sound = sound
        self._host: HostMemory | None = None

    @property
    def device(self) -> torch.device:
        return self._sound.device

    def allocate_device(self, num_bytes: int) -> torch.Tensor:
        return self._sound.allocate_device(num_bytes)

    def allocate_host(self, num_bytes: int) -> HostMemory:
        self._host = self._sound.allocate_host(num_bytes)
        return self._host

    def make_stream(self) -> CopyStream:
        return _MisplacingStream(self._sound.make_stream(), self)

    def make_side_stream(self) -> SideStream:
        return self._sound.make_side_stream()

    def make_resolver(self) -> Resolver:
        return self._sound.make_resolver()

    def is_host(self, view: PagedCacheView) -> bool:
        """Whether a view is one of the host pool."""
        return self._host is not None and view.storage.data_ptr() == self._host.storage.data_ptr()


class _MisplacingStream:
    """A `CopyStream` in which pages for the host arrive rotated."""

    def __init__(self, sound: CopyStream, backend: BrokenHostBackend) -> None:
        self._sound = sound
        self._backend = backend

    def submit(self, copies: BlockCopies) -> CopyEvent:
        if not self._backend.is_host(copies.destination):
            return self._sound.submit(copies)
        num_rows = copies.source.layout.block_size
        # Not by half: with an even number of layers a row would keep its position, and only change its layer.
        moved = max(1, num_rows // 2 - 1)
        self._sound.submit(_shifted(copies, 0, moved, num_rows - moved))
        return self._sound.submit(_shifted(copies, num_rows - moved, 0, moved))

    def begin_step(self) -> None:
        self._sound.begin_step()

    def order_before_compute(self) -> None:
        self._sound.order_before_compute()

    def synchronize(self) -> None:
        self._sound.synchronize()


def _shifted(copies: BlockCopies, first: int, to: int, num_rows: int) -> BlockCopies:
    """The same blocks, but of each only `num_rows` rows from row `first` on, to row `to` on."""
    return replace(
        copies, source=_part(copies.source, first, num_rows), destination=_part(copies.destination, to, num_rows)
    )


def _part(view: PagedCacheView, first: int, num_rows: int) -> PagedCacheView:
    layout = view.layout
    offset = layout.offset + first * layout.row_stride
    return PagedCacheView(view.allocation, replace(layout, offset=offset, block_size=num_rows))
