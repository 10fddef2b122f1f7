"""The reference agrees with the naive resolver bit for bit, and the checker catches resolvers that are broken."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hisparse.errors import InvariantError
from hisparse.kernels import reference
from hisparse.kernels.contract import EMPTY, HotState, MissPlan, Resolver, Selection
from hisparse.kernels.reference import ReferenceResolver
from hisparse.kernels.row_copy import copy_rows
from hisparse.testing.resolver_cases import Case, CaseShape
from hisparse.testing.resolver_checker import ContractViolation, check_replay, check_resolve
from hisparse.testing.resolver_contract import on_host
from hisparse.testing.resolver_oracle import NaiveResolver
from hisparse.testing.resolver_random import random_shape, random_steps


@st.composite
def shapes(draw: st.DrawFn) -> CaseShape:
    topk = draw(st.integers(1, 12))
    num_layers = draw(st.integers(1, 3))
    return CaseShape(
        num_slots=draw(st.integers(1, 4)),
        max_tokens=draw(st.integers(1, 60)),
        block_size=draw(st.sampled_from([1, 2, 4, 16])),
        topk=topk,
        hot_rows=draw(st.integers(1, 3 * topk)),
        row_bytes=draw(st.sampled_from([16, 48, 128])),
        num_layers=num_layers,
        leader=draw(st.integers(0, num_layers - 1)),
    )


def one_step(resolver: Resolver, case: Case, selection: Selection, ended: list[int]) -> torch.Tensor:
    resolver.reset_slots(case.state, torch.tensor(ended, dtype=torch.int64))
    layer = case.shape.leader
    rows = resolver.resolve(
        selection, case.tables, case.state, case.source(layer), case.destination(layer), case.plan, case.counters
    )
    layers = range(case.shape.num_layers)
    sources, destinations = [case.source(layer) for layer in layers], [case.destination(layer) for layer in layers]
    resolver.replay_plan(case.plan, sources, destinations, case.counters)
    resolver.replay_plan(case.plan, sources[-1:], destinations[-1:], case.counters)
    return rows


def planned(case: Case) -> set[tuple[int, int]]:
    host_row, slab_row = case.plan.copies()
    return set(zip(host_row.tolist(), slab_row.tolist(), strict=True))


@settings(max_examples=60)
@given(shapes(), st.integers(0, 1 << 20))
def test_reference_and_naive_resolver_leave_the_same_bits(shape: CaseShape, seed: int) -> None:
    case, other = Case(shape, seed), Case(shape, seed)
    for (selection, ended), (same, _) in zip(random_steps(case, 6), random_steps(other, 6), strict=True):
        assert torch.equal(
            one_step(ReferenceResolver(), case, selection, ended), one_step(NaiveResolver(), other, same, ended)
        )
        for field in dataclasses.fields(HotState):
            assert torch.equal(getattr(case.state, field.name), getattr(other.state, field.name)), field.name
        assert case.counters.read() == other.counters.read()
        assert torch.equal(case.counters.status, other.counters.status)
        assert planned(case) == planned(other)
        assert torch.equal(case.slab, other.slab)


class CountCalls(TorchDispatchMode):
    """Counts the torch operators that are called inside it."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def calls_of(resolver: Resolver, num_slots: int, num_rows: int, topk: int) -> int:
    case = on_host(Case(CaseShape(num_slots=num_slots, max_tokens=64, topk=topk, hot_rows=64), 1))
    selection = case.select([(row % num_slots, range(row, row + topk)) for row in range(num_rows)])
    with CountCalls() as counter:
        one_step(resolver, case, selection, [])
    return counter.calls


def test_the_number_of_operators_does_not_grow_with_rows_slots_or_positions() -> None:
    assert calls_of(ReferenceResolver(), 2, 4, 2) == calls_of(ReferenceResolver(), 6, 48, 8) > 0


def test_the_operators_of_a_loop_over_rows_would_be_counted() -> None:
    assert calls_of(NaiveResolver(), 2, 4, 2) < calls_of(NaiveResolver(), 6, 48, 8)


def test_hot_rows_without_a_block_are_never_used() -> None:
    case = on_host(Case(CaseShape(max_tokens=64, hot_rows=24), 1))
    case.tables.hot[0, 0] = 0
    outcome = check_resolve(ReferenceResolver(), case, case.select([(0, range(8)), (0, range(8, 16)), (0, [20])]))
    assert sorted(outcome.loads.values()) == list(range(8, 24))
    assert outcome.counted["unreachable"] == 1


def test_a_batch_without_rows_changes_nothing() -> None:
    case = on_host(Case(CaseShape(), 1))
    outcome = check_resolve(ReferenceResolver(), case, case.select([]))
    assert outcome.rows.shape == (0, 8)
    assert not case.state.step.any()


def test_equally_old_victims_go_lowest_first_to_ascending_positions() -> None:
    case = on_host(Case(CaseShape(), 1))
    outcome = check_resolve(ReferenceResolver(), case, case.select([(0, [40, 3, 17])]))
    assert outcome.loads == {(0, 3): 0, (0, 17): 1, (0, 40): 2}


def test_what_the_plan_does_not_use_is_empty() -> None:
    case = on_host(Case(CaseShape(), 1))
    check_resolve(ReferenceResolver(), case, case.select([(0, range(8))]))
    check_resolve(ReferenceResolver(), case, case.select([(0, [8])]))
    assert case.plan.count.tolist() == [1] + [0] * (len(case.plan.count) - 1)
    assert (case.plan.host_row.flatten()[1:] == EMPTY).all()
    assert (case.plan.slab_row.flatten()[1:] == EMPTY).all()


def test_a_plan_that_is_too_short_is_refused_before_anything_is_copied() -> None:
    case = on_host(Case(CaseShape(), 1))
    case.plan = MissPlan.allocate(1, 7, "cpu")
    slab = case.slab.clone()
    with pytest.raises(InvariantError, match=r"1 rows of 7 copies cannot hold 1 rows of \[8\]"):
        one_step(ReferenceResolver(), case, case.select([(0, range(8))]), [])
    assert torch.equal(case.slab, slab)


def test_pages_of_two_sizes_are_refused() -> None:
    case, other = Case(CaseShape(block_size=8), 1), Case(CaseShape(block_size=4), 1)
    with pytest.raises(InvariantError, match="host pages of 4 rows do not match slab pages of 8"):
        ReferenceResolver().resolve(
            case.select([(0, [1])]),
            case.tables,
            case.state,
            other.source(0),
            case.destination(0),
            case.plan,
            case.counters,
        )


# Controls: what is broken below must be caught by the checker, and by it alone.


def run_sequences(resolver: Resolver) -> None:
    """Random sequences that hold an intact resolver to the contract (`test_an_intact_resolver_passes`)."""
    for seed in range(12):
        case = Case(random_shape(seed), seed)
        for selection, ended in random_steps(case, num_steps=12):
            resolver.reset_slots(case.state, torch.tensor(ended, dtype=torch.int64))
            check_resolve(resolver, case, selection)


Break = Callable[[pytest.MonkeyPatch], None]
_Request = reference._Request
intact_classify, intact_ages, intact_choose = reference._classify, reference._ages, reference._choose_victims
intact_count = reference._count


def evicts_what_the_step_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "_PINNED", 0)


def keeps_the_oldest_rows(patch: pytest.MonkeyPatch) -> None:
    def youngest_first(request: Any, slots: torch.Tensor) -> torch.Tensor:
        ages = intact_ages(request, slots)
        return torch.where(ages == reference._PINNED, ages, 1000 - ages)

    patch.setattr(reference, "_ages", youngest_first)


def forgets_to_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReferenceResolver, "reset_slots", lambda self, state, slots: None)


def trusts_the_inverse_map(patch: pytest.MonkeyPatch) -> None:
    def claimed(self: Any, slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        row = self.state.hot_row_of[slot, position].long()
        leased = self.slab_rows(self.tables.hot, slot, row.clamp(min=0)) != EMPTY
        return torch.where(leased, row, EMPTY)

    patch.setattr(_Request, "hot_rows", claimed)


def skips_the_last_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "copy_rows", lambda host, slab, *views: copy_rows(host[:-1], slab[:-1], *views))


def swaps_host_and_device_ids(patch: pytest.MonkeyPatch) -> None:
    def swapped(host: torch.Tensor, slab: torch.Tensor, source: Any, destination: Any) -> None:
        bound = min(source.layout.num_rows, destination.layout.num_rows)
        copy_rows(slab.clamp(max=bound - 1), host.clamp(max=bound - 1), source, destination)

    patch.setattr(reference, "copy_rows", swapped)


def reads_another_layer(patch: pytest.MonkeyPatch) -> None:
    def first_layer(host: torch.Tensor, slab: torch.Tensor, source: Any, destination: Any) -> None:
        layout = dataclasses.replace(source.layout, offset=0)
        copy_rows(host, slab, dataclasses.replace(source, layout=layout), destination)

    patch.setattr(reference, "copy_rows", first_layer)


def writes_one_row_too_many(patch: pytest.MonkeyPatch) -> None:
    def careless(host: torch.Tensor, slab: torch.Tensor, source: Any, destination: Any) -> None:
        copy_rows(host, slab, source, destination)
        destination.storage[destination.layout.row_offset(0)] = 0

    patch.setattr(reference, "copy_rows", careless)


def resolves_padding(patch: pytest.MonkeyPatch) -> None:
    def unmasked(request: Any, selection: Selection) -> Any:
        return intact_classify(request, Selection(selection.positions, selection.row_slot.clamp(min=0)))

    patch.setattr(reference, "_classify", unmasked)


def does_not_touch_hits(patch: pytest.MonkeyPatch) -> None:
    def untouched(request: Any, union: Any) -> Any:
        stamp = request.state.stamp.clone()
        loads = intact_choose(request, union)
        request.state.stamp.copy_(stamp)
        return loads

    patch.setattr(reference, "_choose_victims", untouched)


def hides_an_overflow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "STATUS_UNION_OVERFLOW", 0)


def leaves_the_plan_of_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "_record_plan", lambda plan, row_slot, loads, slab_row: None)


def counts_loaded_rows_as_hot(patch: pytest.MonkeyPatch) -> None:
    def generous(counters: Any, classified: Any, rows: torch.Tensor, loads: Any, row_bytes: int) -> None:
        intact_count(counters, classified, rows, loads, row_bytes)
        counters.totals[1] += loads.slot.numel()

    patch.setattr(reference, "_count", generous)


def test_an_intact_resolver_passes() -> None:
    run_sequences(ReferenceResolver())


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (evicts_what_the_step_reads, r"evicted|loads"),
        (keeps_the_oldest_rows, "kept one of step"),
        (forgets_to_reset, "wrong bytes"),
        (trusts_the_inverse_map, "loads, not|not missed|gives"),
        (skips_the_last_copy, "bytes of its host row"),
        (swaps_host_and_device_ids, "bytes of its host row"),
        (reads_another_layer, "bytes of its host row"),
        (writes_one_row_too_many, "bytes changed that no copy names"),
        (resolves_padding, "not missed|gives"),
        (does_not_touch_hits, "stamps are wrong"),
        (hides_an_overflow, "status is not 1"),
        (leaves_the_plan_of_before, "the plan"),
        (counts_loaded_rows_as_hot, "counted"),
    ],
)
def test_a_broken_resolver_is_caught(break_it: Break, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with pytest.raises(ContractViolation, match=complaint):
        run_sequences(ReferenceResolver())


class DropsTheLastFollower(ReferenceResolver):
    def replay_plan(self, plan: MissPlan, sources: Any, destinations: Any, counters: Any) -> None:
        super().replay_plan(plan, sources[:-1], destinations[:-1], counters)


class MixesUpFollowers(ReferenceResolver):
    def replay_plan(self, plan: MissPlan, sources: Any, destinations: Any, counters: Any) -> None:
        super().replay_plan(plan, sources[::-1], destinations, counters)


class CountsOneFollower(ReferenceResolver):
    def replay_plan(self, plan: MissPlan, sources: Any, destinations: Any, counters: Any) -> None:
        totals = counters.totals.clone()
        super().replay_plan(plan, sources, destinations, counters)
        counters.totals.copy_(totals)
        counters.totals[3] += len(plan.copies()[0]) * sources[0].layout.row_bytes


class ReplaysIntoTheLeader(ReferenceResolver):
    def replay_plan(self, plan: MissPlan, sources: Any, destinations: Any, counters: Any) -> None:
        super().replay_plan(plan, sources, destinations, counters)
        layout = dataclasses.replace(destinations[0].layout, offset=0)
        copy_rows(*plan.copies(), sources[0], dataclasses.replace(destinations[0], layout=layout))


@pytest.mark.parametrize(
    ("resolver", "complaint"),
    [
        (ReferenceResolver(), None),
        (DropsTheLastFollower(), "layer 3: a copied row does not have the bytes of its host row"),
        (MixesUpFollowers(), "layer 1: a copied row does not have the bytes of its host row"),
        (CountsOneFollower(), "replay counted"),
        (ReplaysIntoTheLeader(), "bytes changed that no copy names"),
    ],
)
def test_followers_that_are_not_served_together_as_the_contract_says_are_caught(
    resolver: Resolver, complaint: str | None
) -> None:
    case = on_host(Case(CaseShape(num_layers=4, leader=0), 1))
    outcome = check_resolve(resolver, case, case.select([(slot, range(8)) for slot in range(4)]))
    if complaint is None:
        check_replay(resolver, case, outcome, 1, 2, 3)
        return
    with pytest.raises(ContractViolation, match=complaint):
        check_replay(resolver, case, outcome, 1, 2, 3)
