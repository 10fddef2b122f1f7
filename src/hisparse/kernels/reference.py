"""The resolver in plain torch: the oracle of every other backend, and what runs where there is no GPU.

It follows the contract with exact LRU and no Python loop over rows, requests or positions. The state of a call is
carried from step to step as a *union*: the distinct positions that are not resident, in ascending order slot by
slot. Unlike a kernel, it allocates and it waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hisparse.errors import InvariantError
from hisparse.kernels.contract import (
    COUNTER_NAMES,
    EMPTY,
    STATUS_UNION_OVERFLOW,
    BlockTables,
    HotState,
    MissPlan,
    PagedRows,
    ResolverCounters,
    Selection,
)
from hisparse.kernels.row_copy import copy_rows

_PINNED = torch.iinfo(torch.int32).max
"""The age of a hot row that may not be evicted: later than any step."""

_BYTES = COUNTER_NAMES.index("bytes")


@dataclass(frozen=True, slots=True)
class _Request:
    """What the steps of one `resolve` share. Block tables and state as they were passed in."""

    tables: BlockTables
    state: HotState
    block_size: int

    @property
    def max_tokens(self) -> int:
        """Positions from here on can never be served."""
        return min(self.state.hot_row_of.shape[1], self.tables.resident.shape[1] * self.block_size)

    def slab_rows(self, table: torch.Tensor, slot: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Physical rows, int64, of row number `index` of each slot through a block table; -1 where it has no block."""
        page = torch.div(index, self.block_size, rounding_mode="floor")
        block = table[slot, page].long()
        return torch.where(block != 0, block * self.block_size + (index - page * self.block_size), EMPTY)

    def hot_rows(self, slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """The hot row, int64, that holds each position now; -1 where none does or its block is not leased."""
        state = self.state
        claimed = state.hot_row_of[slot, position].long()
        row = claimed.clamp(0, state.position_of.shape[1] - 1)
        holds = (row == claimed) & (state.position_of[slot, row] == position)
        leased = self.slab_rows(self.tables.hot, slot, row) != EMPTY
        return torch.where(holds & leased, row, EMPTY)


@dataclass(frozen=True, slots=True)
class _Classified:
    """Every output element. `rows`: physical rows, int64, final where resident and -1 elsewhere. Others: bool.

    `slot` and `position` (int64) are those selected, and 0 where nothing may be looked up with them.
    """

    slot: torch.Tensor
    position: torch.Tensor
    rows: torch.Tensor
    wanted: torch.Tensor
    resident: torch.Tensor
    elsewhere: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Union:
    """Distinct positions that are not resident, int64 `[n]`, slot-major and ascending.

    `active`: int64 `[num_active]`, the slots of the step; `local`: int64 `[n]`, the index of each slot in it.
    `hot_row`: int64 `[n]`, -1 for a miss. `host_row`: int64 `[n]`, the physical host row, -1 where there is none.
    """

    active: torch.Tensor
    local: torch.Tensor
    slot: torch.Tensor
    position: torch.Tensor
    hot_row: torch.Tensor
    host_row: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Loads:
    """The misses that found a victim, int64 `[n]` each, and whether one did not."""

    slot: torch.Tensor
    position: torch.Tensor
    hot_row: torch.Tensor
    host_row: torch.Tensor
    overflow: torch.Tensor


class ReferenceResolver:
    """`kernels.contract.Resolver` for tensors on any device; host and device allocations may lie on different ones.

    Where the contract leaves a choice: among victims of equal age the lowest slot goes first, misses take victims
    in ascending order of position, and so the lowest positions of a union that overflows are served. A slot whose
    hot table holds no block has no lease: what only the host has is then unreachable, and that is no overflow.
    """

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
        """Plan and copy for a leader. Returns int32 `[num_rows, topk]` physical rows; overwrites `plan`.

        Raises `InvariantError` when the plan is too short, when host and slab pages differ in size, or when a selection
        promises that there is no lease and there is one.
        """
        if source.layout.block_size != destination.layout.block_size:
            raise InvariantError(
                f"host pages of {source.layout.block_size} rows do not match slab pages of "
                f"{destination.layout.block_size} rows"
            )
        request = _Request(tables, state, destination.layout.block_size)
        active = selection.row_slot[selection.row_slot >= 0].unique()
        leased = active[(tables.hot[active] != 0).any(1)]
        if leased.numel() and not selection.leased:
            raise InvariantError(f"a selection without leases names slots {leased.tolist()}, which have hot blocks")
        state.step[leased] += 1
        classified = _classify(request, selection)
        loads = _choose_victims(request, _unite(request, classified))
        slab_row = request.slab_rows(tables.hot, loads.slot, loads.hot_row)
        _record_plan(plan, selection.row_slot, loads, slab_row)
        _record_loads(state, loads)
        copy_rows(loads.host_row, slab_row, source, destination)
        rows = _fill_hot_rows(request, classified)
        _count(counters, classified, rows, loads, source.layout.row_bytes)
        return rows.int()

    def replay_plan(
        self,
        plan: MissPlan,
        sources: Sequence[PagedRows],
        destinations: Sequence[PagedRows],
        counters: ResolverCounters,
    ) -> None:
        """Make the leader's copies for its followers, `sources[i]` to `destinations[i]`. Counts bytes only."""
        host_row, slab_row = plan.copies()
        for source, destination in zip(sources, destinations, strict=True):
            copy_rows(host_row, slab_row, source, destination)
            counters.totals[_BYTES] += host_row.numel() * source.layout.row_bytes

    def gather_rows(
        self, host_row: torch.Tensor, slab_row: torch.Tensor, source: PagedRows, destination: PagedRows
    ) -> None:
        """Copy host rows to slab rows: int64 `[n]` each; a pair with a -1 is skipped."""
        named = (host_row >= 0) & (slab_row >= 0)
        copy_rows(host_row[named], slab_row[named], source, destination)

    def reset_slots(self, state: HotState, slots: torch.Tensor) -> None:
        """Forget the hot rows of `slots` (int64 `[n]`)."""
        state.position_of.index_fill_(0, slots, EMPTY)
        state.queue_state.index_fill_(0, slots, 0)


def _classify(request: _Request, selection: Selection) -> _Classified:
    """Tell padding, resident, unreachable by number, and elsewhere (hot or host) apart, element by element."""
    position = selection.positions.long()
    slot = selection.row_slot.long()[:, None].expand_as(position)
    wanted = (slot >= 0) & (position >= 0)
    in_range = wanted & (position < request.max_tokens)
    slot, position = torch.where(in_range, slot, 0), torch.where(in_range, position, 0)
    rows = torch.where(in_range, request.slab_rows(request.tables.resident, slot, position), EMPTY)
    resident = rows != EMPTY
    return _Classified(slot, position, rows, wanted, resident, in_range & ~resident)


def _unite(request: _Request, classified: _Classified) -> _Union:
    """Mark every selected position in one bitmap per active slot, so that listing it removes duplicates in order."""
    device = classified.slot.device
    slot, position = classified.slot[classified.elsewhere], classified.position[classified.elsewhere]
    active, local = torch.unique(slot, return_inverse=True)
    marks = torch.zeros((active.numel(), request.max_tokens), dtype=torch.bool, device=device)
    marks[local, position] = True
    local, position = marks.nonzero(as_tuple=True)
    slot = active[local]
    return _Union(
        active=active,
        local=local,
        slot=slot,
        position=position,
        hot_row=request.hot_rows(slot, position),
        host_row=request.slab_rows(request.tables.host, slot, position),
    )


def _choose_victims(request: _Request, union: _Union) -> _Loads:
    """Touch the hot rows that are read, then give the k-th miss of a slot the k-th oldest of its other hot rows."""
    state = request.state
    hit = union.hot_row != EMPTY
    state.stamp[union.slot[hit], union.hot_row[hit]] = state.step[union.slot[hit]]
    ages = _ages(request, union.active)
    ages[union.local[hit], union.hot_row[hit]] = _PINNED
    order = ages.argsort(dim=1, stable=True)
    num_victims = (ages != _PINNED).sum(1)
    has_lease = (request.tables.hot[union.active] != 0).any(1)

    miss = ~hit & (union.host_row != EMPTY) & has_lease[union.local]
    local = union.local[miss]
    num_misses = torch.bincount(local, minlength=union.active.numel())
    first = num_misses.cumsum(0) - num_misses
    rank = torch.arange(local.numel(), device=local.device) - first[local]
    fits = rank < num_victims[local]
    return _Loads(
        slot=union.slot[miss][fits],
        position=union.position[miss][fits],
        hot_row=order[local[fits], rank[fits]],
        host_row=union.host_row[miss][fits],
        overflow=(~fits).any(),
    )


def _ages(request: _Request, slots: torch.Tensor) -> torch.Tensor:
    """When each hot row of `slots` was last read, int32 `[n, hot_rows]`: 0 if empty, `_PINNED` if not leased."""
    state = request.state
    index = torch.arange(state.stamp.shape[1], device=slots.device)
    leased = request.slab_rows(request.tables.hot, slots[:, None], index) != EMPTY
    ages = torch.where(state.position_of[slots] == EMPTY, 0, state.stamp[slots])
    return torch.where(leased, ages, _PINNED)


def _record_loads(state: HotState, loads: _Loads) -> None:
    """The evicted positions keep their inverse entries; these no longer count, as `position_of` disagrees."""
    state.position_of[loads.slot, loads.hot_row] = loads.position.int()
    state.hot_row_of[loads.slot, loads.position] = loads.hot_row.short()
    state.stamp[loads.slot, loads.hot_row] = state.step[loads.slot]


def _record_plan(plan: MissPlan, row_slot: torch.Tensor, loads: _Loads, slab_row: torch.Tensor) -> None:
    """Write each slot's copies to the plan's row of its first batch row. `loads` are ordered by slot."""
    slots, per_slot = loads.slot.unique_consecutive(return_counts=True)
    max_rows, capacity = plan.host_row.shape
    if row_slot.numel() > max_rows or int(per_slot.amax() if per_slot.numel() else 0) > capacity:
        raise InvariantError(
            f"a miss plan for {max_rows} rows of {capacity} copies cannot hold {row_slot.numel()} rows of "
            f"{per_slot.tolist()}"
        )
    for recorded, empty in ((plan.count, 0), (plan.host_row, EMPTY), (plan.slab_row, EMPTY)):
        recorded.fill_(empty)
    if not slots.numel():
        return
    first_row = (row_slot[None, :] == slots[:, None]).int().argmax(dim=1)
    plan.count[first_row] = per_slot.int()
    column = torch.arange(loads.slot.numel(), device=slots.device) - (per_slot.cumsum(0) - per_slot).repeat_interleave(
        per_slot
    )
    row = first_row.repeat_interleave(per_slot)
    plan.host_row[row, column] = loads.host_row
    plan.slab_row[row, column] = slab_row


def _fill_hot_rows(request: _Request, classified: _Classified) -> torch.Tensor:
    """The rows of all elements, once every load is recorded: what is still not hot is unreachable."""
    slot, position = classified.slot[classified.elsewhere], classified.position[classified.elsewhere]
    hot_row = request.hot_rows(slot, position)
    row = request.slab_rows(request.tables.hot, slot, hot_row.clamp(min=0))
    rows = classified.rows.clone()
    rows[classified.elsewhere] = torch.where(hot_row != EMPTY, row, EMPTY)
    return rows


def _count(
    counters: ResolverCounters, classified: _Classified, rows: torch.Tensor, loads: _Loads, row_bytes: int
) -> None:
    num_wanted, num_resident = classified.wanted.sum(), classified.resident.sum()
    num_served = (rows != EMPTY).sum()
    num_misses = torch.full_like(num_served, loads.slot.numel())
    added = {
        "resident": num_resident,
        "hot": num_served - num_resident - num_misses,
        "miss": num_misses,
        "bytes": num_misses * row_bytes,
        "unreachable": num_wanted - num_served,
    }
    counters.totals.add_(torch.stack([added[name] for name in COUNTER_NAMES]))
    counters.status.bitwise_or_(loads.overflow.int() * STATUS_UNION_OVERFLOW)
