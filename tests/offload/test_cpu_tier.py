"""Blocks of the region and the chunks in them: misuse is caught, and damage is found."""

from collections.abc import Callable

import pytest

from hisparse.errors import InvariantError
from hisparse.offload.cpu_tier import CpuTier, Entry, EntryState
from hisparse.offload.policies import LRUPolicy


def tier(num_blocks: int = 2) -> CpuTier:
    return CpuTier(num_blocks, LRUPolicy(num_blocks))


def reserve(cpu: CpuTier, key: bytes) -> Entry:
    entry = cpu.reserve(key, lambda entry: True)
    assert entry is not None
    return entry


def test_a_withdrawn_chunk_keeps_its_block_until_nobody_needs_it_while_its_key_may_come_anew() -> None:
    cpu = tier()
    first = reserve(cpu, b"a")
    cpu.commit(first)
    cpu.pin(first)
    cpu.drop(first)
    cpu.drop(first)
    second = reserve(cpu, b"a")
    assert second.block != first.block
    assert cpu.num_free == 0
    cpu.unpin(first)
    assert cpu.num_free == 1
    assert cpu.get(b"a") is second
    cpu.assert_invariants()


def test_misuse_is_caught() -> None:
    cpu = tier()
    entry = reserve(cpu, b"a")
    with pytest.raises(InvariantError, match="reserved twice"):
        reserve(cpu, b"a")
    with pytest.raises(InvariantError, match="coming with 1 references"):
        cpu.evict(entry)
    cpu.commit(entry)
    with pytest.raises(InvariantError, match="ended twice"):
        cpu.unpin(entry)
    cpu.evict(entry)
    with pytest.raises(InvariantError, match="withdrawn"):
        cpu.pin(entry)
    with pytest.raises(InvariantError, match="holds nothing"):
        CpuTier(0, LRUPolicy(0))
    cpu.assert_invariants()


def damage_block(cpu: CpuTier, entry: Entry) -> None:
    entry.block = cpu._free[0]


def damage_state(cpu: CpuTier, entry: Entry) -> None:
    entry.state = EntryState.COMING


def damage_policy(cpu: CpuTier, entry: Entry) -> None:
    cpu.policy.insert(b"z")


def damage_key(cpu: CpuTier, entry: Entry) -> None:
    entry.key = b"b"


def damage_withdrawal(cpu: CpuTier, entry: Entry) -> None:
    cpu.pin(entry)
    cpu.drop(entry)
    entry.references = 0


def damage_idle(cpu: CpuTier, entry: Entry) -> None:
    entry.references = 1


def damage_ahead(cpu: CpuTier, entry: Entry) -> None:
    entry.is_ahead = True


DAMAGE = [damage_block, damage_state, damage_policy, damage_key, damage_withdrawal, damage_idle, damage_ahead]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_by_the_invariants(damage: Callable[[CpuTier, Entry], None]) -> None:
    cpu = tier()
    entry = reserve(cpu, b"a")
    cpu.commit(entry)
    cpu.assert_invariants()
    damage(cpu, entry)
    with pytest.raises(InvariantError):
        cpu.assert_invariants()
