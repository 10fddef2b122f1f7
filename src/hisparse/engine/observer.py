"""Tells whoever asked what the indexers select, and on which side of the link it was found.

An engine without an observer has none of this. With one, decode steps on a GPU are launched and not replayed: a
captured graph would not call it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hisparse.engine.batch import ScheduledTokens, StepBatch
from hisparse.kernels.contract import BlockTables


@dataclass(frozen=True, slots=True)
class StepRows:
    """The query rows of one request in a step: `num_rows` tokens from position `start` on, in `slot` of the tables."""

    request_id: str
    slot: int
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class SeenSelection:
    """What the indexer of leader layer `layer` selected for t query rows.

    `slots`, `query_positions`: int64 `[t]`, slot -1 for padding. `positions`: int32 `[t, topk]`, -1 for none.
    `from_device`, `from_host`: bool `[t, topk]`: read from a resident page; or read from a page on the host, through
    the hot rows (loaded now or earlier) or the staging rows. Where both are false, nothing was read.
    """

    layer: int
    slots: torch.Tensor
    query_positions: torch.Tensor
    positions: torch.Tensor
    from_device: torch.Tensor
    from_host: torch.Tensor


class SelectionObserver(Protocol):
    """What an engine tells. Calls come between the forward passes' own work, so a slow observer slows it down."""

    def begin_step(self, rows: Sequence[StepRows]) -> bool:
        """A step with these query rows begins. Returns whether its selections are to be shown."""
        ...

    def observe(self, selection: SeenSelection) -> None:
        """Some rows of the step, in one leader layer. A step may come in several parts."""
        ...


class SelectionWatch:
    """Stands between a model runner and an observer: looks selected positions up in the tables as resolvers do."""

    def __init__(self, observer: SelectionObserver, tables: BlockTables, block_size: int) -> None:
        """`tables` are the worker's own, so that every step is seen with the tables that it runs with."""
        self._observer = observer
        self._tables = tables
        self._block_size = block_size
        self._is_wanted = False

    def begin_step(self, request_ids: Sequence[str], items: Sequence[ScheduledTokens]) -> None:
        """`items[i]` are the step's tokens of request `request_ids[i]`."""
        named = zip(request_ids, items, strict=True)
        rows = [StepRows(name, item.slot, item.start, len(item.token_ids)) for name, item in named]
        self._is_wanted = self._observer.begin_step(rows)

    def see(self, layer: int, positions: torch.Tensor, batch: StepBatch) -> None:
        """A leader's selection, int32 `[T, topk]` logical positions for all rows of `batch`."""
        if not self._is_wanted:
            return
        asked = (positions >= 0) & (batch.slots >= 0)[:, None]
        on_device = asked & self._has_block(self._tables.resident, positions, batch.slots)
        on_host = asked & ~on_device & self._has_block(self._tables.host, positions, batch.slots)
        seen = SeenSelection(layer, batch.slots, batch.positions, positions, on_device, on_host)
        self._observer.observe(seen)

    def _has_block(self, table: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        pages = positions.long().clamp(min=0) // self._block_size
        return table[slots.clamp(min=0)[:, None], pages] != 0
