"""Cases for a resolver: small caches whose every byte is known from the slot, position and layer that it stands for.

Device and host block ids are dealt from two independently shuffled stacks, the last one freed first: an id that is
mistaken for the other kind names other bytes, and a freed block soon belongs to somebody else. All that is not data
(null blocks, free blocks, the gaps between host rows) is poison.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hisparse.geometry import BlockGeometry, PagedLayout, RowFormat, ceil_div, device_blocks, host_blocks
from hisparse.kernels.contract import EMPTY, BlockTables, HotState, MissPlan, ResolverCounters, Selection

Bytes = npt.NDArray[np.uint8]
Allocate = Callable[[int], torch.Tensor]
"""Makes the host allocation: uint8 `[num_bytes]`, of any content, that the resolver's device can read."""

POISON = 0xA5
MAX_CASE_ROWS = 64
"""Rows of one selection, at most."""

COMPARE_ALL_BYTES = 1 << 26
"""Allocations up to this size are compared as a whole, larger ones only where rows were written."""


@dataclass(frozen=True, slots=True)
class CaseShape:
    """The sizes of a case. `max_tokens` may end inside the last page. `leader` is the layer that `resolve` serves.

    The first `unused_blocks` ids of both pools are never dealt, which moves all rows that many blocks up.
    """

    num_slots: int = 4
    max_tokens: int = 62
    block_size: int = 8
    topk: int = 8
    hot_rows: int = 20
    row_bytes: int = 64
    num_layers: int = 3
    leader: int = 1
    unused_blocks: int = 0

    @property
    def max_pages(self) -> int:
        return ceil_div(self.max_tokens, self.block_size)

    @property
    def hot_blocks(self) -> int:
        return ceil_div(self.hot_rows, self.block_size)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """`kernels.contract.PagedRows` of one layer of a case."""

    storage: torch.Tensor
    layout: PagedLayout


class Case:
    """A cache at one moment. Its methods play the scheduler: they lease and free blocks and write page contents.

    `content[slot, page]` names what a page holds, 0 for nothing; equal names mean equal bytes. Only the methods of
    this class change it, and the resolver under test changes the state, the slab's hot blocks, plan and counters.
    """

    def __init__(
        self, shape: CaseShape, seed: int, device: torch.device | str = "cpu", allocate_host: Allocate | None = None
    ) -> None:
        self.shape, self.seed, self.device = shape, seed, torch.device(device)
        self.rng = random.Random(seed)
        row = RowFormat("bytes", shape.row_bytes)
        self.device_geometry = device_blocks(row, shape.num_layers, shape.block_size)
        self.host_geometry = host_blocks(row, shape.num_layers, shape.block_size)
        pages = shape.num_slots * shape.max_pages
        self.num_device_blocks = 1 + shape.unused_blocks + pages + shape.num_slots * shape.hot_blocks + 3
        self.num_host_blocks = 1 + shape.unused_blocks + pages + 5
        self._free_device = self._shuffled_ids(self.num_device_blocks)
        self._free_host = self._shuffled_ids(self.num_host_blocks)
        self.content: npt.NDArray[np.int64] = np.zeros((shape.num_slots, shape.max_pages), dtype=np.int64)
        self._next_content = 1 + seed * 1_000_003
        allocate_host = allocate_host or self._pinned
        self.slab = self._poisoned(torch.empty(self._bytes(self.device_geometry), dtype=torch.uint8, device=device))
        self.host = self._poisoned(allocate_host(self._bytes(self.host_geometry)))
        self.tables = BlockTables(
            resident=self._table(shape.max_pages), host=self._table(shape.max_pages), hot=self._table(shape.hot_blocks)
        )
        self.state = HotState.allocate(shape.num_slots, shape.hot_rows, shape.max_tokens, device)
        garbage = [self.rng.randrange(-1, shape.hot_rows) for _ in range(shape.num_slots * shape.max_tokens)]
        self.state.hot_row_of.copy_(torch.tensor(garbage).reshape(shape.num_slots, shape.max_tokens))
        self.plan = MissPlan.allocate(MAX_CASE_ROWS, shape.hot_rows, device)
        self.counters = ResolverCounters.allocate(device)

    def __repr__(self) -> str:
        return f"Case({self.shape!r}, seed={self.seed}, device={self.device.type!r})"

    # Pages and leases

    def place(self, slot: int, page: int, *, resident: bool = False, host: bool = False) -> None:
        """Give a page of new content blocks on the device, on host, or on both."""
        self.content[slot, page] = self._next_content
        self._next_content += 1
        if resident:
            self.restore(slot, page)
        if host:
            self.spill(slot, page, keep_resident=True)

    def place_all(self, slots: Sequence[int], *, resident: bool = False, host: bool = False) -> None:
        """Place every page of the slots."""
        for slot in slots:
            for page in range(self.shape.max_pages):
                self.place(slot, page, resident=resident, host=host)

    def restore(self, slot: int, page: int) -> None:
        """Make a page resident; its host copy, if there is one, stays."""
        block = self._free_device.pop()
        self._write_block(self.slab, self.device_geometry, block, int(self.content[slot, page]))
        self.tables.resident[slot, page] = block

    def spill(self, slot: int, page: int, *, keep_resident: bool = False) -> None:
        """Write a page to a host block, unless it has one; then, if it is to leave the device, poison its block."""
        if int(self.tables.host[slot, page]) == 0:
            block = self._free_host.pop()
            self._write_block(self.host, self.host_geometry, block, int(self.content[slot, page]))
            self.tables.host[slot, page] = block
        if not keep_resident:
            self._free(self.tables.resident, slot, page)

    def share(self, slot: int, page: int, other: int) -> None:
        """Let `other` use the host block of a page as its own page, as two requests with one prefix do."""
        self.content[other, page] = self.content[slot, page]
        self.tables.host[other, page] = self.tables.host[slot, page]

    def lease(self, slot: int) -> None:
        """Give a slot its hot blocks."""
        for index in range(self.shape.hot_blocks):
            self.tables.hot[slot, index] = self._free_device.pop()

    def forget(self, slot: int) -> None:
        """End a request: every block is freed and poisoned, every table entry null. The hot state is not touched."""
        for page in range(self.shape.max_pages):
            self._free(self.tables.resident, slot, page)
            self._free(self.tables.host, slot, page)
        for index in range(self.shape.hot_blocks):
            self._free(self.tables.hot, slot, index)
        self.content[slot] = 0

    # What the resolver is given

    def select(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Selection:
        """A selection from (slot, positions) pairs; shorter rows are filled with -1."""
        positions = torch.full((len(rows), self.shape.topk), EMPTY, dtype=torch.int32)
        for index, (_, chosen) in enumerate(rows):
            positions[index, : len(chosen)] = torch.tensor(list(chosen), dtype=torch.int32)
        row_slot = torch.tensor([slot for slot, _ in rows], dtype=torch.int32)
        return Selection(positions.to(self.device), row_slot.to(self.device))

    def source(self, layer: int) -> LayerRows:
        """A layer's rows in host memory."""
        return LayerRows(self.host, self.host_geometry.layer(layer, self.num_host_blocks))

    def destination(self, layer: int) -> LayerRows:
        """A layer's rows in the slab."""
        return LayerRows(self.slab, self.device_geometry.layer(layer, self.num_device_blocks))

    def truth(self, slots: Sequence[int], positions: Sequence[int], layer: int) -> Bytes:
        """The bytes that (slot, position) pairs must read, uint8 `[n, row_bytes]`."""
        slot, position = np.asarray(slots, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        page, row = position // self.shape.block_size, position % self.shape.block_size
        return row_bytes_of(self.content[slot, page], row, layer, self.shape.row_bytes)

    # Inner workings

    def _shuffled_ids(self, num_blocks: int) -> list[int]:
        ids = list(range(1 + self.shape.unused_blocks, num_blocks))
        self.rng.shuffle(ids)
        return ids

    def _table(self, width: int) -> torch.Tensor:
        return torch.zeros((self.shape.num_slots, width), dtype=torch.int32, device=self.device)

    def _pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _bytes(self, geometry: BlockGeometry) -> int:
        is_slab = geometry is self.device_geometry
        return geometry.block_stride * (self.num_device_blocks if is_slab else self.num_host_blocks)

    def _poisoned(self, storage: torch.Tensor) -> torch.Tensor:
        # Poison would commit every page of an allocation that is large only in its addresses.
        return storage.fill_(POISON) if storage.numel() <= COMPARE_ALL_BYTES else storage

    def _free(self, table: torch.Tensor, slot: int, index: int) -> None:
        block = int(table[slot, index])
        if block == 0:
            return
        table[slot, index] = 0
        if table is self.tables.host and bool((table == block).any()):
            return
        is_host = table is self.tables.host
        storage, geometry = (self.host, self.host_geometry) if is_host else (self.slab, self.device_geometry)
        storage[block * geometry.block_stride : (block + 1) * geometry.block_stride] = POISON
        (self._free_host if is_host else self._free_device).append(block)

    def _write_block(self, storage: torch.Tensor, geometry: BlockGeometry, block: int, content: int) -> None:
        image = np.full((geometry.num_layers, geometry.block_size, geometry.row_stride), POISON, dtype=np.uint8)
        rows = np.arange(geometry.block_size)
        for layer in range(geometry.num_layers):
            image[layer, :, : geometry.row_bytes] = row_bytes_of(
                np.full_like(rows, content), rows, layer, geometry.row_bytes
            )
        start = block * geometry.block_stride
        storage[start : start + geometry.block_stride] = torch.from_numpy(image.reshape(-1)).to(storage.device)


def row_bytes_of(content: npt.NDArray[np.int64], row: npt.NDArray[np.int64], layer: int, row_bytes: int) -> Bytes:
    """Bytes of rows, uint8 `[n, row_bytes]`: a hash of content, row, layer and place, so that no two rows agree."""
    word = np.arange(row_bytes // 8, dtype=np.uint64)
    key = content.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + row.astype(np.uint64) * np.uint64(
        0xBF58476D1CE4E5B9
    )
    mixed: npt.NDArray[np.uint64] = key[:, None] + (word * np.uint64(64) + np.uint64(layer)) * np.uint64(
        0x94D049BB133111EB
    )
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return np.ascontiguousarray(mixed).view(np.uint8).reshape(content.size, row_bytes)
