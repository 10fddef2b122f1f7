"""What a worker does with the region: pages of its layers into rows, and rows into pages.

Everything that depends on the layout is bound when a worker starts. A transfer then multiplies, adds and copies: the
addresses of its pages are written into arrays that are used again and again, and a copier that knows the mapping
takes them from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from hisparse.errors import InputError, InvariantError
from hisparse.offload.copy_plan import WriterFilter
from hisparse.offload.layout import LayerMapping
from hisparse.offload.page_copies import CopyDevice, PageCopier
from hisparse.offload.region import SharedRegion
from hisparse.offload.row_layout import RowLayout

if TYPE_CHECKING:  # workers without a GPU need no torch
    from hisparse.worker.stream import CopyEvent

MAX_PAGES = 1 << 12
"""Pages of a layer whose addresses are written down at once."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pages at this worker: block b's starts at address `address + b*block_stride`.

    `mapping` says which bytes of it are which of the canonical page.
    """

    address: int
    block_stride: int
    num_blocks: int
    mapping: LayerMapping


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Pages of one transfer, for all layers alike: int64 `[n]` each.

    `local_blocks[i]` of the worker goes with block `chunk_blocks[i]` of the chunk in row `rows[i]` of the region.
    """

    local_blocks: np.ndarray
    rows: np.ndarray
    chunk_blocks: np.ndarray

    @classmethod
    def of_chunks(cls, local_blocks: np.ndarray, rows: np.ndarray) -> "PageBatch":
        """Whole chunks: `local_blocks` int64 `[n, blocks_per_chunk]`, `rows` int64 `[n]`. Blocks below 0 are none."""
        num_chunks, blocks = local_blocks.shape
        chosen = local_blocks.reshape(-1) >= 0
        return cls(
            local_blocks.reshape(-1)[chosen],
            np.repeat(rows, blocks)[chosen],
            np.tile(np.arange(blocks, dtype=np.int64), num_chunks)[chosen],
        )


class RegionTransfers:
    """Stores and loads of one worker, all layers of it.

    Bytes that several workers hold alike are stored by one of them, elected by the page's place in the region; every
    worker loads for itself. For one thread. The caller keeps the caches of `layers` alive.
    """

    def __init__(
        self,
        layers: Sequence[LayerPages],
        region: SharedRegion,
        layout: RowLayout,
        device: CopyDevice,
        slot: int = 0,
    ) -> None:
        """`layers[l]` belongs to layer l of `layout`. `slot`: this worker's in a direct layout.

        Raises `InputError` when the layers, the layout and the region do not belong together.
        """
        _check(layers, region, layout)
        self._layout = layout
        self._device = device
        self._region = region
        self._num_blocks = min(layer.num_blocks for layer in layers)
        alike: dict[tuple[object, ...], list[int]] = {}
        for index, layer in enumerate(layers):
            found = layer.mapping
            alike.setdefault((found.runs, found.replication, found.replica, layout.page_bytes[index]), []).append(index)
        self._groups = [
            _LayerGroup(
                [layers[index] for index in group],
                [region.address + layout.offset(index, slot) for index in group],
                _RowShape(region.row_bytes, layout.page_bytes[group[0]], layout.blocks_per_chunk),
                device,
            )
            for group in alike.values()
        ]

    def store(self, pages: PageBatch) -> "CopyEvent":
        """Enqueue copies from the worker's pages into the region. Raises `InvariantError` for a page that is not there
        and after the region was closed.

        Neither end may be touched before the event; nor may another worker read the rows before all have stored.
        """
        return self._copy(pages, to_region=True)

    def load(self, pages: PageBatch) -> "CopyEvent":
        """Enqueue copies from the region into the worker's pages. Raises `InvariantError` as `store` does.

        Neither end may be touched before the event.
        """
        return self._copy(pages, to_region=False)

    def _copy(self, pages: PageBatch, to_region: bool) -> "CopyEvent":
        self._check_pages(pages)
        self._device.begin()
        for group in self._groups:
            group.copy(pages, to_region)
        return self._device.end()

    def _check_pages(self, pages: PageBatch) -> None:
        """An address that is wrong by one page would be written without a fault."""
        limits = (
            ("block", pages.local_blocks, self._num_blocks),
            ("region row", pages.rows, len(self._region.rows)),
            ("block of a chunk", pages.chunk_blocks, self._layout.blocks_per_chunk),
        )
        for name, values, limit in limits:
            if values.dtype != np.int64 or values.ndim != 1 or values.shape != pages.rows.shape:
                raise InvariantError(
                    f"a transfer has {values.dtype} {values.shape} as {name}, not int64 [n] like others"
                )
            if len(values) and not 0 <= values.min() <= values.max() < limit:
                raise InvariantError(f"a transfer names {name} {values.min()} to {values.max()}: there are {limit}")


@dataclass(frozen=True, slots=True)
class _RowShape:
    """Of a group of layers: bytes of a row of the region and of a canonical page, and blocks per chunk."""

    row_bytes: int
    page_bytes: int
    blocks_per_chunk: int


class _LayerGroup:
    """Layers whose pages are mapped alike: one copier for all of them, and the arrays of addresses."""

    def __init__(
        self, layers: Sequence[LayerPages], areas: Sequence[int], shape: _RowShape, device: CopyDevice
    ) -> None:
        """`areas[l]`: address of layer l's area in row 0 of the region."""
        local = [layer.address for layer in layers]
        strides = [layer.block_stride for layer in layers]
        alignment = gcd(*local, *strides, *areas, shape.row_bytes, shape.page_bytes)
        self._copier: PageCopier = device.bind(layers[0].mapping, alignment)
        self._row_bytes, self._page_bytes = np.uint64(shape.row_bytes), np.uint64(shape.page_bytes)
        self._blocks_per_chunk = np.uint64(shape.blocks_per_chunk)
        self._first_local, self._strides, self._first_canonical = (
            np.array(numbers, dtype=np.uint64)[:, None] for numbers in (local, strides, areas)
        )
        self._pages_at_once = max(1, MAX_PAGES // len(layers))
        self._writers = WriterFilter(layers[0].mapping, self._pages_at_once)
        self._scratch = np.zeros((4, self._pages_at_once), dtype=np.uint64)
        self._local, self._canonical = np.zeros((2, self._pages_at_once * len(layers)), dtype=np.uint64)

    def copy(self, pages: PageBatch, to_region: bool) -> None:
        for start in range(0, len(pages.rows), self._pages_at_once):
            end = min(start + self._pages_at_once, len(pages.rows))
            blocks, offsets, page_ids, chunk_blocks = self._scratch[:, : end - start]
            blocks[:], page_ids[:] = pages.local_blocks[start:end], pages.rows[start:end]
            chunk_blocks[:] = pages.chunk_blocks[start:end]
            np.multiply(page_ids, self._row_bytes, out=offsets)
            page_ids *= self._blocks_per_chunk
            page_ids += chunk_blocks
            chunk_blocks *= self._page_bytes
            offsets += chunk_blocks
            if to_region:
                blocks, offsets = self._writers.select(page_ids, blocks, offsets)
            if len(blocks):
                self._copier.copy(*self._addresses(blocks, offsets), to_region)

    def _addresses(self, blocks: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where blocks lie at the worker, and pages that far into the areas, layer by layer. Valid until the next."""
        shape = (len(self._strides), len(blocks))
        local, canonical = self._local[: shape[0] * shape[1]], self._canonical[: shape[0] * shape[1]]
        np.multiply(blocks, self._strides, out=local.reshape(shape))
        np.add(local.reshape(shape), self._first_local, out=local.reshape(shape))
        np.add(offsets, self._first_canonical, out=canonical.reshape(shape))
        return local, canonical


def _check(layers: Sequence[LayerPages], region: SharedRegion, layout: RowLayout) -> None:
    if len(layers) != len(layout.page_bytes):
        raise InputError(f"{len(layers)} layers do not fill rows of {len(layout.page_bytes)} layers")
    if layout.row_bytes != region.row_bytes:
        raise InputError(f"rows of {layout.row_bytes} bytes are not those of the region, {region.row_bytes} bytes")
    for index, (layer, page_bytes) in enumerate(zip(layers, layout.page_bytes, strict=True)):
        found = layer.mapping.canonical_page_bytes
        if found != page_bytes:
            raise InputError(f"layer {index}: pages of {found} bytes do not fill {page_bytes} in a row")
