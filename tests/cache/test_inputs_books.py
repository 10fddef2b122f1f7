"""The books of a replica, driven by another step loop: what cannot be is refused, and nothing has changed then."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from hisparse.cache import KVCacheManager, TableLog
from hisparse.errors import InputError, InvariantError
from hisparse.residency import HiSparseCoordinator
from tests.cache.test_managers import make_plan

NUM_SLOTS = 4


class Books:
    """One replica's, with a request "a" of two pages in slot 1."""

    def __init__(self) -> None:
        self.log = TableLog()
        self.kv = KVCacheManager(make_plan(), self.log)
        self.coordinator = HiSparseCoordinator(self.kv, self.log, root=b"root")
        self.kv.add("a", 1)
        self.coordinator.add("a", 1, array("i", range(8)))
        assert self.kv.grow("a", 2).granted
        self.log.drain()

    def state(self) -> Any:
        return self.kv.use(), self.kv.index_pool.num_free, self.log.drain(), list(self.kv.resident.blocks("a"))


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS, 99])
def test_a_slot_that_there_is_not_is_refused_with_those_there_are(books: Books, slot: int) -> None:
    before = books.state()
    with pytest.raises(InputError, match=f"^request b cannot have slot {slot}: slots are 0 to 3$"):
        books.kv.add("b", slot)
    assert books.state() == before
    books.kv.add("b", NUM_SLOTS - 1)


def test_a_slot_is_lent_to_one_request_until_it_is_removed(books: Books) -> None:
    with pytest.raises(InvariantError, match=r"^slot 1 is lent to request a: request b cannot have it too"):
        books.kv.add("b", 1)
    books.coordinator.remove("a")
    books.kv.add("b", 1)
    assert books.kv.grow("b", 1).granted


def test_a_request_that_is_known_is_refused_with_its_slot(books: Books) -> None:
    with pytest.raises(InvariantError, match=r"^request a is already known, in slot 1"):
        books.kv.add("a", 2)
    books.kv.add("b", 2)


def test_a_negative_number_of_pages_is_not_granted(books: Books) -> None:
    before = books.state()
    with pytest.raises(InputError, match=r"^request a cannot have -1 pages"):
        books.kv.grow("a", -1)
    assert books.kv.grow("a", 0).granted, "fewer than it has are no mistake"
    assert books.state() == before


UNKNOWN: list[Callable[[Books], object]] = [
    lambda books: books.kv.grow("x", 1),
    lambda books: books.kv.take_hot("x"),
    lambda books: books.kv.publish("x", 0, []),
    lambda books: books.kv.remove("x"),
    lambda books: books.coordinator.pages("x"),
    lambda books: books.coordinator.seal("x", 4),
    lambda books: books.coordinator.restore("x", 1),
    lambda books: books.coordinator.adopt_prefix("x", books.coordinator.find_prefix([])),
    lambda books: books.coordinator.remove("x"),
]


@pytest.mark.parametrize("call", UNKNOWN)
def test_a_request_that_is_not_known_is_named(books: Books, call: Callable[[Books], object]) -> None:
    before = books.state()
    with pytest.raises(InvariantError, match=r"^request x is not known"):
        call(books)
    assert books.state() == before


def test_a_request_is_not_known_after_it_was_removed(books: Books) -> None:
    books.coordinator.remove("a")
    with pytest.raises(InvariantError, match=r"^request a is not known"):
        books.coordinator.remove("a")
    with pytest.raises(InvariantError, match=r"^request a is not known"):
        books.kv.grow("a", 1)
    books.kv.assert_invariants({})


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(9, 3), (1000, 2), (8, 1)])
def test_no_more_tokens_are_sealed_than_there_are_and_pages_hold(num_tokens: int, num_pages: int) -> None:
    books = Books()
    if num_pages < 2:
        books.coordinator.remove("a")
        books.kv.add("a", 1)
        books.coordinator.add("a", 1, array("i", range(8)))
    assert books.kv.grow("a", num_pages).granted
    said = f"^request a seals {num_tokens} tokens, and has 8, and {num_pages} pages$"
    with pytest.raises(InvariantError, match=said):
        books.coordinator.seal("a", num_tokens)
    books.coordinator.seal("a", 4)
    books.coordinator.assert_invariants()


def test_no_page_is_published_that_a_request_does_not_have(books: Books) -> None:
    with pytest.raises(InvariantError, match=r"^request a publishes 2 pages from page 1 on, and has 2$"):
        books.kv.publish("a", 1, [b"1", b"2"])
    books.kv.publish("a", 0, [b"0", b"1"])
