"""Prefill over pages on the host: where a pass finds its rows, and which of them it must load first."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hisparse.errors import InvariantError
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
        """Find `positions` (`[t, topk]`, -1 for none) of `slots` (`[t]`, -1 for padding).

        A row on the host is loaded once, however often the pass selects it; loads are in ascending order of host
        rows. Raises `InvariantError` when the pass selects more distinct host rows than the area holds.
        """
        resident, host, asked = self._find(positions, slots, tables)
        on_host = (resident < 0) & (host >= 0)
        host_row, place = torch.unique(host[on_host], return_inverse=True)
        if host_row.numel() > self.rows.numel():
            raise InvariantError(
                f"a prefill pass of {positions.shape[0]} rows selects {host_row.numel()} rows on the host; "
                f"the staging blocks hold {self.rows.numel()}"
            )
        rows = resident
        slab_row = self.rows[: host_row.numel()]
        num_resident = int((resident >= 0).sum())
        rows[on_host] = slab_row[place]
        return StagePlan(
            rows=rows.to(torch.int32),
            host_row=host_row,
            slab_row=slab_row,
            num_resident=num_resident,
            num_shared=int(place.numel() - host_row.numel()),
            num_unreachable=int(asked.sum()) - num_resident - int(place.numel()),
        )

    def _find(
        self, positions: torch.Tensor, slots: torch.Tensor, tables: BlockTables
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slab rows and host rows, int64, -1 where a position is not there; and which elements name a position."""
        positions = positions.to(torch.int64)
        asked = (positions >= 0) & (slots >= 0)[:, None]
        pages = positions // self._block_size
        inside = asked & (pages < tables.resident.shape[1])
        index = (slots.to(torch.int64).clamp(min=0)[:, None], pages.where(inside, 0))
        in_page = positions % self._block_size

        def rows_of(table: torch.Tensor) -> torch.Tensor:
            blocks = table[index].to(torch.int64)
            return (blocks * self._block_size + in_page).where(inside & (blocks > 0), EMPTY)

        return rows_of(tables.resident), rows_of(tables.host), asked
