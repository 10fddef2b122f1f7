"""Holds one call of a resolver to the contract, whichever legal victims it chose.

What was demanded is worked out by `resolver_oracle` from the inputs as they were; the rest is judged from what the
call left behind: outputs, state, plan, counters, and every byte of slab and host memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hisparse.kernels.contract import (
    COUNTER_NAMES,
    EMPTY,
    STATUS_UNION_OVERFLOW,
    PagedRows,
    Resolver,
    Selection,
)
from hisparse.testing.resolver_cases import COMPARE_ALL_BYTES, Bytes, Case
from hisparse.testing.resolver_oracle import Demand, Inputs, Ints, SlotDemand, demand_of, ints

Key = tuple[int, int]
"""(slot, position)."""


class ContractViolation(AssertionError):
    """The resolver did something that the contract does not allow. The message says what, and in which case."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One checked call. `rows`: int64 `[num_rows, topk]`. `loads`: (slot, position) to the hot row it was put in.

    `counted`: what the call added to each counter, by name.
    """

    rows: Ints
    loads: dict[Key, int]
    counted: dict[str, int]
    demand: Demand


@dataclass(frozen=True, slots=True)
class _Memory:
    """Slab and host bytes before a call. Allocations that are too large to compare are not kept."""

    slab: Bytes | None
    host: Bytes | None

    @classmethod
    def copy(cls, case: Case) -> "_Memory":
        slab, host = (_bytes_of(x) if x.numel() <= COMPARE_ALL_BYTES else None for x in (case.slab, case.host))
        return cls(slab, host)


def check_resolve(resolver: Resolver, case: Case, selection: Selection) -> Outcome:
    """Call `resolve` for the case's leader and hold the call to the contract.

    Raises `ContractViolation`.
    """
    layer = case.shape.leader
    before = Inputs.copy(selection, case.tables, case.state, case.shape.block_size)
    totals, status = ints(case.counters.totals), int(case.counters.status.item())
    memory = _Memory.copy(case)
    demand = demand_of(before)
    rows = resolver.resolve(
        selection, case.tables, case.state, case.source(layer), case.destination(layer), case.plan, case.counters
    )
    _expect(rows.dtype == torch.int32, case, f"rows are {rows.dtype}, not int32")
    _expect(rows.shape == selection.positions.shape, case, f"rows have shape {tuple(rows.shape)}")
    after = Inputs.copy(selection, case.tables, case.state, case.shape.block_size)
    check_inputs_kept(case, before, after)
    loads = _loads(case, before, after, demand)
    where = _where(before, demand, loads)
    _check_rows(case, before, where, ints(rows))
    _check_state(case, before, after, demand, loads)
    counted = dict(zip(COUNTER_NAMES, (ints(case.counters.totals) - totals).tolist(), strict=True))
    _check_counters(case, demand, where, loads, counted)
    expected_status = status | (STATUS_UNION_OVERFLOW if demand.overflows else 0)
    _expect(int(case.counters.status.item()) == expected_status, case, f"status is not {expected_status}")
    copies = _copies_by_row(before, loads)
    _check_plan(case, copies)
    check_copies(case, memory.slab, memory.host, [layer], set().union(*copies.values()))
    check_truth(case, layer, where)
    return Outcome(ints(rows), loads, counted, demand)


def check_replay(resolver: Resolver, case: Case, outcome: Outcome, *layers: int) -> None:
    """Replay the plan of the last `resolve` for other layers, together, and check their bytes and what was counted.

    Raises `ContractViolation`.
    """
    sources, destinations = [case.source(layer) for layer in layers], [case.destination(layer) for layer in layers]
    memory, totals = _Memory.copy(case), ints(case.counters.totals)
    copies = set().union(*_planned(case).values())
    resolver.replay_plan(case.plan, sources, destinations, case.counters)
    check_copies(case, memory.slab, memory.host, layers, copies)
    added = ints(case.counters.totals) - totals
    expected = [0] * len(COUNTER_NAMES)
    expected[COUNTER_NAMES.index("bytes")] = len(copies) * case.shape.row_bytes * len(layers)
    _expect(added.tolist() == expected, case, f"replay counted {added.tolist()}, not {expected}")
    inputs = Inputs.copy(case.select([]), case.tables, case.state, case.shape.block_size)
    for layer in layers:
        check_truth(case, layer, _where(inputs, outcome.demand, outcome.loads))


def check_gather(resolver: Resolver, case: Case, copies: list[tuple[int, int]], layer: int) -> None:
    """Call `gather_rows` with (host row, slab row) pairs, those with a -1 to be skipped, and check every byte.

    Raises `ContractViolation`.
    """
    memory, totals = _Memory.copy(case), ints(case.counters.totals)
    pairs = torch.tensor(copies, dtype=torch.int64, device=case.device).reshape(-1, 2)
    resolver.gather_rows(
        pairs[:, 0].contiguous(), pairs[:, 1].contiguous(), case.source(layer), case.destination(layer)
    )
    named = {pair for pair in copies if EMPTY not in pair}
    check_copies(case, memory.slab, memory.host, [layer], named)
    _expect(bool((ints(case.counters.totals) == totals).all()), case, "gather_rows counted something")


def check_inputs_kept(case: Case, before: Inputs, after: Inputs) -> None:
    """Selection and tables belong to the scheduler's side; a resolver only reads them."""
    for name in ("positions", "row_slot", "resident", "host", "hot"):
        kept = np.array_equal(getattr(before, name), getattr(after, name))
        _expect(kept, case, f"resolve changed its input {name!r}")


def check_copies(
    case: Case,
    slab_before: Bytes | None,
    host_before: Bytes | None,
    layers: Sequence[int],
    copies: set[tuple[int, int]],
) -> None:
    """The copies were made, for these layers, and no other byte of slab or host memory changed."""
    pairs = sorted(copies)
    for layer in layers:
        source, destination = case.source(layer), case.destination(layer)
        put = _read(source, [host_row for host_row, _ in pairs])
        got = _read(destination, [slab_row for _, slab_row in pairs])
        _expect(np.array_equal(put, got), case, f"layer {layer}: a copied row does not have the bytes of its host row")
        if slab_before is not None:
            for (_, slab_row), row in zip(pairs, put, strict=True):
                start = destination.layout.row_offset(slab_row)
                slab_before[start : start + destination.layout.row_bytes] = row
    if slab_before is not None:
        unchanged = np.array_equal(slab_before, _bytes_of(case.slab))
        _expect(unchanged, case, f"layers {list(layers)}: slab bytes changed that no copy names")
    if host_before is not None:
        _expect(np.array_equal(host_before, _bytes_of(case.host)), case, "host memory was written")


def check_truth(case: Case, layer: int, where: dict[Key, int]) -> None:
    """Whatever (slot, position) was given a slab row finds its own bytes there."""
    keys = sorted(where)
    expected = case.truth([slot for slot, _ in keys], [position for _, position in keys], layer)
    got = _read(case.destination(layer), [where[key] for key in keys])
    wrong = np.flatnonzero((expected != got).any(axis=1)).tolist()
    _expect(not wrong, case, f"layer {layer}: wrong bytes at (slot, position) {[keys[index] for index in wrong[:4]]}")


def _where(inputs: Inputs, demand: Demand, loads: dict[Key, int]) -> dict[Key, int]:
    """The slab row of every (slot, position) that is served."""
    where = dict(demand.resident)
    for slot, of_slot in demand.slots.items():
        for position, hot_row in of_slot.hits.items():
            where[slot, position] = inputs.physical_row(inputs.hot, slot, hot_row)
    for (slot, position), hot_row in loads.items():
        where[slot, position] = inputs.physical_row(inputs.hot, slot, hot_row)
    return where


def _loads(case: Case, before: Inputs, after: Inputs, demand: Demand) -> dict[Key, int]:
    """Where the misses went, from what changed in `position_of`; checks that they are misses and the right number."""
    loads: dict[Key, int] = {}
    for slot, hot_row in np.argwhere(before.position_of != after.position_of).tolist():
        position = int(after.position_of[slot, hot_row])
        of_slot = demand.slots.get(slot, SlotDemand())
        _expect(position in of_slot.misses, case, f"slot {slot}: hot row {hot_row} now holds {position}, not missed")
        _expect((slot, position) not in loads, case, f"slot {slot}: position {position} was loaded twice")
        _expect(hot_row in of_slot.age, case, f"slot {slot}: hot row {hot_row} was evicted though it is read")
        loads[slot, position] = hot_row
    for slot, of_slot in demand.slots.items():
        victims = {hot_row for (of, _), hot_row in loads.items() if of == slot}
        _expect(len(victims) == of_slot.num_loads, case, f"slot {slot}: {len(victims)} loads, not {of_slot.num_loads}")
        newest = max((of_slot.age[hot_row] for hot_row in victims), default=0)
        oldest = min((age for hot_row, age in of_slot.age.items() if hot_row not in victims), default=newest)
        _expect(newest <= oldest, case, f"slot {slot}: evicted a row of step {newest}, kept one of step {oldest}")
    return loads


def _check_rows(case: Case, before: Inputs, where: dict[Key, int], rows: Ints) -> None:
    for index, slot in enumerate(before.row_slot.tolist()):
        for column, position in enumerate(before.positions[index].tolist()):
            expected = EMPTY if slot < 0 or position < 0 else where.get((slot, position), EMPTY)
            got = int(rows[index, column])
            _expect(
                got == expected,
                case,
                f"row {index} column {column}, slot {slot} position {position}: gives {got}, not {expected}",
            )


def _check_state(case: Case, before: Inputs, after: Inputs, demand: Demand, loads: dict[Key, int]) -> None:
    step = before.step.copy()
    step[[slot for slot in set(before.row_slot.tolist()) if slot >= 0 and before.hot[slot].any()]] += 1
    _expect(np.array_equal(after.step, step), case, f"steps went from {before.step} to {after.step}, not {step}")
    stamp = before.stamp.copy()
    for slot, of_slot in demand.slots.items():
        stamp[slot, list(of_slot.hits.values())] = after.step[slot]
    for (slot, position), hot_row in loads.items():
        stamp[slot, hot_row] = after.step[slot]
        inverse = int(after.hot_row_of[slot, position])
        _expect(inverse == hot_row, case, f"slot {slot} position {position}: inverse {inverse}, not {hot_row}")
    wrong = np.argwhere(stamp != after.stamp).tolist()
    _expect(not wrong, case, f"stamps are wrong at (slot, hot row) {wrong[:4]}")


def _check_counters(
    case: Case, demand: Demand, where: dict[Key, int], loads: dict[Key, int], counted: dict[str, int]
) -> None:
    resident = sum(times for key, times in demand.elements.items() if key in demand.resident)
    served = sum(times for key, times in demand.elements.items() if key in where)
    expected = {
        "resident": resident,
        "hot": served - resident - len(loads),
        "miss": len(loads),
        "bytes": len(loads) * case.shape.row_bytes,
        "unreachable": sum(demand.elements.values()) - served,
    }
    _expect(counted == expected, case, f"counted {counted}, not {expected}")


def _copies_by_row(before: Inputs, loads: dict[Key, int]) -> dict[int, set[tuple[int, int]]]:
    """The copies that loads ask for, under the first batch row of their request."""
    copies: dict[int, set[tuple[int, int]]] = {}
    row_slot = before.row_slot.tolist()
    for (slot, position), hot_row in loads.items():
        host_row = before.physical_row(before.host, slot, position)
        copy = (host_row, before.physical_row(before.hot, slot, hot_row))
        copies.setdefault(row_slot.index(slot), set()).add(copy)
    return copies


def _planned(case: Case) -> dict[int, set[tuple[int, int]]]:
    """The copies in the plan, by batch row. Raises `ContractViolation` when one is there twice."""
    host_row, slab_row = ints(case.plan.host_row), ints(case.plan.slab_row)
    planned: dict[int, set[tuple[int, int]]] = {}
    for row, count in enumerate(ints(case.plan.count).tolist()):
        if count:
            planned[row] = set(zip(host_row[row, :count].tolist(), slab_row[row, :count].tolist(), strict=True))
            _expect(len(planned[row]) == count, case, f"row {row} of the plan repeats a copy")
    return planned


def _check_plan(case: Case, copies: dict[int, set[tuple[int, int]]]) -> None:
    planned = _planned(case)
    _expect(planned == copies, case, f"the plan is {planned}, not {copies}")


def _read(rows: PagedRows, physical_rows: list[int]) -> Bytes:
    """Bytes of rows, uint8 `[n, row_bytes]`, row by row and without the arithmetic of any back end."""
    layout = rows.layout
    starts = torch.tensor([layout.row_offset(row) for row in physical_rows], dtype=torch.int64)
    index = starts[:, None] + torch.arange(layout.row_bytes)
    return np.asarray(rows.storage[index.to(rows.storage.device)].cpu().numpy(), dtype=np.uint8)


def _bytes_of(storage: torch.Tensor) -> Bytes:
    return np.array(storage.cpu().numpy(), dtype=np.uint8)


def _expect(holds: bool, case: Case, message: str) -> None:
    if not holds:
        raise ContractViolation(f"{message}; {case!r}")
