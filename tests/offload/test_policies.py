"""Eviction policies: that each keeps its own order, and what the better one gains on prompts like a server's."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hisparse.errors import InputError, InvariantError
from hisparse.offload.policies import (
    MAX_ASKED,
    MAX_PREFERRED,
    POLICIES,
    ARCPolicy,
    EvictionPolicy,
    LRUPolicy,
    make_policy,
)
from tests.offload.traces import hit_rate, prompts

KEYS = [bytes([number]) for number in range(12)]
POLICY = pytest.mark.parametrize("make", [LRUPolicy, ARCPolicy])


def anything(_: bytes) -> bool:
    return True


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("capacity", [200, 800])
def test_arc_hits_a_third_more_than_lru_where_documents_are_read_once(capacity: int, seed: int) -> None:
    trace = list(prompts(600, seed))
    assert hit_rate(ARCPolicy, capacity, trace) > 1.33 * hit_rate(LRUPolicy, capacity, trace)


def test_control_on_recency_alone_arc_gains_nothing() -> None:
    # Every prompt is sent twice in a row, so all that a policy can know is what was sent last.
    trace = [prompt for prompt in list(prompts(100, seed=3)) for _ in range(2)]
    fits = max(map(len, trace))
    assert hit_rate(ARCPolicy, fits, trace) < 1.1 * hit_rate(LRUPolicy, fits, trace)


def test_a_tier_that_holds_everything_hits_the_same_with_any_policy() -> None:
    trace = list(prompts(100, seed=4))
    everything = len({key for prompt in trace for key in prompt})
    assert hit_rate(ARCPolicy, everything, trace) == hit_rate(LRUPolicy, everything, trace) > 0


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["use", "discard", "refresh"]), st.sampled_from(KEYS)), max_size=80),
    capacity=st.integers(1, 6),
    pinned=st.frozensets(st.sampled_from(KEYS), max_size=4),
)
def test_lru_is_a_list_by_last_use(steps: list[tuple[str, bytes]], capacity: int, pinned: frozenset[bytes]) -> None:
    policy, naive = LRUPolicy(capacity), list[bytes]()
    for what, key in steps:
        if what == "discard":
            policy.discard(key)
            naive = [other for other in naive if other != key]
        elif key in naive:
            policy.use(key) if what == "use" else policy.refresh([key])
            naive = [*(other for other in naive if other != key), key]
        else:
            if len(naive) == capacity:
                victim = next((other for other in naive if other not in pinned), None)
                assert policy.evict(lambda key: key not in pinned) == victim
                # What stood in its way is in use, and so young.
                passed = naive[: len(naive) if victim is None else naive.index(victim)]
                naive = [*naive[len(passed) :], *passed]
                if victim is None:
                    continue
                naive.remove(victim)
            policy.insert(key)
            naive.append(key)
        policy.assert_invariants()
        assert [key for key in KEYS if key in policy] == sorted(naive)
        assert list(policy) == naive


@POLICY
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_policy_holds_what_was_inserted_and_gives_up_only_what_may_go(
    make: Callable[[int], EvictionPolicy], data: st.DataObject
) -> None:
    capacity = data.draw(st.integers(1, 6))
    policy, held = make(capacity), set[bytes]()
    for _ in range(data.draw(st.integers(0, 60))):
        key = data.draw(st.sampled_from(KEYS))
        what = data.draw(st.sampled_from(["read", "read", "read", "refresh", "discard"]))
        if what == "discard":
            policy.discard(key)
            held.discard(key)
        elif what == "refresh":
            policy.refresh(KEYS)
        elif key in held:
            policy.use(key)
        else:
            pinned = data.draw(st.frozensets(st.sampled_from(KEYS)))
            if len(held) == capacity:
                victim = policy.evict(lambda key, pinned=pinned: key not in pinned)
                assert (victim is None) == (held <= pinned)
                if victim is None:
                    continue
                assert victim in held - pinned
                held.remove(victim)
            policy.insert(key)
            held.add(key)
        policy.assert_invariants()
        assert len(policy) == len(held)
        assert all((key in policy) == (key in held) for key in KEYS)


def test_arc_keeps_what_was_used_again_from_a_passing_prompt() -> None:
    policy = ARCPolicy(4)
    for key in KEYS[:2]:
        policy.insert(key)
        policy.use(key)
    for key in KEYS[2:]:
        if len(policy) == 4:
            policy.evict(anything)
        policy.insert(key)
    assert all(key in policy for key in KEYS[:2])


def test_arc_moves_its_line_when_an_evicted_key_returns() -> None:
    policy = ARCPolicy(2)
    policy.insert(KEYS[0])
    policy.use(KEYS[0])
    policy.insert(KEYS[1])
    assert policy.evict(anything) == KEYS[1]
    policy.insert(KEYS[1])
    assert policy.target == 1.0
    policy.evict(anything)
    policy.insert(KEYS[0])
    assert policy.target == 0.0


def test_arc_evicts_from_the_queue_that_is_over_its_target() -> None:
    for target, victim in ((0.0, KEYS[0]), (1.0, KEYS[1])):
        policy = ARCPolicy(2)
        policy.insert(KEYS[0])
        policy.insert(KEYS[1])
        policy.use(KEYS[1])
        policy.target = target
        assert policy.evict(anything) == victim


@POLICY
def test_a_refresh_is_no_use(make: Callable[[int], EvictionPolicy]) -> None:
    policy = make(3)
    for key in KEYS[:3]:
        policy.insert(key)
    policy.refresh([KEYS[1], KEYS[0], KEYS[9]])
    assert [policy.evict(anything) for _ in range(3)] == [KEYS[2], KEYS[1], KEYS[0]]
    assert policy.evict(anything) is None


@POLICY
def test_the_search_for_a_victim_is_bounded(make: Callable[[int], EvictionPolicy]) -> None:
    policy = make(3 * MAX_ASKED)
    keys = [number.to_bytes(4, "little") for number in range(3 * MAX_ASKED)]
    for key in keys:
        policy.insert(key)
    asked: list[bytes] = []
    assert policy.evict(lambda key: asked.append(key) is not None) is None
    assert asked == keys[:MAX_ASKED]
    asked.clear()
    assert policy.evict(lambda key: asked.append(key) is not None, max_asked=10) is None
    assert asked == keys[MAX_ASKED : MAX_ASKED + 10]


@POLICY
def test_keys_that_may_not_go_become_young_in_their_order_so_that_they_are_met_once(
    make: Callable[[int], EvictionPolicy],
) -> None:
    policy = make(6)
    for key in KEYS[:6]:
        policy.insert(key)
    in_use = set(KEYS[:3])
    assert policy.evict(lambda key: key not in in_use) == KEYS[3]
    asked: list[bytes] = []
    assert policy.evict(lambda key: asked.append(key) is None and key not in in_use) == KEYS[4]
    assert asked == [KEYS[4]]
    assert list(policy) == [KEYS[5], *KEYS[:3]]


@POLICY
def test_of_the_oldest_the_preferred_goes_first_and_none_that_is_much_younger(
    make: Callable[[int], EvictionPolicy],
) -> None:
    policy = make(3 * MAX_PREFERRED)
    keys = [number.to_bytes(4, "little") for number in range(3 * MAX_PREFERRED)]
    for key in keys:
        policy.insert(key)
    preferred = {keys[3], keys[MAX_PREFERRED + 1]}
    assert policy.evict(anything, preferred.__contains__) == keys[3]
    assert policy.evict(anything, preferred.__contains__) == keys[0]
    assert list(policy) == [*keys[1:3], *keys[4:]]


@POLICY
def test_a_key_is_inserted_once(make: Callable[[int], EvictionPolicy]) -> None:
    policy = make(3)
    policy.insert(KEYS[0])
    with pytest.raises(InvariantError, match="inserted twice"):
        policy.insert(KEYS[0])


@POLICY
def test_more_keys_than_the_capacity_are_found_by_the_invariants(make: Callable[[int], EvictionPolicy]) -> None:
    policy = make(1)
    policy.insert(KEYS[0])
    policy.assert_invariants()
    policy.insert(KEYS[1])
    with pytest.raises(InvariantError, match="holds 2"):
        policy.assert_invariants()


def test_a_key_in_two_queues_is_found_by_the_invariants() -> None:
    policy = ARCPolicy(4)
    policy.insert(KEYS[0])
    policy._again[KEYS[0]] = None
    with pytest.raises(InvariantError, match="two queues"):
        policy.assert_invariants()


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    assert isinstance(make_policy("lru", 4), LRUPolicy)
    with pytest.raises(InputError, match="'mru': take one of arc, lru"):
        make_policy("mru", 4)


def test_another_policy_can_be_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "mine", LRUPolicy)
    assert make_policy("mine", 3).evict(anything) is None
