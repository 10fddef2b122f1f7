"""How much of a prefix hit a request may start with, beside the way to find that out page by page; and how often."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.cache import KVCacheManager, TableLog
from hisparse.engine.admission_gate import AdmissionGate, Follow
from hisparse.engine.pages_underway import PagesUnderway
from hisparse.engine.request import Request
from hisparse.engine.waiting_queue import WaitingQueue
from hisparse.residency import Demand, HiSparseCoordinator, PrefixHit, Supply, may_start
from tests.engine.paper_worker import BLOCK_SIZE, ROOT, small_plan
from tests.engine.requests import make_request


@dataclass(frozen=True)
class Page:
    """Where a page of the prompt is found, and whether somebody leases it there: a copy under way, for one."""

    in_slab: bool = True
    slab_leased: bool = False
    on_host: bool = False
    host_leased: bool = False
    index_leased: bool = False


class Pools:
    """Pools in which the first pages of a prompt are found, and an open gate before them. Nobody runs."""

    def __init__(
        self, pages: Sequence[Page], rest: int = 1, sizes: tuple[int, int, int] = (14, 24, 24), max_tokens: int = 1
    ) -> None:
        """`rest` tokens of the prompt follow its `pages`; `sizes` of slab, host pool and indexer's pool in blocks."""
        self.plan = small_plan(*sizes)
        log = TableLog()
        self.kv = KVCacheManager(self.plan, log)
        self.coordinator = HiSparseCoordinator(self.kv, log, ROOT)
        prompt = [at % 2 for at in range(len(pages) * BLOCK_SIZE + rest)]
        self.request = make_request("asks", prompt, max_tokens)
        keys = self.coordinator.prefix_keys(array("i", prompt))
        for key, page in zip(keys, pages, strict=False):
            self._put(key, page)
        self.underway = PagesUnderway(WaitingQueue())
        self.gate = AdmissionGate(self.plan, self.kv, self.coordinator, self.underway)

    def _put(self, key: bytes, page: Page) -> None:
        for pool, is_there, is_leased in (
            (self.kv.slab, page.in_slab, page.slab_leased),
            (self.coordinator.host_pool, page.on_host, page.host_leased),
            (self.kv.index_pool, True, page.index_leased),
        ):
            if is_there and pool.num_free:
                (block,) = pool.allocate(1)  # type: ignore[attr-defined]
                pool.publish(block, key)  # type: ignore[attr-defined]
                if not is_leased:
                    pool.release([block])  # type: ignore[attr-defined]

    def hold(self, slab: int, host: int, indexer: int) -> None:
        """Lease so many more blocks that hold nothing which is found, as far as there are any."""
        for pool, count in ((self.kv.slab, slab), (self.coordinator.host_pool, host), (self.kv.index_pool, indexer)):
            blank = pool.num_free - len(pool._cached)  # type: ignore[attr-defined]
            pool.allocate(min(count, blank))  # type: ignore[attr-defined]

    def ask(self) -> PrefixHit | None:
        """What the gate says to the only request."""
        hit = self.gate.find_start(self.request, promised=0, is_alone=True)
        assert hit is None or isinstance(hit, PrefixHit)
        return hit


def page_by_page(pools: Pools) -> PrefixHit | None:
    """The longest beginning of the hit that is granted, tried one after the other."""
    request, supply = pools.request, Supply.of(pools.kv, pools.coordinator, promised=0)
    keys = pools.coordinator.prefix_keys(request.tokens)
    while True:
        hit = pools.coordinator.find_prefix(keys, look_beyond=request.asks_tiers)
        demand = Demand.of(pools.plan, len(request.tokens), request.max_length, hit)
        if may_start(pools.plan, demand, supply).granted:
            return hit
        if not hit.num_pages:
            return None
        keys = keys[: hit.num_pages - 1]


PAGES = st.builds(Page, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
ON_DEVICE = st.builds(Page, st.just(True), st.sampled_from([False, False, False, True]))


@st.composite
def pools(draw: st.DrawFn) -> Pools:
    """Slabs that are larger and smaller than the prompt, pages here and there, and others' blocks beside them."""
    made = Pools(
        draw(st.lists(PAGES, max_size=15) | st.lists(ON_DEVICE, min_size=2, max_size=15)),
        rest=draw(st.sampled_from([1, BLOCK_SIZE, BLOCK_SIZE + 1, 4 * BLOCK_SIZE])),
        sizes=(draw(st.integers(6, 20)), draw(st.integers(17, 30)), draw(st.integers(21, 40))),
    )
    made.request.asks_tiers = draw(st.booleans())
    made.hold(draw(st.integers(0, 8)), draw(st.integers(0, 30)), draw(st.sampled_from([0, 0, 10, 40])))
    num_leaving = draw(st.sampled_from([0, 0, 1, 3]))
    made.coordinator.num_reclaimable = lambda: num_leaving  # type: ignore[method-assign]
    return made


@given(pools())
def test_the_start_is_the_longest_that_fits(pools: Pools) -> None:
    assert pools.ask() == page_by_page(pools)


def test_the_cases_include_hits_that_are_shortened_by_one_page_by_many_and_in_vain() -> None:
    """Twelve free blocks hold a hit of eleven pages and the last one. With fewer, there have to be two beside it."""
    free = [Page()] * 11
    for held, expected in ((0, 11), (1, 9), (4, 6), (9, 1), (10, 0)):
        pools = Pools(free, sizes=(14, 24, 24))
        pools.kv.slab.num_free -= held
        hit = pools.ask()
        assert hit is not None
        assert (hit.num_pages, page_by_page(pools)) == (expected, hit)
    pools.kv.slab.num_free -= 1
    assert pools.ask() is page_by_page(pools) is None


class Lookups:
    """Counts the look-ups of a coordinator."""

    def __init__(self, patch: pytest.MonkeyPatch, coordinator: HiSparseCoordinator) -> None:
        self.count = 0
        sound = coordinator.find_prefix

        def find_prefix(keys: Sequence[bytes], look_beyond: bool = False) -> PrefixHit:
            self.count += 1
            return sound(keys, look_beyond)

        patch.setattr(coordinator, "find_prefix", find_prefix)


@pytest.mark.parametrize("short", ["indexer", "host", "slab"])
def test_a_refusal_costs_one_look_up_and_none_while_nothing_changes(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Pools([Page()] * 8, rest=4 * BLOCK_SIZE)
    taken = {"slab": pools.kv.slab, "host": pools.coordinator.host_pool, "indexer": pools.kv.index_pool}[short]
    num_free = taken.num_free
    if short == "host":
        pools.kv.slab.num_free = 10
    taken.num_free = {"slab": 1, "host": 1, "indexer": 10}[short]
    lookups = Lookups(monkeypatch, pools.coordinator)
    assert [pools.ask() for _ in range(5)] == [None] * 5
    assert lookups.count == 1
    taken.num_free = num_free
    pools.kv.slab.num_free = 13
    assert pools.ask() is not None, "whoever waited is looked at again as soon as there is room"


def test_a_slab_that_is_short_costs_two_look_ups_however_much_has_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_missing in (1, 5, 9):
        pools = Pools([Page()] * 11)
        pools.kv.slab.num_free -= num_missing
        lookups = Lookups(monkeypatch, pools.coordinator)
        hit = pools.ask()
        assert hit is not None
        assert (hit.num_pages, lookups.count) == (10 - num_missing, 2)


def test_what_one_request_was_refused_says_nothing_of_another() -> None:
    pools = Pools([Page()] * 8, rest=4 * BLOCK_SIZE)
    pools.kv.index_pool.num_free = 10
    assert pools.ask() is None
    short: Request = make_request("short", [1] * 5, 1)
    assert isinstance(pools.gate.find_start(short, promised=0, is_alone=True), PrefixHit)


def test_a_refusal_while_others_run_does_not_count_once_nobody_does() -> None:
    """Then a shorter hit will do: nine pages fit, and two of them are for what is computed."""
    pools = Pools([Page()] * 11)
    pools.kv.slab.num_free -= 3
    assert pools.gate.find_start(pools.request, promised=0, is_alone=False) is None
    hit = pools.ask()
    assert hit is not None
    assert hit.num_pages == 7


def test_what_was_refused_is_looked_at_anew_once_somebody_else_has_its_pages() -> None:
    """No pool has more room than when the request was refused; it needs less, because more of it is found."""
    pools = Pools([], rest=9 * BLOCK_SIZE)
    kv, coordinator, index_pool = pools.kv, pools.coordinator, pools.kv.index_pool

    def ask() -> PrefixHit | Follow | None:
        return pools.gate.find_start(pools.request, promised=0, is_alone=False)

    index_pool.num_free = 8
    assert ask() is None
    owner = make_request("owner", list(pools.request.tokens), 1)
    owner.prefix_keys = coordinator.prefix_keys(owner.tokens)
    kv.add("owner", 0)
    coordinator.add("owner", 0, owner.tokens)
    owner.pages = coordinator.pages("owner")
    pools.underway.enter(owner)
    assert ask() is None, "the refusal stands while room does not grow"
    index_pool.num_free = 12
    assert ask() == Follow(owner.prefix_keys[-1])
    assert kv.grow("owner", 8).granted
    coordinator.seal("owner", 8 * BLOCK_SIZE)
    pools.underway.advance(owner)
    assert index_pool.num_free == 4
    hit = ask()
    assert isinstance(hit, PrefixHit)
    assert hit.num_pages == 8
