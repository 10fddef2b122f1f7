"""Copies between a GPU and the pinned region, in a stream of their own: batches of the copy engine, and the kernel."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from hisparse.kernels.cuda import driver as kernels
from hisparse.kernels.cuda.arguments import CopyArgs
from hisparse.kernels.cuda.parameters import Specialization
from hisparse.offload.copy_choice import KERNEL_THREADS, kernel_blocks
from hisparse.offload.copy_kernel import kernel_arguments, pages_per_launch, split_runs
from hisparse.offload.copy_plan import CopyPlan, Descriptors
from hisparse.offload.layout import LayerMapping
from hisparse.offload.page_copies import PageCopier
from hisparse.worker.cuda import driver
from hisparse.worker.cuda.stream import CudaCopyEvent
from hisparse.worker.stream import CopyEvent

MAX_DESCRIPTORS = 1 << 16
"""Fragments that are written down at once: 1.5 MiB of addresses and sizes."""

_KERNEL = Specialization("copy_pages", KERNEL_THREADS)


class CudaCopies:
    """`CopyDevice` for pages in the memory of one GPU; the region is pinned in this process (`PinnedRegion`).

    The host never waits. Copies see what was computed before `begin` in the stream that was current then; what is
    computed later may run beside them, and must not touch either end before their event.
    """

    def __init__(self, device: torch.device, max_descriptors: int = MAX_DESCRIPTORS) -> None:
        """Compiles the kernel. Raises `BackendError` when the device, its driver or the compiler is missing."""
        self._device = torch.empty(0, device=device).device
        self._stream = torch.cuda.Stream(self._device)
        self.max_descriptors = max_descriptors
        self._kernel = kernels.load(_KERNEL, self._device.index)

    def bind(self, mapping: LayerMapping, alignment: int) -> PageCopier:
        return _CudaPageCopier(self, mapping, alignment)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def end(self) -> CopyEvent:
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaCopyEvent(event)

    def copy_batch(self, fragments: driver.Fragments) -> None:
        """Put fragments in the stream. The arrays may be overwritten when this returns."""
        copy = driver.copy_batch if driver.copies_in_batches() else driver.copy_singly
        with torch.cuda.device(self._device):
            copy(fragments, self._stream.cuda_stream)

    def launch(self, launches: tuple[CopyArgs, ...], sources: np.ndarray, destinations: np.ndarray) -> None:
        """Put launches over the same pages in the stream. uint64 `[n]` each; they may be overwritten afterwards."""
        num_pages = len(sources)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # Through pinned memory, which torch's allocator keeps from being used again before the copy is done.
            written = torch.empty((2, num_pages), dtype=torch.int64, device="cpu", pin_memory=True)
            np.stack([sources, destinations], out=written.numpy().view(np.uint64))
            bases = written.to(self._device, non_blocking=True)
            for template in launches:
                most = pages_per_launch(template)
                for first in range(0, num_pages, most):
                    arguments = CopyArgs.from_buffer_copy(template)
                    arguments.num_pages = min(most, num_pages - first)
                    arguments.source_bases = bases[0, first:].data_ptr()
                    arguments.destination_bases = bases[1, first:].data_ptr()
                    blocks = kernel_blocks(arguments.num_pages * arguments.words_per_page)
                    self._kernel.launch((blocks, 1), 0, arguments)


class _DescribedPages:
    """The fragments of a mapping's pages, some pages at a time, as descriptor arrays that are used again and again."""

    def __init__(self, mapping: LayerMapping, max_descriptors: int) -> None:
        self._plan = CopyPlan(mapping)
        self._pages_at_once = max(1, max_descriptors // self._plan.num_fragments)
        self._descriptors = Descriptors(self._pages_at_once * self._plan.num_fragments)

    def pieces(self, local: np.ndarray, canonical: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """All fragments of pages at these addresses: the worker's end, the region's, sizes. Valid until the next."""
        for start in range(0, len(local), self._pages_at_once):
            part = slice(start, start + self._pages_at_once)
            end = self._plan.fill(self._descriptors, 0, local[part], canonical[part])
            yield self._descriptors.sources[:end], self._descriptors.destinations[:end], self._descriptors.sizes[:end]


class _CudaPageCopier:
    """The runs of one mapping, each bound to the method that suits its size and alignment."""

    def __init__(self, device: CudaCopies, mapping: LayerMapping, alignment: int) -> None:
        runs = split_runs(mapping.runs, alignment)
        self._device = device
        self._batch: _DescribedPages | None = None
        if runs.batch:
            self._batch = _DescribedPages(replace(mapping, runs=runs.batch), device.max_descriptors)
        self._launches = {
            to_region: tuple(kernel_arguments(part, word, to_region) for word, part in runs.kernel)
            for to_region in (False, True)
        }

    def copy(self, local: np.ndarray, canonical: np.ndarray, to_region: bool) -> None:
        if self._batch is not None:
            for at_worker, in_region, sizes in self._batch.pieces(local, canonical):
                ends = (at_worker, in_region) if to_region else (in_region, at_worker)
                self._device.copy_batch(driver.Fragments(*ends, sizes))
        if self._launches[to_region]:
            ends = (local, canonical) if to_region else (canonical, local)
            self._device.launch(self._launches[to_region], *ends)
