"""What stands in for the resolver where nothing ever leaves the device: one look-up in the block table, and no more.

A baseline must not pay for what it does not do. Its followers have nothing to copy, and it counts nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from hisparse.kernels.contract import BlockTables, HotState, MissPlan, PagedRows, ResolverCounters, Selection
from hisparse.worker import HiSparseWorker


class TableLookup:
    """`kernels.contract.Resolver` for pages that are all resident."""

    def __init__(self, block_size: int) -> None:
        self._shift = block_size.bit_length() - 1

    def resolve(
        self,
        selection: Selection,
        tables: BlockTables,
        state: HotState,
        source: PagedRows,
        destination: PagedRows,
        plan: MissPlan,
        counters: ResolverCounters,
    ) -> torch.Tensor:
        positions, slots, table = selection.positions, selection.row_slot, tables.resident
        if positions.device.type == "cuda":
            from _table_lookup_kernel import look_up

            return look_up(positions, slots, table, self._shift)
        pages = positions.long() >> self._shift
        inside = (positions >= 0) & (slots >= 0)[:, None] & (pages < table.shape[1])
        blocks = table[slots.long().clamp(min=0)[:, None], pages.where(inside, 0)]
        rows = (blocks << self._shift) | (positions & ((1 << self._shift) - 1))
        return rows.where(inside & (blocks > 0), -1)

    def replay_plan(
        self,
        plan: MissPlan,
        sources: Sequence[PagedRows],
        destinations: Sequence[PagedRows],
        counters: ResolverCounters,
    ) -> None:
        """Nothing was missed."""

    def gather_rows(
        self, host_row: torch.Tensor, slab_row: torch.Tensor, source: PagedRows, destination: PagedRows
    ) -> None:
        """Nothing is on the host."""

    def reset_slots(self, state: HotState, slots: torch.Tensor) -> None:
        """There is no state."""


def look_up_only(worker: HiSparseWorker) -> None:
    """Give every layer of a worker whose pages never leave the device the look-up in place of its resolver."""
    lookup = TableLookup(worker.plan.config.block_size)
    for handle in worker.handles:
        handle.runtime.context = replace(handle.runtime.context, resolver=lookup)
