"""A coordinator whose requests share what they can, in any order of calls and reports, beside a model of every page."""

import random
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hisparse.cache import BlockPool, SlabPool
from hisparse.config import WriteBack
from hisparse.errors import InvariantError
from hisparse.protocol import DeviceBlockId, Direction, HostBlockId, SparseKVPageTransfer
from hisparse.residency import HiSparseCoordinator, PageState, Pin, RequestPages
from hisparse.residency.page_moves import PageMoves
from hisparse.residency.transactions import Transaction
from tests.residency.world import BLOCK_SIZE, World

SLOTS = range(4)


def text(branch: int, num_pages: int) -> "array[int]":
    """Texts of all branches begin with the same four pages, those of two neighbours with the same six."""
    tokens = []
    for page in range(num_pages):
        what = 0 if page < 4 else 1 + branch // 2 if page < 6 else 10 + branch
        tokens += [100 * what + page] * BLOCK_SIZE
    return array("i", [*tokens, -1])


class SharingMachine(RuleBasedStateMachine):
    """Workers on paper: a block holds the key of its page, and a copy carries it over when it is in the stream."""

    @initialize(
        device=st.integers(9, 34),
        host=st.integers(2, 40),
        write_back=st.sampled_from([WriteBack.PRESSURE, WriteBack.EAGER]),
        num_workers=st.integers(1, 2),
    )
    def start(self, device: int, host: int, write_back: WriteBack, num_workers: int) -> None:
        self.world = World(device, host, write_back, num_workers)
        self.num_workers = num_workers
        self.on_device: dict[int, bytes] = {}
        self.on_host: dict[int, bytes] = {}
        self.enqueued: list[list[SparseKVPageTransfer]] = [[] for _ in range(num_workers)]
        self.taken: list[list[SparseKVPageTransfer]] = [[] for _ in range(num_workers)]
        self.pins: list[Pin] = []

    @property
    def coordinator(self) -> HiSparseCoordinator:
        return self.world.coordinator

    def _running(self) -> list[str]:
        return [f"r{slot}" for slot in SLOTS if f"r{slot}" in self.coordinator._requests]

    @rule(slot=st.sampled_from(SLOTS), branch=st.integers(0, 3), pages=st.integers(1, 9), small=st.booleans())
    def come(self, slot: int, branch: int, pages: int, small: bool) -> None:
        """A request with as much of its text as a hit gives."""
        name, world = f"r{slot}", self.world
        tokens = text(branch, pages)
        hit = self.coordinator.find_prefix(self.coordinator.prefix_keys(tokens))
        if name in self._running() or hit.num_free_adopted > world.kv.slab.num_free:
            return
        world.kv.add(name, slot)
        self.coordinator.add(name, slot, tokens, may_spill=not small or any(hit.host))
        self.coordinator.adopt_prefix(name, hit)

    @rule(slot=st.sampled_from(SLOTS), pages=st.integers(1, 4))
    def compute(self, slot: int, pages: int) -> None:
        """As many of its next pages as there are blocks for."""
        name, kv = f"r{slot}", self.world.kv
        if name not in self._running():
            return
        records = self.coordinator.pages(name)
        first = records.num_sealed
        last = min(first + pages, len(records.tokens) // BLOCK_SIZE)
        if kv.grow(name, last).granted and last > first:
            self.coordinator.seal(name, last * BLOCK_SIZE)
            for page in range(first, last):
                self.on_device[kv.resident.blocks(name)[page]] = records.keys[page]

    @rule(slot=st.sampled_from(SLOTS))
    def read_from_host(self, slot: int) -> None:
        if f"r{slot}" in self._running():
            self.world.kv.take_hot(f"r{slot}")

    @rule(slot=st.sampled_from(SLOTS))
    def go(self, slot: int) -> None:
        if f"r{slot}" in self._running():
            self.coordinator.remove(f"r{slot}")

    @rule(num_blocks=st.integers(1, 12))
    def reclaim(self, num_blocks: int) -> None:
        """What is promised is there to be had, and what is given is on its way."""
        before = self.coordinator.num_reclaimable()
        hot = {name for name in self._running() if self._needs_hot(name)}
        given = self.coordinator.reclaim(num_blocks)
        assert given == self.coordinator.blocks_on_their_way
        newly = {name for name in self._running() if self._is_backed(name)} & hot
        net = given - len(newly) * self.world.plan.hot_blocks
        # Where nothing was promised, pages may go whose hot leases only pay with what is yet to be computed.
        assert net >= min(num_blocks, before) or not before

    def _is_backed(self, name: str) -> bool:
        return bool(self.coordinator.pages(name).num_host_backed)

    def _needs_hot(self, name: str) -> bool:
        return not self._is_backed(name) and not self.world.kv.hot.holds(name)

    @rule(slot=st.sampled_from(SLOTS), max_pages=st.integers(1, 6))
    def restore(self, slot: int, max_pages: int) -> None:
        if f"r{slot}" in self._running():
            self.coordinator.restore(f"r{slot}", max_pages)

    @rule(slot=st.sampled_from(SLOTS), page=st.integers(0, 8))
    def pin(self, slot: int, page: int) -> None:
        """A copy to below reads one page."""
        if f"r{slot}" in self._running():
            table = self.world.kv.resident.blocks(f"r{slot}")
            if page < len(table) and table[page]:
                self.pins.append(self.coordinator.arrivals.pin((DeviceBlockId(table[page]),), ()))

    @rule()
    def unpin(self) -> None:
        if self.pins:
            self.coordinator.arrivals.unpin(self.pins.pop(0))

    @rule()
    def forget(self) -> None:
        self.coordinator.forget_content()

    @rule()
    def command(self) -> None:
        """The next command: its copies are made in this order, and each worker will say so sooner or later."""
        for transfer in self.world.take():
            for copy in transfer.copies:
                if transfer.direction is Direction.DEVICE_TO_HOST:
                    self.on_host[copy.host_block] = self.on_device[copy.device_block]
                else:
                    self.on_device[copy.device_block] = self.on_host[copy.host_block]
            for worker in range(self.num_workers):
                self.taken[worker].append(transfer)

    @rule(worker=st.integers(0, 1), complete=st.booleans())
    def report(self, worker: int, complete: bool) -> None:
        worker %= self.num_workers
        queue = self.enqueued[worker] if complete else self.taken[worker]
        if not queue:
            return
        transfer = queue.pop(0)
        if complete:
            self.world.report(completed=[transfer], worker=worker)
        else:
            self.world.report(enqueued=[transfer], worker=worker)
            self.enqueued[worker].append(transfer)

    @rule()
    def settle(self) -> None:
        """When all that was begun takes effect, as many blocks are free as were said to be on their way."""
        expected = self.world.kv.slab.num_free + self.coordinator.blocks_on_their_way
        self.command()
        for worker in range(self.num_workers):
            while self.taken[worker]:
                self.report(worker, complete=False)
        restored = sum(
            len(transfer.copies)
            for transfer in {id(each): each for queue in self.enqueued for each in queue}.values()
            if transfer.direction is Direction.HOST_TO_DEVICE and self._is_ownerless(transfer)
        )
        assert expected <= self.world.kv.slab.num_free <= expected + restored
        assert self.coordinator.blocks_on_their_way == 0

    def _is_ownerless(self, transfer: SparseKVPageTransfer) -> bool:
        """Whether the request that its pages were brought back for is gone, so that their blocks come free too."""
        open_ones = {each.transfer.transfer_id: each for each in self.coordinator._transactions.open()}
        return not open_ones[transfer.transfer_id].owners

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "world"):
            self.coordinator.assert_invariants()
            self._check_reclaimable()

    def _check_reclaimable(self) -> None:
        """Counted block by block: every lease is a page of somebody who could spill it."""
        slab, num_blocks = self.world.kv.slab, 0
        pinned = {block for pin in self.pins for block in pin.slab}
        held: dict[int, list[bool]] = {}
        for name in self._running():
            records = self.coordinator.pages(name)
            for page, block in enumerate(self.world.kv.resident.blocks(name)):
                is_sealed = page < records.num_sealed
                may_leave = is_sealed and records.may_spill and page not in records.in_flight
                may_leave = may_leave and records.state[page] == PageState.RESIDENT
                if block:
                    held.setdefault(block, []).append(may_leave)
        for block, leases in held.items():
            num_blocks += all(leases) and block not in pinned and slab.leases(DeviceBlockId(block)) == len(leases)
        assert sum(slab.offers.values()) == num_blocks
        assert self.coordinator.num_reclaimable() <= num_blocks + self.coordinator.blocks_on_their_way

    @invariant()
    def every_page_is_where_its_records_say(self) -> None:
        if not hasattr(self, "world"):
            return
        for name in self._running():
            records, table = self.coordinator.pages(name), self.world.kv.resident.blocks(name)
            for page, key in enumerate(records.keys[: records.num_sealed]):
                if table[page]:
                    is_there = self.on_device[table[page]] == key
                else:
                    is_there = self.on_host[records.host[page]] == key
                assert is_there, f"page {page} of {name} is {PageState(records.state[page]).name} and holds another"

    def teardown(self) -> None:
        """When all are gone and every copy has ended, nothing is leased."""
        if not hasattr(self, "world"):
            return
        for name in self._running():
            self.coordinator.remove(name)
        while self.pins:
            self.unpin()
        self.settle()
        for worker in range(self.num_workers):
            while self.enqueued[worker]:
                self.report(worker, complete=True)
        self.coordinator.assert_invariants()
        assert self.coordinator.num_in_flight == self.coordinator.host_pool.num_leased == 0
        assert self.world.kv.slab.num_leased == len(self.world.kv.staging)
        assert not self.world.kv.slab.offers


TestSharing = SharingMachine.TestCase
TestSharing.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


# The same without hypothesis, sound and with one rule of the house broken.


def churn(seed: int, num_ops: int = 400) -> SharingMachine:
    """Calls in an order that a seed decides. Returns the machine, at rest."""
    rng = random.Random(seed)
    machine = SharingMachine()
    machine.start(rng.choice([14, 18, 30]), rng.choice([12, 40]), WriteBack.PRESSURE, rng.choice([1, 2]))
    for _ in range(num_ops):
        slot = rng.choice(SLOTS)
        match rng.randrange(9):
            case 0:
                machine.come(slot, rng.randrange(4), rng.randint(5, 9), small=rng.random() < 0.1)
            case 1 | 2:
                machine.compute(slot, 4)
            case 3:
                machine.reclaim(rng.randint(1, 8))
            case 4:
                machine.read_from_host(slot)
            case 5:
                machine.restore(slot, 3)
            case 6:
                machine.command()
            case 7:
                machine.report(rng.randrange(2), complete=rng.random() < 0.5)
            case _:
                rare = [machine.settle, partial(machine.go, slot), partial(machine.pin, slot, 1), machine.unpin]
                rng.choice(rare)()
        machine.laws_hold()
        machine.every_page_is_where_its_records_say()
    machine.teardown()
    return machine


def test_the_churn_reaches_every_kind_of_move(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, num_owners = PageMoves._begin, Counter[int]()

    def counting(self: PageMoves, owners: list[RequestPages], *rest: Any) -> None:
        num_owners[len(owners)] += 1
        sound(self, owners, *rest)

    monkeypatch.setattr(PageMoves, "_begin", counting)
    totals = [churn(seed).coordinator.totals for seed in range(24)]
    assert num_owners[2] > 10
    assert num_owners[3] + num_owners[4] > 5
    assert sum(total.shared_spills for total in totals) > 100
    assert sum(total.restores for total in totals) > 50
    assert sum(total.adopted_restores for total in totals) > 10


def _count_what_others_still_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlabPool, "lease", BlockPool.lease)
    patch.setattr(SlabPool, "lease_all", BlockPool.lease_all)


def _forget_the_lease_of_a_sharer(patch: pytest.MonkeyPatch) -> None:
    """All sharers but the first share the host block without a lease on it."""
    sound = PageMoves._spill

    def broken(self: PageMoves, holders: int, limit: int) -> int:
        given = sound(self, holders, limit)
        owners = [owner for holder, owner in self._by_holder.items() if holder & holders]
        for owner in owners[1:]:
            for page in owner.in_flight:
                if owner.state[page] == PageState.SPILLING:
                    self.host_pool.release([HostBlockId(owner.host[page])])
        return given

    patch.setattr(HiSparseCoordinator, "_spill", broken)


def _leave_a_sharer_behind(patch: pytest.MonkeyPatch) -> None:
    """When a copy is in the stream, the last sharer goes on reading the block."""
    sound = PageMoves._spill_enqueued

    def broken(self: PageMoves, transaction: Transaction) -> None:
        if len(transaction.owners) > 1:
            transaction.owners.pop()
        sound(self, transaction)

    patch.setattr(HiSparseCoordinator, "_spill_enqueued", broken)


@pytest.mark.parametrize(
    "damage",
    [
        _count_what_others_still_lease,
        _forget_the_lease_of_a_sharer,
        _leave_a_sharer_behind,
    ],
)
def test_control_a_broken_rule_is_caught(damage: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        with pytest.raises((AssertionError, InvariantError)):
            list(map(churn, range(12)))
