"""The waiting queue beside a naive model of it: a list of all, and the key that each is parked under."""

import random

import pytest

from hisparse.engine.request import Request, RequestStatus
from hisparse.engine.waiting_queue import WaitingQueue
from hisparse.errors import InvariantError
from tests.engine.requests import make_request

KEYS = [bytes([number]) for number in range(4)]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_called_the_order_is_that_of_a_list(seed: int) -> None:
    rng = random.Random(seed)
    queue, order, parked = WaitingQueue(), list[Request](), dict[Request, bytes]()
    for number in range(300):
        call = rng.choice(["append", "append", "appendleft", "remove", "park", "park", "release"])
        ready = [request for request in order if request not in parked]
        if call in ("append", "appendleft"):
            request = make_request(f"r{number}", [1], 1)
            order.insert(len(order) if call == "append" else 0, request)
            getattr(queue, call)(request)
        elif call == "remove" and order:
            request = rng.choice(order)
            order.remove(request)
            parked.pop(request, None)
            queue.remove(request)
        elif call == "park" and ready:
            request, key = rng.choice(ready), rng.choice(KEYS)
            parked[request] = key
            queue.park(request, key)
        elif call == "release":
            keys = rng.sample(KEYS, 2)
            parked = {request: key for request, key in parked.items() if key not in keys}
            queue.release(keys)
        queue.assert_invariants()
        assert list(queue) == order
        assert list(queue.ready) == [request for request in order if request not in parked]
        assert queue.first is next(iter(queue.ready), None)
        assert queue.awaited == set(parked.values())
        assert len(queue) == len(order)
        assert all(request in queue for request in order)


def test_misuse_is_refused_by_the_name_of_the_request() -> None:
    queue, one = WaitingQueue(), make_request("one", [1], 1)
    for call in (queue.remove, lambda request: queue.park(request, b"key")):
        with pytest.raises(InvariantError, match=r"request one .*does not wait"):
            call(one)
    queue.append(one)
    with pytest.raises(InvariantError, match="request one waits already"):
        queue.appendleft(one)
    queue.park(one, b"key")
    with pytest.raises(InvariantError, match="request one is parked already"):
        queue.park(one, b"key")


def test_damage_is_found_by_the_invariants() -> None:
    for damage in ("both", "neither", "order", "status"):
        queue = WaitingQueue()
        one, two = make_request("one", [1], 1), make_request("two", [1], 1)
        queue.append(one)
        queue.append(two)
        queue.assert_invariants()
        if damage == "both":
            queue.park(one, b"key")
            queue._ready.insert(0, one)
        elif damage == "neither":
            queue._ready.remove(one)
        elif damage == "status":
            one.status = RequestStatus.RUNNING
        else:
            queue._ready.reverse()
        with pytest.raises(InvariantError):
            queue.assert_invariants()
