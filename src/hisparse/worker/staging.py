"""Prefill over pages on the host: where a pass finds its rows, and which of them it must load first."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hisparse.errors import InvariantError
from hisparse.geometry import NULL_BLOCK
from hisparse.kernels.contract import EMPTY, BlockTables
from hisparse.protocol import DeviceBlockId


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pass of one layer.

    `rows`: int32, the shape of the positions: physical rows of the slab, -1 where there is none. `host_row`,
    `slab_row`: int64 `[n]`, the copies to make first. The counts are selections, as the resolver counts them:
    `num_loaded` rows are copied, `num_shared` further selections find a row that another one loads.
    """

    rows: torch.Tensor
    host_row: torch.Tensor
    slab_row: torch.Tensor
    num_resident: int
    num_shared: int
    num_unreachable: int

    @property
    def num_loaded(self) -> int:
        """Distinct rows that the pass copies from the host."""
        return int(self.host_row.numel())


class StagingArea:
    """The slab rows of the staging lease. It holds nothing from one pass to the next."""

    def __init__(self, blocks: Sequence[DeviceBlockId], block_size: int, device: torch.device | str = "cpu") -> None:
        """Raises `InvariantError` for a lease that names the null block or a block twice."""
        if min(blocks, default=0) <= 0 or len(set(blocks)) != len(blocks):
            raise InvariantError(f"blocks {tuple(blocks)} are no staging lease: they must be distinct and above 0")
        first = torch.tensor(blocks, dtype=torch.int64, device=device) * block_size
        self.rows = (first[:, None] + torch.arange(block_size, device=device)).flatten()
        self._block_size = block_size

    def plan(self, positions: torch.Tensor, slots: torch.Tensor, tables: BlockTables) -> StagePlan:
        """Find `positions` (`[t, topk]`, -1 for none) of `slots` (`[t]`, -1 for padding), as many rows as fit.

        A row on the host is loaded once, however often the pass selects it; loads are in ascending order of host
        rows. The plan covers the first rows, up to the one whose selection would overflow the area. Raises
        `InvariantError` when a single row selects more host rows than the area holds.
        """
        wanted = _Wanted.of(positions, slots, tables.resident.shape[1], self._block_size)
        rows = wanted.rows_in(tables.resident)
        num_asked, num_resident = wanted.num_asked, int((rows >= 0).sum())
        if num_resident == num_asked:
            nothing = self.rows[:0]
            return StagePlan(rows.to(torch.int32), nothing, nothing, num_resident, num_shared=0, num_unreachable=0)
        host = wanted.rows_in(tables.host)
        on_host = (rows < 0) & (host >= 0)
        host_row, place = torch.unique(host[on_host], return_inverse=True)
        if host_row.numel() > self.rows.numel():
            fitting = self._num_fitting(on_host, place, int(host_row.numel()))
            return self.plan(positions[:fitting], slots[:fitting], tables)
        slab_row = self.rows[: host_row.numel()]
        rows[on_host] = slab_row[place]
        num_on_host = int(place.numel())
        return StagePlan(
            rows=rows.to(torch.int32),
            host_row=host_row,
            slab_row=slab_row,
            num_resident=num_resident,
            num_shared=num_on_host - int(host_row.numel()),
            num_unreachable=num_asked - num_resident - num_on_host,
        )

    def _num_fitting(self, on_host: torch.Tensor, place: torch.Tensor, num_distinct: int) -> int:
        """How many leading rows select no more distinct host rows than the area holds.

        `on_host`: bool `[t, topk]`; `place`: for its true elements in order, which distinct host row each selects.
        """
        query_row = on_host.nonzero()[:, 0]
        first_asker = query_row.new_full((num_distinct,), on_host.shape[0])
        first_asker.scatter_reduce_(0, place, query_row, "amin")
        needed = torch.bincount(first_asker, minlength=on_host.shape[0]).cumsum(0)
        fitting = int((needed <= self.rows.numel()).sum())
        if not fitting:
            raise InvariantError(
                f"one row of a prefill selects {int(needed[0])} rows on the host; "
                f"the staging blocks hold {self.rows.numel()}"
            )
        return fitting


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A pass's positions as table entries: `entry`, the flat index of each position's page, and its row `in_page`,
    int64. `inside` is false for padding and for pages beyond the tables, whose `entry` is 0."""

    entry: torch.Tensor
    in_page: torch.Tensor
    inside: torch.Tensor
    num_asked: int
    block_size: int

    @classmethod
    def of(cls, positions: torch.Tensor, slots: torch.Tensor, width: int, block_size: int) -> "_Wanted":
        positions = positions.to(torch.int64)
        asked = (positions >= 0) & (slots >= 0)[:, None]
        pages = positions // block_size
        inside = asked & (pages < width)
        entry = (pages + slots.to(torch.int64)[:, None] * width).where(inside, 0)
        return cls(entry, positions - pages * block_size, inside, int(asked.sum()), block_size)

    def rows_in(self, table: torch.Tensor) -> torch.Tensor:
        """int64 physical rows of that table's pool, -1 where a position has no block there."""
        blocks = table.take(self.entry).to(torch.int64)
        return (blocks * self.block_size + self.in_page).where(self.inside & (blocks != NULL_BLOCK), EMPTY)
