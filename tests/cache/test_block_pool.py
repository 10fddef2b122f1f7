"""The block pool beside a naive model of it: lists, a dict, and no cleverness."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from hisparse.cache.block_pool import BlockPool
from hisparse.errors import InvariantError


class NaivePool:
    """`leases[b]`, the key of each block, and one list of free blocks with content, least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self.leases = dict.fromkeys(range(1, num_blocks), 0)
        self.key_of: dict[int, bytes] = {}
        self.cached: list[int] = []

    def num_free(self) -> int:
        return sum(count == 0 for count in self.leases.values())

    def check_allocated(self, blocks: list[int]) -> None:
        """Blocks without content go first; of the others, those unused for longest."""
        empty = [block for block, count in self.leases.items() if not count and block not in self.cached]
        num_evicted = max(0, len(blocks) - len(empty))
        evicted = set(self.cached[:num_evicted])
        assert {block for block in blocks if block in self.cached} == evicted
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            assert self.leases[block] == 0
            self.leases[block] = 1
            self.key_of.pop(block, None)
        self.cached = [block for block in self.cached if block not in evicted]

    def lookup(self, key: bytes) -> int | None:
        return next((block for block, known in self.key_of.items() if known == key), None)


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class PoolMachine(RuleBasedStateMachine):
    leased = Bundle("leased")

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool: BlockPool[int] = BlockPool(num_blocks, "test")
        self.naive = NaivePool(num_blocks)

    @rule(target=leased, count=st.integers(0, 6))
    def allocate(self, count: int) -> tuple[int, ...]:
        if count > self.naive.num_free():
            with pytest.raises(InvariantError, match="free"):
                self.pool.allocate(count)
            return ()
        blocks = self.pool.allocate(count)
        self.naive.check_allocated(blocks)
        return tuple(blocks)

    @rule(blocks=consumes(leased))
    def release(self, blocks: tuple[int, ...]) -> None:
        self.pool.release(blocks)
        for block in blocks:
            self.naive.leases[block] -= 1
        for block in reversed(blocks):
            if self.naive.leases[block] == 0 and block in self.naive.key_of:
                self.naive.cached.append(block)

    @rule(blocks=leased, number=st.integers(0, 5))
    def publish(self, blocks: tuple[int, ...], number: int) -> None:
        key = bytes([number]) * 16
        for block in blocks[:1]:
            if self.naive.leases[block] == 0:
                with pytest.raises(InvariantError, match="not leased"):
                    self.pool.publish(block, key)
            elif self.naive.key_of.get(block, key) != key:
                with pytest.raises(InvariantError, match="another key"):
                    self.pool.publish(block, key)
            elif self.naive.lookup(key) in (None, block):
                assert self.pool.publish(block, key)
                self.naive.key_of[block] = key
            else:
                assert not self.pool.publish(block, key)

    @rule(target=leased, number=st.integers(0, 5))
    def claim(self, number: int) -> tuple[int, ...]:
        key = bytes([number]) * 16
        block = self.pool.lookup(key)
        assert block == self.naive.lookup(key)
        if block is None:
            return ()
        self.pool.lease(block)
        self.naive.leases[block] += 1
        self.naive.cached = [other for other in self.naive.cached if other != block]
        return (block,)

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()
        self.naive.key_of.clear()
        self.naive.cached.clear()

    @invariant()
    def same(self) -> None:
        self.pool.assert_invariants()
        assert self.pool.num_free == self.naive.num_free()
        assert self.pool.num_leased + self.pool.num_free == self.pool.num_usable
        for block, count in self.naive.leases.items():
            assert self.pool.leases(block) == count


TestPool = PoolMachine.TestCase


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool: BlockPool[int] = BlockPool(5, "test")
    blocks = pool.allocate(4)
    for number, block in enumerate(blocks):
        pool.publish(block, bytes([number]))
    pool.release(blocks)
    pool.allocate(1)
    assert pool.longest_prefix([bytes([number]) for number in range(4)]) == 3


def test_a_block_that_is_handed_to_somebody_else_is_found_no_more() -> None:
    """Its former reader loses it in the call that lends it, which is before anything can be written."""
    pool: BlockPool[int] = BlockPool(4, "test")
    blocks = pool.allocate(3)
    keys = [bytes([number]) for number in range(3)]
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.lookup_all(keys) == blocks
    (taken,) = pool.allocate(1)
    assert [pool.lookup(key) for key in keys] == [block if block != taken else None for block in blocks]
    assert pool.lookup_all(keys) == [block if block != taken else 0 for block in blocks]


def test_free_blocks_are_counted_once_each_and_null_blocks_not() -> None:
    pool: BlockPool[int] = BlockPool(6, "test")
    blocks = pool.allocate(4)
    pool.release(blocks[1:3])
    expected = (([], 0), ([0], 0), ([0, 0], 0), (blocks[:2], 1), (blocks, 2), ([0, *blocks, 0], 2))
    for some, count in expected:
        assert pool.count_free(some) == count


def test_the_null_block_is_never_given_out_or_taken_back() -> None:
    pool: BlockPool[int] = BlockPool(4, "test")
    assert 0 not in pool.allocate(3)
    with pytest.raises(InvariantError, match="block 0"):
        pool.release([0])


def test_a_free_block_without_content_cannot_be_claimed() -> None:
    pool: BlockPool[int] = BlockPool(4, "test")
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(InvariantError, match="cannot be claimed"):
        pool.lease(blocks[0])


def test_ending_a_lease_twice_is_caught() -> None:
    pool: BlockPool[int] = BlockPool(4, "test")
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(InvariantError, match="no lease"):
        pool.release(blocks)


@pytest.mark.parametrize("damage", ["leases", "key", "twice"])
def test_damage_is_found_by_the_invariants(damage: str) -> None:
    pool: BlockPool[int] = BlockPool(6, "test")
    first, second = pool.allocate(2)
    pool.publish(first, b"key")
    pool.assert_invariants()
    if damage == "leases":
        pool._leases[second] = 0
    elif damage == "key":
        pool._block_of[b"key"] = second
    else:
        pool.release([second])
        pool._blank.append(second)
    with pytest.raises(InvariantError):
        pool.assert_invariants()
