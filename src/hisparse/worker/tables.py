"""The block tables of a worker: which block holds which page of which slot."""

from collections.abc import Sequence

import torch

from hisparse.config import CachePlan
from hisparse.errors import InvariantError, ProtocolError
from hisparse.geometry import NULL_BLOCK
from hisparse.kernels.contract import EMPTY, BlockTables
from hisparse.protocol import Table, TableUpdate
from hisparse.worker.upload import upload


class WorkerTables:
    """One int32 tensor `[num_slots, width]` per table, changed by the scheduler's updates alone.

    Entry 0 means "not here". The tensors stay the same objects for the worker's life, so that what holds them (a
    captured graph, a resolver) sees every update.
    """

    def __init__(self, plan: CachePlan, device: torch.device | str = "cpu") -> None:
        self.block_size = plan.config.block_size
        self.num_slots = plan.config.max_running
        self.device = torch.device(device)
        self._hot_pages: dict[int, set[int]] = {}
        self._missing = torch.zeros((), dtype=torch.int64, device=device)
        self._num_blocks = {
            Table.RESIDENT: plan.num_device_blocks,
            Table.HOST: plan.num_host_blocks,
            Table.HOT: plan.num_device_blocks,
            Table.INDEXER: plan.num_indexer_blocks,
        }
        self._tables = {
            table: torch.zeros(
                (self.num_slots, plan.hot_blocks if table is Table.HOT else plan.max_pages),
                dtype=torch.int32,
                device=device,
            )
            for table in Table
        }

    def __getitem__(self, table: Table) -> torch.Tensor:
        """int32 `[num_slots, width]`. Read it; only `apply` changes it."""
        return self._tables[table]

    @property
    def any_leased(self) -> bool:
        """Whether some slot has a hot block, as the updates have it: asked without the device."""
        return bool(self._hot_pages)

    def block_tables(self) -> BlockTables:
        """What resolvers are given. Shares memory with the tables."""
        return BlockTables(self._tables[Table.RESIDENT], self._tables[Table.HOST], self._tables[Table.HOT])

    def apply(self, resets: Sequence[int], updates: Sequence[TableUpdate]) -> tuple[int, ...]:
        """Clear the slots of `resets`, then carry out `updates` in order: the last one to write an entry wins.

        Returns, in ascending order, the slots whose hot lease is another one now: their hot rows are to be forgotten.
        Raises `ProtocolError`, and changes nothing, for a slot, a page or a block that does not exist.
        """
        for slot in resets:
            self._check_slot(slot, "reset")
        cells: dict[Table, dict[int, int]] = {}
        for update in updates:
            start = self._check_update(update)
            entries = cells.setdefault(update.table, {})
            entries.update(zip(range(start, start + len(update.blocks)), update.blocks, strict=True))
        if resets:
            self._clear(resets)
        for table, entries in cells.items():
            self._write(self._tables[table], entries)
        self._note_leases(resets, updates)
        return tuple(sorted({*resets, *(update.slot for update in updates if update.table is Table.HOT)}))

    def physical_rows(self, table: Table, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the rows of `positions` of `slots` (int64 `[n]` each) lie in that table's pool: int64 `[n]`.

        Raises `InvariantError` naming slot and position when one of them has no block there. On a GPU, where asking
        would stop the stream, such a position gives row 0 of the null block, and unless its slot is -1 (padding) it
        is counted in `num_missing`.
        """
        entries = self._tables[table]
        pages = positions // self.block_size
        inside = (slots >= 0) & (slots < self.num_slots) & (positions >= 0) & (pages < entries.shape[1])
        blocks = entries[slots.where(inside, 0), pages.where(inside, 0)].to(torch.int64)
        missing = ~inside | (blocks == NULL_BLOCK)
        if self.device.type == "cuda":
            self._missing += (missing & (slots != EMPTY)).sum()
            return (blocks * self.block_size + positions % self.block_size).masked_fill(missing, 0)
        if bool(missing.any()):
            index = int(missing.nonzero()[0])
            raise InvariantError(
                f"slot {int(slots[index])} has no {table.value} block for position {int(positions[index])}"
            )
        return blocks * self.block_size + positions % self.block_size

    def num_missing(self) -> int:
        """Positions that were asked for on a GPU and had no block: 0, or the scheduler erred. Waits for the device."""
        return int(self._missing)

    def _note_leases(self, resets: Sequence[int], updates: Sequence[TableUpdate]) -> None:
        for slot in resets:
            self._hot_pages.pop(slot, None)
        for update in updates:
            if update.table is not Table.HOT:
                continue
            held = self._hot_pages.pop(update.slot, set())
            for page, block in enumerate(update.blocks, update.first_page):
                (held.discard if block == NULL_BLOCK else held.add)(page)
            if held:
                self._hot_pages[update.slot] = held

    def _clear(self, slots: Sequence[int]) -> None:
        for entries in self._tables.values():
            entries.index_fill_(0, upload(slots, torch.int64, entries.device), NULL_BLOCK)

    @staticmethod
    def _write(entries: torch.Tensor, cells: dict[int, int]) -> None:
        """One scattered write, each entry once: what a device does with repeated indices is not defined."""
        indices = upload(list(cells.keys()), torch.int64, entries.device)
        blocks = upload(list(cells.values()), torch.int32, entries.device)
        entries.view(-1)[indices] = blocks

    def _check_slot(self, slot: int, what: str) -> None:
        if not 0 <= slot < self.num_slots:
            raise ProtocolError(f"a {what} names slot {slot}; there are {self.num_slots}")

    def _check_update(self, update: TableUpdate) -> int:
        """Returns the flat index of the update's first entry."""
        self._check_slot(update.slot, f"{update.table.value} update")
        width = self._tables[update.table].shape[1]
        end = update.first_page + len(update.blocks)
        if update.first_page < 0 or end > width:
            raise ProtocolError(
                f"an update writes {update.table.value} pages {update.first_page} to {end} of slot {update.slot}; "
                f"there are {width}"
            )
        num_blocks = self._num_blocks[update.table]
        if update.blocks and not (min(update.blocks) >= 0 and max(update.blocks) < num_blocks):
            raise ProtocolError(
                f"an update writes {update.table.value} blocks {min(update.blocks)} to {max(update.blocks)} of slot "
                f"{update.slot}; there are {num_blocks}"
            )
        return update.slot * width + update.first_page
