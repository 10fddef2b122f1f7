"""Copies on a CPU that happen late, as those of a GPU do, at moments that a seed decides."""

from dataclasses import dataclass

import numpy as np

from hisparse.offload.layout import LayerMapping
from hisparse.offload.page_copies import CpuCopies, PageCopier
from hisparse.worker.stream import CopyDelay, CopyEvent, CpuStream


@dataclass(slots=True)
class _Batch:
    """What was enqueued between `begin` and `end`."""

    copies: list[tuple[PageCopier, np.ndarray, np.ndarray, bool]]

    def run(self) -> None:
        for copier, local, canonical, to_region in self.copies:
            copier.copy(local, canonical, to_region)


class LateCpuCopies:
    """`CopyDevice` for pages in memory of the CPU whose bytes move when the event is asked, up to a delay later.

    Until then a block that is reused under a copy, or read before it was filled, shows in the bytes.
    """

    def __init__(self, delay: CopyDelay) -> None:
        self._stream = CpuStream(delay)
        self._device = CpuCopies()
        self._batch = _Batch([])

    def bind(self, mapping: LayerMapping, alignment: int) -> PageCopier:
        return _LatePageCopier(self, self._device.bind(mapping, alignment))

    def begin(self) -> None:
        self._batch = _Batch([])

    def end(self) -> CopyEvent:
        return self._stream.submit(self._batch)

    def put(self, copier: PageCopier, local: np.ndarray, canonical: np.ndarray, to_region: bool) -> None:
        """Have `copier` copy later. The arrays may be overwritten when this returns."""
        self._batch.copies.append((copier, local.copy(), canonical.copy(), to_region))


class _LatePageCopier:
    def __init__(self, device: LateCpuCopies, copier: PageCopier) -> None:
        self._device = device
        self._copier = copier

    def copy(self, local: np.ndarray, canonical: np.ndarray, to_region: bool) -> None:
        self._device.put(self._copier, local, canonical, to_region)
