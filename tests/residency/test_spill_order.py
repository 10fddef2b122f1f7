"""Whose pages leave next, beside a search of all sets of requests."""

import hypothesis.strategies as st
from hypothesis import given

from hisparse.residency.spill_order import SpillCosts, next_to_leave, num_worth_giving

A, B, C = 1, 2, 4
PLENTY = 1000

groups = st.dictionaries(st.integers(1, 15), st.integers(1, 9), max_size=6)
costs = st.builds(
    SpillCosts,
    needing=st.integers(0, 15),
    hot_blocks=st.integers(1, 6),
    room=st.integers(0, 20) | st.just(PLENTY),
)


def net_of(paid: int, offers: dict[int, int], costs: SpillCosts) -> int:
    """What comes free when the requests of `paid`, and those who need no hot lease, give all that they can."""
    given = sum(count for holders, count in offers.items() if not holders & costs.needing & ~paid)
    return min(given, costs.room) - (paid & costs.needing).bit_count() * costs.hot_blocks


def best_net(offers: dict[int, int], costs: SpillCosts) -> int:
    return max(net_of(paid, offers, costs) for paid in range(16))


def test_who_reads_from_the_host_gives_first_and_what_it_has_alone_before_what_it_shares() -> None:
    costs = SpillCosts(needing=A, hot_blocks=2, room=PLENTY)
    assert next_to_leave({A: 9, B | C: 9, C: 1}, costs) == (C, 0)
    assert next_to_leave({A: 9, B | C: 9}, costs) == (B | C, 0)
    assert next_to_leave({A: 9}, costs) == (A, 1)


def test_nobody_gives_fewer_blocks_than_it_comes_to_need() -> None:
    costs = SpillCosts(needing=A | B | C, hot_blocks=3, room=PLENTY)
    assert next_to_leave({A: 3, B: 2, C: 3}, costs) is None
    assert num_worth_giving({A: 3, B: 2, C: 3}, costs) == 0
    assert next_to_leave({A: 3, B: 4, C: 3}, costs) == (B, 1)
    assert num_worth_giving({A: 3, B: 4, C: 3}, costs) == 1


def test_a_shared_prefix_pays_for_all_who_share_it() -> None:
    costs = SpillCosts(needing=A | B | C, hot_blocks=3, room=PLENTY)
    assert next_to_leave({A | B | C: 9}, costs) is None
    assert next_to_leave({A | B | C: 10}, costs) == (A | B | C, 3)
    assert num_worth_giving({A | B | C: 10}, costs) == 1
    # What they have alone counts too.
    assert next_to_leave({A | B | C: 8, A: 1, B: 1}, costs) == (A | B | C, 3)
    # Of sets that pay, the smallest.
    assert next_to_leave({A | B | C: 10, B | C: 7}, costs) == (B | C, 2)


def test_a_request_in_its_prompt_may_count_on_pages_that_it_has_not_computed() -> None:
    assert next_to_leave({A: 2}, SpillCosts(A, 3, PLENTY)) is None
    assert next_to_leave({A: 2}, SpillCosts(A, 3, PLENTY, {A: 2})) == (A, 1)


def test_what_the_host_has_no_room_for_pays_for_nothing() -> None:
    assert next_to_leave({A: 9}, SpillCosts(A, 3, room=3)) is None
    assert next_to_leave({A: 9}, SpillCosts(A, 3, room=4)) == (A, 1)
    assert num_worth_giving({A: 9, B: 5}, SpillCosts(A, 3, room=7)) == 5


@given(groups, costs)
def test_what_is_said_to_be_worth_giving_can_be_given(offers: dict[int, int], costs: SpillCosts) -> None:
    assert 0 <= num_worth_giving(offers, costs) <= best_net(offers, costs)


@given(groups, costs)
def test_one_after_the_other_they_give_as_much_as_was_said(offers: dict[int, int], costs: SpillCosts) -> None:
    """Following the order to its end, hot leases taken off, never frees less than was promised before."""
    promised = num_worth_giving(offers, costs)
    rest, needing, room, net = dict(offers), costs.needing, costs.room, 0
    while (choice := next_to_leave(rest, SpillCosts(needing, costs.hot_blocks, room))) is not None:
        holders, num_hot = choice
        assert num_hot == (holders & needing).bit_count()
        given = min(rest.pop(holders), room)
        if given:
            net += given - num_hot * costs.hot_blocks
            needing &= ~holders
            room -= given
    assert net >= promised


@given(groups, costs)
def test_nothing_is_left_that_would_have_paid_by_itself(offers: dict[int, int], costs: SpillCosts) -> None:
    """Where no choice is left, none of the sets that share something pays with all that it would free."""
    if next_to_leave(offers, costs) is not None:
        return
    for holders in offers:
        assert net_of(holders, offers, costs) <= 0
