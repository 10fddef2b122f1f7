"""A resolver so plain that it is obviously right: dictionaries, loops, one row at a time.

It shares no code with any back end. `demand_of` says what the contract asks of one call, without choosing victims;
the checker holds every back end to it. `NaiveResolver` goes on to choose them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hisparse.kernels.contract import (
    EMPTY,
    STATUS_UNION_OVERFLOW,
    BlockTables,
    HotState,
    MissPlan,
    PagedRows,
    ResolverCounters,
    Selection,
)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a call of `resolve` reads, copied to the CPU as int64 arrays with the shapes of the contract."""

    positions: Ints
    row_slot: Ints
    resident: Ints
    host: Ints
    hot: Ints
    position_of: Ints
    hot_row_of: Ints
    stamp: Ints
    step: Ints
    block_size: int

    @classmethod
    def copy(cls, selection: Selection, tables: BlockTables, state: HotState, block_size: int) -> "Inputs":
        """Copy everything. Waits for the device."""
        return cls(
            positions=ints(selection.positions),
            row_slot=ints(selection.row_slot),
            resident=ints(tables.resident),
            host=ints(tables.host),
            hot=ints(tables.hot),
            position_of=ints(state.position_of),
            hot_row_of=ints(state.hot_row_of),
            stamp=ints(state.stamp),
            step=ints(state.step),
            block_size=block_size,
        )

    def physical_row(self, table: Ints, slot: int, index: int) -> int:
        """Row number `index` of a slot through a block table, or -1 where the table has no block."""
        block = int(table[slot, index // self.block_size])
        return EMPTY if block == 0 else block * self.block_size + index % self.block_size

    def is_in_range(self, position: int) -> bool:
        """Whether tables and state have an entry for the position."""
        return bool(position < self.hot_row_of.shape[1] and position // self.block_size < self.resident.shape[1])


@dataclass(slots=True)
class SlotDemand:
    """What one call asks of one slot: `hits` maps position to hot row; `misses` are in ascending order.

    `candidates` are the hot rows that may be evicted, oldest first and the lowest first among equals; `age` is 0
    for an empty one. `num_loads` of the misses must be loaded, the others give -1.
    """

    hits: dict[int, int] = field(default_factory=dict)
    misses: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    age: dict[int, int] = field(default_factory=dict)

    @property
    def num_loads(self) -> int:
        return min(len(self.misses), len(self.candidates))

    @property
    def overflows(self) -> bool:
        return len(self.misses) > len(self.candidates)


@dataclass(slots=True)
class Demand:
    """What the contract asks of one call. `resident` maps (slot, position) to the row it must give.

    `elements` counts, per (slot, position), how often it was selected; what is in neither `resident` nor a slot's
    hits and misses must give -1.
    """

    elements: dict[tuple[int, int], int] = field(default_factory=dict)
    resident: dict[tuple[int, int], int] = field(default_factory=dict)
    slots: dict[int, SlotDemand] = field(default_factory=dict)

    @property
    def overflows(self) -> bool:
        return any(slot.overflows for slot in self.slots.values())


def demand_of(inputs: Inputs) -> Demand:
    """Apply the contract's four rules to every selected position."""
    demand = Demand()
    for slot, row in zip(inputs.row_slot.tolist(), inputs.positions.tolist(), strict=True):
        for position in row:
            if slot >= 0 and position >= 0:
                key = (slot, position)
                demand.elements[key] = demand.elements.get(key, 0) + 1
    for slot, position in sorted(demand.elements):
        if not inputs.is_in_range(position):
            continue
        row = inputs.physical_row(inputs.resident, slot, position)
        if row != EMPTY:
            demand.resident[slot, position] = row
        else:
            _demand_of_slot(inputs, demand, slot, position)
    for slot, of_slot in demand.slots.items():
        _find_candidates(inputs, slot, of_slot)
    return demand


def _demand_of_slot(inputs: Inputs, demand: Demand, slot: int, position: int) -> None:
    """Rules 2 and 3. Looks for the position in `position_of`: the inverse map is only a short cut to it."""
    of_slot = demand.slots.setdefault(slot, SlotDemand())
    for hot_row in np.flatnonzero(inputs.position_of[slot] == position).tolist():
        if inputs.physical_row(inputs.hot, slot, hot_row) != EMPTY:
            of_slot.hits[position] = hot_row
            return
    if inputs.physical_row(inputs.host, slot, position) != EMPTY and inputs.hot[slot].any():
        of_slot.misses.append(position)


def _find_candidates(inputs: Inputs, slot: int, of_slot: SlotDemand) -> None:
    read = set(of_slot.hits.values())
    for hot_row, position in enumerate(inputs.position_of[slot].tolist()):
        if hot_row not in read and inputs.physical_row(inputs.hot, slot, hot_row) != EMPTY:
            of_slot.age[hot_row] = 0 if position == EMPTY else int(inputs.stamp[slot, hot_row])
    of_slot.candidates = sorted(of_slot.age, key=lambda hot_row: (of_slot.age[hot_row], hot_row))


class NaiveResolver:
    """`kernels.contract.Resolver` by loops, for tensors on the CPU. Slow; breaks ties as the reference does."""

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
        """As the contract says."""
        inputs = Inputs.copy(selection, tables, state, destination.layout.block_size)
        demand = demand_of(inputs)
        for slot in set(inputs.row_slot.tolist()) - {EMPTY}:
            state.step[slot] += int(inputs.hot[slot].any())
        where = dict(demand.resident)
        copies: dict[int, list[tuple[int, int]]] = {}
        for slot, of_slot in demand.slots.items():
            loads = dict(zip(of_slot.misses, of_slot.candidates, strict=False))
            for position, hot_row in loads.items():
                state.position_of[slot, hot_row] = position
                state.hot_row_of[slot, position] = hot_row
                slab_row = inputs.physical_row(inputs.hot, slot, hot_row)
                copies.setdefault(slot, []).append((inputs.physical_row(inputs.host, slot, position), slab_row))
            for position, hot_row in {**of_slot.hits, **loads}.items():
                state.stamp[slot, hot_row] = state.step[slot]
                where[slot, position] = inputs.physical_row(inputs.hot, slot, hot_row)
        self._record(plan, inputs.row_slot.tolist(), copies)
        self.replay_plan(plan, [source], [destination], counters)
        self._count(counters, demand, where, sum(map(len, copies.values())))
        rows = [
            [where.get((slot, position), EMPTY) for position in row]
            for slot, row in zip(inputs.row_slot.tolist(), inputs.positions.tolist(), strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int32).reshape(selection.positions.shape)

    def replay_plan(
        self,
        plan: MissPlan,
        sources: Sequence[PagedRows],
        destinations: Sequence[PagedRows],
        counters: ResolverCounters,
    ) -> None:
        """As the contract says."""
        for source, destination in zip(sources, destinations, strict=True):
            for row, count in enumerate(plan.count.tolist()):
                for index in range(count):
                    _copy_row(int(plan.host_row[row, index]), int(plan.slab_row[row, index]), source, destination)
                    counters.totals[3] += source.layout.row_bytes

    def gather_rows(
        self, host_row: torch.Tensor, slab_row: torch.Tensor, source: PagedRows, destination: PagedRows
    ) -> None:
        """As the contract says."""
        for host, slab in zip(host_row.tolist(), slab_row.tolist(), strict=True):
            if host >= 0 and slab >= 0:
                _copy_row(host, slab, source, destination)

    def reset_slots(self, state: HotState, slots: torch.Tensor) -> None:
        """As the contract says."""
        for slot in slots.tolist():
            state.position_of[slot] = EMPTY
            state.queue_state[slot] = 0

    def _record(self, plan: MissPlan, row_slot: list[int], copies: dict[int, list[tuple[int, int]]]) -> None:
        plan.count.zero_()
        for slot, of_slot in copies.items():
            row = row_slot.index(slot)
            plan.count[row] = len(of_slot)
            for index, (host_row, slab_row) in enumerate(of_slot):
                plan.host_row[row, index] = host_row
                plan.slab_row[row, index] = slab_row

    def _count(
        self, counters: ResolverCounters, demand: Demand, where: dict[tuple[int, int], int], num_loads: int
    ) -> None:
        for key, times in demand.elements.items():
            name = 4 if key not in where else 0 if key in demand.resident else 1
            counters.totals[name] += times
        counters.totals[1] -= num_loads
        counters.totals[2] += num_loads
        if demand.overflows:
            counters.status.bitwise_or_(STATUS_UNION_OVERFLOW)


def ints(tensor: torch.Tensor) -> Ints:
    """A copy on the CPU, int64. Waits for the device."""
    return np.array(tensor.detach().cpu().numpy(), dtype=np.int64)


def _copy_row(host_row: int, slab_row: int, source: PagedRows, destination: PagedRows) -> None:
    start, end = source.layout.row_offset(host_row), destination.layout.row_offset(slab_row)
    length = source.layout.row_bytes
    destination.storage[end : end + length] = source.storage[start : start + length]
