"""Marks on leases beside a naive model, in which every block has a list of its leases."""

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hisparse.cache import SlabPool
from hisparse.errors import InvariantError
from hisparse.protocol import DeviceBlockId

HOLDERS = [1, 2, 4, 1 << 70]


@dataclass(eq=False)
class Lease:
    """One lease: of a holder, or, with 0, of a copy. `mark`: "", "offered" or "leaving"."""

    block: DeviceBlockId
    holder: int
    mark: str = ""


@settings(max_examples=80, stateful_step_count=50, deadline=None)
class SlabMachine(RuleBasedStateMachine):
    """Holders take blocks, share them, and say what they would give up; copies come and go."""

    @initialize(num_blocks=st.integers(2, 7))
    def start(self, num_blocks: int) -> None:
        self.pool = SlabPool(num_blocks, "test")
        self.leases: list[Lease] = []
        self.priced: set[int] = set()

    @rule(holder=st.sampled_from(HOLDERS))
    def price(self, holder: int) -> None:
        self.pool.price(holder)
        self.priced.add(holder)

    @rule(holder=st.sampled_from(HOLDERS))
    def settle(self, holder: int) -> None:
        self.pool.settle(holder)
        self.priced.discard(holder)

    def _of(self, block: DeviceBlockId) -> list[Lease]:
        return [lease for lease in self.leases if lease.block == block]

    def _pick(self, data: st.DataObject, mark: str | None = None, has_holder: bool = True) -> Lease | None:
        fitting = [lease for lease in self.leases if mark in (None, lease.mark) and (lease.holder or not has_holder)]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    @rule(holder=st.sampled_from(HOLDERS))
    @precondition(lambda self: self.pool.num_free)
    def allocate(self, holder: int) -> None:
        (block,) = self.pool.allocate(1)
        self.leases.append(Lease(block, holder))

    @rule(data=st.data(), holder=st.sampled_from([0, *HOLDERS]))
    def share(self, data: st.DataObject, holder: int) -> None:
        """Whatever the other leases are marked as. A holder has one lease of a block."""
        lease = self._pick(data, has_holder=False)
        if lease is not None and (not holder or holder not in [other.holder for other in self._of(lease.block)]):
            self.pool.lease(lease.block)
            self.leases.append(Lease(lease.block, holder))

    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        if (lease := self._pick(data, "")) is not None:
            self.pool.offer([lease.block], lease.holder)
            lease.mark = "offered"

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if (lease := self._pick(data, "offered")) is not None:
            self.pool.withdraw([lease.block], lease.holder)
            lease.mark = ""

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """All leases of a block at once, or an error where one is kept."""
        lease = self._pick(data)
        if lease is None:
            return
        sharers = self._of(lease.block)
        if all(each.mark == "offered" for each in sharers):
            self.pool.give_up(lease.block)
            for each in sharers:
                each.mark = "leaving"
        else:
            with pytest.raises(InvariantError, match=f"block {lease.block} has {len(sharers)} leases"):
                self.pool.give_up(lease.block)

    @rule(data=st.data())
    def mark_leaving(self, data: st.DataObject) -> None:
        if (lease := self._pick(data, "", has_holder=False)) is not None:
            self.pool.mark_leaving(lease.block)
            lease.mark = "leaving"

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Any lease, whose mark goes first."""
        lease = self._pick(data, has_holder=False)
        if lease is None:
            return
        if lease.mark == "offered":
            self.pool.withdraw([lease.block], lease.holder)
        elif lease.mark == "leaving":
            self.pool.unmark_leaving(lease.block)
        self.pool.release([lease.block])
        self.leases.remove(lease)

    @invariant()
    def blocks_are_counted_by_those_without_whom_they_stay(self) -> None:
        offers: Counter[int] = Counter()
        num_leaving = 0
        places: dict[int, list[int]] = {}
        for number in range(self.pool.num_blocks):
            leases = self._of(DeviceBlockId(number))
            assert self.pool.leases(DeviceBlockId(number)) == len(leases)
            marks = {lease.mark for lease in leases}
            assert self.pool.num_kept(DeviceBlockId(number)) == sum(not lease.mark for lease in leases)
            num_leaving += marks == {"leaving"}
            if marks == {"offered"}:
                holders = sum(lease.holder for lease in leases)
                offers[holders] += 1
                places.setdefault(holders, []).append(number)
        assert self.pool.offers == offers
        assert self.pool.priced_offers == {
            holders: num for holders, num in offers.items() if any(holder & holders for holder in self.priced)
        }
        assert self.pool.num_leaving == num_leaving
        for holders, found in places.items():
            assert self.pool.find_offers(range(self.pool.num_blocks), holders, 99) == found
            assert self.pool.find_offers(range(self.pool.num_blocks), holders, 1) == found[:1]
        self.pool.assert_invariants()


TestSlab = SlabMachine.TestCase


def test_those_who_were_first_to_have_something_to_give_come_first() -> None:
    pool = SlabPool(9, "test")
    blocks = pool.allocate(4)
    pool.offer(blocks[:1], 4)
    pool.offer(blocks[1:3], 1)
    pool.offer(blocks[3:], 2)
    assert list(pool.offers) == [4, 1, 2]
    pool.withdraw(blocks[:1], 4)
    pool.withdraw(blocks[1:2], 1)
    pool.offer(blocks[:1], 4)
    assert list(pool.offers) == [1, 2, 4]


@pytest.mark.parametrize("num_blocks", [511, 512, 513, 1100])
def test_a_search_finds_the_same_wherever_it_pauses(num_blocks: int) -> None:
    pool = SlabPool(num_blocks + 1, "test")
    blocks = pool.allocate(num_blocks)
    ours = {at for at in range(num_blocks) if at % 3 == 0 or at > num_blocks - 5}
    pool.offer([blocks[at] for at in ours], 2)
    pool.offer([blocks[at] for at in range(num_blocks) if at not in ours], 1)
    pool.lease(blocks[3])
    expected = sorted(ours - {3})
    assert pool.find_offers(blocks, 2, num_blocks) == expected
    assert pool.find_offers(blocks, 2, 7) == expected[:7]
    assert pool.find_offers(blocks, 8, 7) == []


def test_no_lease_is_marked_twice_or_ends_marked() -> None:
    pool = SlabPool(4, "test")
    one, other = pool.allocate(2)
    pool.offer([one], 1)
    for again in (1, 2):
        with pytest.raises(InvariantError, match=f"no lease of block {one} is left"):
            pool.offer([one], again)
    with pytest.raises(InvariantError, match="has 1 leases, 1 of them leaving"):
        pool.mark_leaving(one)
    with pytest.raises(InvariantError, match=f"has not offered block {other}"):
        pool.withdraw([other], 1)
    with pytest.raises(InvariantError, match=f"no lease of block {other} is leaving"):
        pool.unmark_leaving(other)
    with pytest.raises(InvariantError, match=f"block {one} lost a lease and has 0"):
        pool.release([one])


@pytest.mark.parametrize("damage", ["offers", "leaving", "mark", "price"])
def test_damage_is_found_by_the_invariants(damage: str) -> None:
    pool = SlabPool(4, "test")
    one, other = pool.allocate(2)
    pool.offer([one], 1)
    pool.mark_leaving(other)
    pool.assert_invariants()
    if damage == "offers":
        pool.free_offers[1] += 1
    elif damage == "leaving":
        pool.num_leaving = 0
    elif damage == "price":
        pool.priced = 1
    else:
        pool._leaving[one] = 1
    with pytest.raises(InvariantError):
        pool.assert_invariants()
