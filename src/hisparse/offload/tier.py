"""What the CPU tier asks of a tier below it, such as files. The manager knows tiers through this protocol alone."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

from hisparse.offload.messages import RegionBlockId

Buffer = object
"""One row of the region: whatever has the buffer protocol, writable and contiguous, an array for instance."""


class Tier(Protocol):
    """A place that keeps chunks by key. All methods are called from more than one thread.

    A tier owns a buffer from `store` or `load` until the future is done, and must finish every future it gave,
    with False or an exception where it could not do its work. Neither stops the manager: both become a miss.
    """

    def lookup(self, key: bytes) -> bool:
        """Whether a `load` of this key would most likely succeed. May wait for a disk."""
        ...

    def store(self, key: bytes, buffer: Buffer) -> "Future[bool]":
        """Keep the bytes of `buffer` under `key`. True once they are kept, False when the tier would not take them."""
        ...

    def load(self, key: bytes, buffer: Buffer) -> "Future[bool]":
        """Fill `buffer` with what is kept under `key`. False is a miss, and then the buffer's bytes mean nothing."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a prefix was used, and give up others first; of this one its end, since the beginning is in more.

        Returns at once. Keys under which nothing is kept are ignored.
        """
        ...

    def close(self, deadline: float) -> object:
        """Stop taking work and finish what was begun, within `deadline` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Below:
    """A tier below and what is needed to speak with it.

    `buffer_of` gives the row of a region block. `executor` runs the tier's lookups, which may wait for a disk, beside
    the scheduler.
    """

    tier: Tier
    buffer_of: Callable[[RegionBlockId], Buffer]
    executor: Executor
