"""Whose pages leave the device next, and what they give.

A block comes free when all requests that share it give it up, and a request that reads from the host needs a hot lease.
So what is compared is sets of requests, by the blocks that leave with them and by the hot leases that they would come
to need. Requests that read from the host already give first, what they have alone before what they share; then those
whose blocks pay for the hot leases, as few requests as possible; and those that would take more than they give never.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SpillCosts:
    """What it costs to give blocks up. Requests are bits, sets of them their union.

    `needing`: requests that would need a hot lease of `hot_blocks` once a page of theirs is on the host. `room`: pages
    that the host pool can take. `coming`: by request, blocks that it will be able to give beside those it can now.
    """

    needing: int
    hot_blocks: int
    room: int
    coming: Mapping[int, int] = field(default_factory=dict)


def next_to_leave(offers: Mapping[int, int], costs: SpillCosts) -> tuple[int, int] | None:
    """The requests whose common blocks leave next, and how many of them will need a hot lease for it.

    `offers`: by requests, the blocks that exactly they share and would give up. None: nothing is worth giving.
    """
    for holders in offers:
        if not holders & costs.needing and holders.bit_count() == 1:
            # At no price, and of no more than one request: nothing comes before it.
            return holders, 0
    paid, _ = next(worth_giving(offers, costs), (None, 0))
    if paid is None:
        return None
    those = [holders for holders in offers if holders & costs.needing == paid]
    return min(those, key=int.bit_count), paid.bit_count()


def num_worth_giving(offers: Mapping[int, int], costs: SpillCosts) -> int:
    """Blocks that come free, net of hot leases, when all that is worth giving leaves."""
    return sum(net for _, net in worth_giving(offers, costs))


def worth_giving(offers: Mapping[int, int], costs: SpillCosts) -> Iterator[tuple[int, int]]:
    """Sets of requests for which hot leases pay, the cheapest first, each with the blocks that it gives beyond them.

    The first is empty, if requests that need none have something to give.
    """
    rest, needing, room = dict(offers), costs.needing, costs.room
    while rest:
        gains: dict[int, int] = {}
        for holders, count in rest.items():
            need = holders & needing
            gains[need] = gains.get(need, 0) + count
        paid = 0
        for need in _next_to_pay(gains, costs, room):
            # Of what the host had room for, those before it may have left too little.
            if need and not _pays(gains, need, costs, room):
                continue
            gain = min(_gain(gains, need), room)
            yield need, gain - need.bit_count() * costs.hot_blocks
            room -= gain
            paid |= need
        needing &= ~paid
        left = {holders: count for holders, count in rest.items() if holders & needing}
        if len(left) == len(rest):
            return
        rest = left


def _next_to_pay(gains: Mapping[int, int], costs: SpillCosts, room: int) -> list[int]:
    """Sets to pay for together, of which none gains by what another is paid for: keys of `gains`, maybe none."""
    if 0 in gains:
        return [0]
    alone = [need for need in gains if need.bit_count() == 1 and _pays(gains, need, costs, room)]
    if alone:
        return alone
    together = sorted((need for need in gains if need.bit_count() > 1), key=int.bit_count)
    return [need for need in together if _pays(gains, need, costs, room)][:1]


def _pays(gains: Mapping[int, int], need: int, costs: SpillCosts, room: int) -> bool:
    if need.bit_count() == 1:
        coming = costs.coming.get(need, 0)
    else:
        coming = sum(num for request, num in costs.coming.items() if request & need)
    return min(_gain(gains, need), room) + coming > need.bit_count() * costs.hot_blocks


def _gain(gains: Mapping[int, int], need: int) -> int:
    """Blocks that may leave once the requests of `need` hold hot leases."""
    if need.bit_count() < 2:
        return gains[need]
    return sum(count for other, count in gains.items() if not other & ~need)
