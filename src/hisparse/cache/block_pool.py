"""A pool of numbered blocks with counted leases and a memory of what freed blocks still hold.

A block is in exactly one place: never used (`fresh`), free without content (`blank`), free with content that a
prefix hit may still claim (`cached`, least recently used first), or leased. Blocks are taken in that order, so that
content is evicted only when nothing else is left, the least recently used first.

Sizes reach millions of blocks, so the state is columns of machine integers, not an object per block.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Generic, TypeVar, cast

from hisparse.errors import InvariantError
from hisparse.geometry import NULL_BLOCK

BlockT = TypeVar("BlockT", bound=int)


class BlockPool(Generic[BlockT]):
    """Blocks 1 … `num_blocks`-1 for lease; block 0 is the null block and belongs to nobody.

    `BlockT` is the id type of the pool, so that a block of one pool is never taken for a block of another.
    """

    def __init__(self, num_blocks: int, name: str) -> None:
        if num_blocks < 2:
            raise InvariantError(f"pool {name} of {num_blocks} blocks has nothing to lease beside its null block")
        self.name = name
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        """Blocks that `allocate` can give, those with cached content included. Only this class changes it."""
        self._leases = array("i", bytes(4 * num_blocks))
        self._next_fresh = NULL_BLOCK + 1
        self._blank = array("i")
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_leased(self) -> int:
        return self.num_blocks - 1 - self.num_free

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def leases(self, block: BlockT) -> int:
        """How many leases a block carries."""
        return self._leases[block]

    def allocate(self, count: int) -> list[BlockT]:
        """Lease `count` free blocks once each; what they still held is forgotten.

        Raises `InvariantError` when fewer are free: ask `num_free` first.
        """
        if count > self.num_free:
            raise InvariantError(f"pool {self.name}: {count} blocks asked for, {self.num_free} free")
        blocks: list[int] = self._take_blank(count) if self._blank else []
        if len(blocks) < count and self._next_fresh < self.num_blocks:
            blocks += self._take_fresh(count - len(blocks))
        while len(blocks) < count:
            blocks.append(self._evict())
        self.num_free -= count
        leases = self._leases
        for block in blocks:
            leases[block] = 1
        return cast(list[BlockT], blocks)

    def _take_blank(self, count: int) -> list[int]:
        if count == 1:
            return [self._blank.pop()]
        if count == 0:
            return []
        taken = self._blank[-count:].tolist()
        del self._blank[-count:]
        return taken

    def _take_fresh(self, count: int) -> list[int]:
        first = self._next_fresh
        self._next_fresh = min(first + count, self.num_blocks)
        return list(range(first, self._next_fresh))

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._drop_key(block)
        return block

    def lease(self, block: BlockT) -> None:
        """Add a lease to a block that is leased, or claim a free one that still holds content."""
        if self._leases[block] == 0:
            if block not in self._cached:
                raise InvariantError(f"pool {self.name}: block {block} is free and holds nothing; it cannot be claimed")
            del self._cached[block]
            self.num_free -= 1
        self._leases[block] += 1

    def lease_all(self, blocks: Iterable[BlockT]) -> None:
        """`lease` each block."""
        for block in blocks:
            self.lease(block)

    def release(self, blocks: Iterable[BlockT]) -> None:
        """End one lease of each block. Of blocks freed together, the first given is kept longest.

        A request passes its blocks in order, so the end of a prefix is evicted before its beginning.
        """
        freed: list[int] = []
        leases = self._leases
        for block in blocks:
            left = leases[block] - 1
            if left < 0 or block == NULL_BLOCK:
                raise InvariantError(f"pool {self.name}: block {block} has no lease to end")
            leases[block] = left
            if left == 0:
                freed.append(block)
        self.num_free += len(freed)
        key_of, cached, blank = self._key_of, self._cached, self._blank
        for free in reversed(freed):
            if key_of[free] is not None:
                cached[free] = None
            else:
                blank.append(free)

    def publish(self, block: BlockT, key: bytes) -> bool:
        """Let prefix lookups find a leased block under `key`. The first block published under a key keeps it.

        Returns whether this block is now the one found.
        """
        if self._leases[block] == 0:
            raise InvariantError(f"pool {self.name}: block {block} is not leased, so it cannot be published")
        known = self._key_of[block]
        if known == key:
            return True
        if known is not None:
            raise InvariantError(f"pool {self.name}: block {block} is already published under another key")
        if key in self._block_of:
            return False
        self._key_of[block] = key
        self._block_of[key] = block
        return True

    def lookup(self, key: bytes) -> BlockT | None:
        """The block published under `key`, leased or free, or None."""
        return cast(BlockT | None, self._block_of.get(key))

    def lookup_all(self, keys: Sequence[bytes]) -> list[BlockT]:
        """For each key the block published under it, or the null block. No Python runs per key: prompts are long."""
        return cast(list[BlockT], list(map(self._block_of.get, keys, repeat(NULL_BLOCK))))

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are published here."""
        blocks = self.lookup_all(keys)
        return blocks.index(NULL_BLOCK) if NULL_BLOCK in blocks else len(blocks)

    def count_free(self, blocks: Sequence[BlockT]) -> int:
        """How many of `blocks`, null blocks aside, nobody leases, so that claiming them takes free blocks."""
        # One call for all blocks. It takes two or more to answer with a tuple, so two null blocks go before them.
        num_leases: tuple[int, ...] = itemgetter(NULL_BLOCK, NULL_BLOCK, *blocks)(self._leases)
        return num_leases.count(0) - 2 - blocks.count(cast(BlockT, NULL_BLOCK))

    def forget_all(self) -> None:
        """Forget all content: after this no lookup finds anything. Leases stay."""
        self._blank.extend(self._cached)
        self._cached.clear()
        self._key_of = [None] * self.num_blocks
        self._block_of.clear()

    def _drop_key(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            self._key_of[block] = None
            del self._block_of[key]

    def assert_invariants(self) -> None:
        """Every block is in one place, every key names a block that names it back. O(num_blocks)."""
        blank, cached = set(self._blank), set(self._cached)
        counted = (self.num_blocks - self._next_fresh) + len(blank) + len(cached)
        if counted != self.num_free:
            raise InvariantError(f"pool {self.name}: {self.num_free} blocks said to be free, {counted} are")
        if len(blank) != len(self._blank) or blank & cached:
            raise InvariantError(f"pool {self.name}: a block is free twice: {sorted(blank & cached)[:8]}")
        if self._leases[NULL_BLOCK] or NULL_BLOCK in blank or NULL_BLOCK in cached or self._key_of[NULL_BLOCK]:
            raise InvariantError(f"pool {self.name}: the null block was used")
        for block in range(1, self.num_blocks):
            free = block >= self._next_fresh or block in blank or block in cached
            leases = self._leases[block]
            if free == (leases > 0) or leases < 0:
                raise InvariantError(f"pool {self.name}: block {block} is free={free} with {leases} leases")
            if block in cached and self._key_of[block] is None:
                raise InvariantError(f"pool {self.name}: block {block} is cached without a key")
            if block in blank and self._key_of[block] is not None:
                raise InvariantError(f"pool {self.name}: block {block} is blank and has a key")
        for key, block in self._block_of.items():
            if self._key_of[block] != key:
                raise InvariantError(f"pool {self.name}: key {key.hex()} names block {block}, which has another")
        num_keyed = self.num_blocks - self._key_of.count(None)
        if num_keyed != len(self._block_of):
            raise InvariantError(f"pool {self.name}: {num_keyed} blocks for {len(self._block_of)} keys")
