"""Which chunk of the CPU tier goes when a new one wants its place. Policies are plug-ins behind one small protocol.

A policy orders keys; it knows neither blocks nor references. It is told of three different things, because prefix
caches see the same chunk many times in one request and that is still one use:

- `insert`: the chunk has become readable;
- `use`: another request reads it;
- `refresh`: the request that brought or read it is leaving. The order among its chunks is settled, the first chunk
  youngest, so that a prefix loses its end before its beginning. That is no further use.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Protocol

from hisparse.errors import InputError, InvariantError

MAX_ASKED = 4096
"""Keys of one queue that a search for a victim looks at. What stands in the way at its old end is in use right now."""
MAX_PREFERRED = 64
"""Keys that may go and are passed over in search of one that costs less to lose: no further, or age would not count."""

MayGo = Callable[[bytes], bool]
"""Says of a held key whether it may be the victim."""

Queue = OrderedDict[bytes, None]
"""Keys from the oldest to the youngest."""


class EvictionPolicy(Protocol):
    """What the CPU tier asks of a policy. Keys are any bytes; one policy serves one tier."""

    def __len__(self) -> int:
        """How many keys are held: exactly those inserted and neither evicted nor discarded since."""
        ...

    def __contains__(self, key: bytes) -> bool:
        """Whether `key` is held."""
        ...

    def __iter__(self) -> Iterator[bytes]:
        """The held keys, roughly in the order in which they would go."""
        ...

    def insert(self, key: bytes) -> None:
        """Hold a key that is not held. Raises `InvariantError` when it is."""
        ...

    def use(self, key: bytes) -> None:
        """A request reads a held key."""
        ...

    def refresh(self, keys: Iterable[bytes]) -> None:
        """Make the held ones of `keys` young, the last the youngest, without counting a use."""
        ...

    def evict(self, may_go: MayGo, prefers: MayGo | None = None, max_asked: int = MAX_ASKED) -> bytes | None:
        """Choose a held key for which `may_go` is true and stop holding it; None when there is none.

        May give up once `may_go` was false for `max_asked` keys: a scheduler that waits costs more than a chunk. Keys
        that may not go are in use: they become young, so that the next search does not meet them again. Of the
        `MAX_PREFERRED` oldest that may go, one for which `prefers` is true goes before the others.
        """
        ...

    def discard(self, key: bytes) -> None:
        """Stop holding a key because its bytes are gone for another reason than want of space."""
        ...

    def assert_invariants(self) -> None:
        """Raises `InvariantError` when the policy contradicts itself."""
        ...


class LRUPolicy:
    """The key whose last use is longest ago goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._queue: Queue = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, key: bytes) -> bool:
        return key in self._queue

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._queue)

    def insert(self, key: bytes) -> None:
        _must_be_new(self, key)
        self._queue[key] = None

    def use(self, key: bytes) -> None:
        self._queue.move_to_end(key)

    def refresh(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._queue:
                self._queue.move_to_end(key)

    def evict(self, may_go: MayGo, prefers: MayGo | None = None, max_asked: int = MAX_ASKED) -> bytes | None:
        return _pop_oldest(self._queue, may_go, prefers, max_asked)

    def discard(self, key: bytes) -> None:
        self._queue.pop(key, None)

    def assert_invariants(self) -> None:
        if len(self._queue) > self.capacity:
            raise InvariantError(f"an LRU of {self.capacity} keys holds {len(self._queue)}")


class ARCPolicy:
    """Adaptive replacement: keys used once and keys used again compete, and what was evicted too early moves the line.

    Two queues hold keys, `once` and `again`; two more remember evicted keys of each without their bytes. A key that
    returns after it left `once` says that `once` should have been larger, and the other way round: `target` is the
    size that `once` should have. One long prompt that nobody asks for again passes through `once` alone and leaves
    what others share where it is. After N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement
    Cache", FAST 2003; the difference is that the victim goes when space is wanted and the line moves when the bytes
    have come, since a copy lies between the two.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0.0
        """The size that `once` should have, 0 … `capacity`. Moves when a remembered key returns."""
        self._once: Queue = OrderedDict()
        self._again: Queue = OrderedDict()
        self._left_once: Queue = OrderedDict()
        self._left_again: Queue = OrderedDict()

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: bytes) -> bool:
        return key in self._once or key in self._again

    def __iter__(self) -> Iterator[bytes]:
        return chain(self._once, self._again)

    def insert(self, key: bytes) -> None:
        _must_be_new(self, key)
        if key in self._left_once:
            step = max(1.0, len(self._left_again) / len(self._left_once))
            self.target = min(float(self.capacity), self.target + step)
            del self._left_once[key]
            self._again[key] = None
        elif key in self._left_again:
            step = max(1.0, len(self._left_once) / len(self._left_again))
            self.target = max(0.0, self.target - step)
            del self._left_again[key]
            self._again[key] = None
        else:
            self._once[key] = None
        self._forget()

    def use(self, key: bytes) -> None:
        if key in self._once:
            del self._once[key]
            self._again[key] = None
        else:
            self._again.move_to_end(key)

    def refresh(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            for queue in (self._once, self._again):
                if key in queue:
                    queue.move_to_end(key)

    def evict(self, may_go: MayGo, prefers: MayGo | None = None, max_asked: int = MAX_ASKED) -> bytes | None:
        once_first = len(self._once) > self.target or not self._again
        pairs = [(self._once, self._left_once), (self._again, self._left_again)]
        for queue, left in pairs if once_first else reversed(pairs):
            key = _pop_oldest(queue, may_go, prefers, max_asked)
            if key is not None:
                left[key] = None
                self._forget()
                return key
        return None

    def discard(self, key: bytes) -> None:
        self._once.pop(key, None)
        self._again.pop(key, None)

    def _forget(self) -> None:
        """Bound what is remembered: `capacity` keys that were used once, and twice that over all four queues."""
        while self._left_once and len(self._once) + len(self._left_once) > self.capacity:
            self._left_once.popitem(last=False)
        while self._left_again and len(self) + len(self._left_once) + len(self._left_again) > 2 * self.capacity:
            self._left_again.popitem(last=False)

    def assert_invariants(self) -> None:
        queues = (self._once, self._again, self._left_once, self._left_again)
        if len(set().union(*queues)) != sum(map(len, queues)):
            raise InvariantError("a key stands in two queues of the ARC policy")
        if len(self) > self.capacity or sum(map(len, queues)) > 2 * self.capacity:
            raise InvariantError(
                f"an ARC of {self.capacity} keys holds {len(self)}, {sum(map(len, queues))} with the evicted"
            )
        if not 0 <= self.target <= self.capacity:
            raise InvariantError(f"the target {self.target} of the ARC policy is outside 0 … {self.capacity}")


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LRUPolicy, "arc": ARCPolicy}
"""Policies by the name that the option `policy` takes. Put another one in before the options are parsed."""


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """A policy for a tier of `capacity` chunks. Raises `InputError` naming the known ones."""
    try:
        return POLICIES[name](capacity)
    except KeyError:
        raise InputError(f"there is no eviction policy {name!r}: take one of {', '.join(sorted(POLICIES))}") from None


def _pop_oldest(queue: Queue, may_go: MayGo, prefers: MayGo | None, max_asked: int) -> bytes | None:
    in_use: list[bytes] = []
    victim: bytes | None = None
    num_passed = 0
    for key in queue:
        if not may_go(key):
            in_use.append(key)
            if len(in_use) == max_asked:
                break
            continue
        if prefers is None or prefers(key):
            victim = key
            break
        if victim is None:
            victim = key
        num_passed += 1
        if num_passed == MAX_PREFERRED:
            break
    for key in in_use:
        queue.move_to_end(key)
    if victim is not None:
        del queue[victim]
    return victim


def _must_be_new(policy: EvictionPolicy, key: bytes) -> None:
    if key in policy:
        raise InvariantError(f"chunk {key.hex()} was inserted twice")
