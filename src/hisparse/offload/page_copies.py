"""How pages are copied between a worker and the shared region: what every device offers, and the CPU."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hisparse.offload.layout import LayerMapping
from hisparse.offload.run_copy import copy_run

if TYPE_CHECKING:  # workers without a GPU need no torch
    from hisparse.worker.stream import CopyEvent


class PageCopier(Protocol):
    """Copies pages of one mapping. Bound to it, so that no call looks at the layout."""

    def copy(self, local: np.ndarray, canonical: np.ndarray, to_region: bool) -> None:
        """Enqueue the runs of `n` pages, whose addresses are `local` at the worker and `canonical` in the region.

        uint64 `[n]` each; both may be overwritten when this returns.
        """
        ...


class CopyDevice(Protocol):
    """Where a worker's pages are, and its stream of copies."""

    def bind(self, mapping: LayerMapping, alignment: int) -> PageCopier:
        """A copier for pages of this mapping. `alignment` divides all addresses that it will be given."""
        ...

    def begin(self) -> None:
        """What is copied from now on sees what was computed before."""
        ...

    def end(self) -> "CopyEvent":
        """The end of everything that was enqueued since `begin`."""
        ...


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """Copies that were made before the call returned."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class CpuCopies:
    """`CopyDevice` for pages in memory of the CPU: copies are made before `end`."""

    def bind(self, mapping: LayerMapping, alignment: int) -> PageCopier:
        return _CpuPageCopier(mapping)

    def begin(self) -> None:
        """Nothing to order: what was computed before was computed."""

    def end(self) -> "CopyEvent":
        return DoneEvent()


class _CpuPageCopier:
    def __init__(self, mapping: LayerMapping) -> None:
        # Offsets, then size, count and strides, the worker's end first; by direction.
        store = [
            (run.local_offset, run.canonical_offset, run.size, run.count, run.local_stride, run.canonical_stride)
            for run in mapping.runs
        ]
        load = [(to, first, size, count, step, stride) for first, to, size, count, stride, step in store]
        self._runs = {True: store, False: load}

    def copy(self, local: np.ndarray, canonical: np.ndarray, to_region: bool) -> None:
        sources, destinations = (local, canonical) if to_region else (canonical, local)
        for source_offset, destination_offset, *shape in self._runs[to_region]:
            copy_run(sources + np.uint64(source_offset), destinations + np.uint64(destination_offset), *shape)
