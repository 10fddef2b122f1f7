"""Which chunk is in which block of the CPU region, and who still needs it. Bookkeeping only: no bytes are touched.

    absent ──reserve──► COMING ──commit──► READY ──evicted──► absent
                          │                  │
                          └──────drop────────┴──► withdrawn ──last reference ends──► absent

A reference keeps a block from being given to another chunk. Whoever fills a block holds one until `commit` or
`drop`. A withdrawn chunk is found by nobody any more, yet its block stays its own while copies may touch it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from hisparse.errors import InvariantError
from hisparse.offload.messages import RegionBlockId
from hisparse.offload.policies import MAX_ASKED, EvictionPolicy


class EntryState(Enum):
    """How far the bytes of a chunk are."""

    COMING = "coming"
    READY = "ready"
    WITHDRAWN = "withdrawn"


@dataclass(slots=True, eq=False)
class Entry:
    """One chunk in one block. Only `CpuTier` changes the fields, those about the tier below excepted.

    `references`: copies, claims and the filler that need the block. `is_ahead`: it was brought up for a request that
    does not run yet, and no other has claimed it. `is_below`: the tier below has the bytes too, as far as is known;
    `came_from_below`: it filled this block with them. The manager and its parts set both.
    """

    key: bytes
    block: RegionBlockId
    state: EntryState = EntryState.COMING
    references: int = 1
    is_ahead: bool = False
    is_below: bool = False
    came_from_below: bool = False


class CpuTier:
    """`num_blocks` blocks of the region and the chunks in them.

    `num_evicted`: chunks that left for others. `num_dropped`: chunks that were withdrawn before that: who remembers
    entries that it has claimed looks at them again when this has grown. `num_ahead`: entries that are `is_ahead`.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        if num_blocks < 1:
            raise InvariantError(f"a CPU tier of {num_blocks} blocks holds nothing")
        self.num_blocks = num_blocks
        self.policy = policy
        self.num_evicted = 0
        self.num_dropped = 0
        self.num_ahead = 0
        self.prefers: Callable[[Entry], bool] | None = None
        """Which chunks are evicted before others that are about as old. Who keeps the tier below says it."""
        self.on_gone: Callable[[Entry], None] | None = None
        """Hears of each chunk that was evicted or dropped."""
        self._num_idle = 0
        """Ready chunks without references: only these can be evicted."""
        self._index: dict[bytes, Entry] = {}
        self._withdrawn: set[Entry] = set()
        self._free = [RegionBlockId(block) for block in reversed(range(num_blocks))]

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing and that nobody needs."""
        return len(self._free)

    def __len__(self) -> int:
        """Chunks that are ready or coming."""
        return len(self._index)

    def get(self, key: bytes) -> Entry | None:
        """The chunk of `key` if it is ready or coming."""
        return self._index.get(key)

    def num_ready(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are ready."""
        for number, key in enumerate(keys):
            entry = self._index.get(key)
            if entry is None or entry.state is not EntryState.READY:
                return number
        return len(keys)

    def reserve(self, key: bytes, may_go: Callable[[Entry], bool], max_asked: int = MAX_ASKED) -> Entry | None:
        """Give an absent chunk a block, taking one from a ready chunk nobody needs and for which `may_go` is true.

        The caller holds the first reference, as its filler. None when there is no block to be had, or none was found
        among `max_asked` chunks.
        """
        if key in self._index:
            raise InvariantError(f"chunk {key.hex()} was reserved twice")
        if not self._free:
            victim = self._choose_victim(may_go, max_asked) if self._num_idle else None
            if victim is None:
                return None
            self._leave(victim)
        entry = self._index[key] = Entry(key, self._free.pop())
        return entry

    def _choose_victim(self, may_go: Callable[[Entry], bool], max_asked: int) -> Entry | None:
        # Keys of the policy are those of ready chunks, so the look-ups cannot fail.
        index, prefers = self._index, self.prefers

        def is_idle(key: bytes) -> bool:
            return index[key].references == 0 and may_go(index[key])

        is_preferred = None if prefers is None else lambda key: prefers(index[key])
        key = self.policy.evict(is_idle, is_preferred, max_asked)
        return None if key is None else index[key]

    def evict(self, entry: Entry) -> None:
        """Take the block of a ready chunk that nobody needs, whatever the policy would say."""
        if entry.state is not EntryState.READY or entry.references:
            raise InvariantError(f"chunk {entry.key.hex()} is {entry.state.value} with {entry.references} references")
        self.policy.discard(entry.key)
        self._leave(entry)

    def commit(self, entry: Entry) -> None:
        """The bytes have come: the chunk can be found, and the filler's reference ends."""
        if entry.state is EntryState.COMING:
            entry.state = EntryState.READY
            self.policy.insert(entry.key)
        self.unpin(entry)

    def drop(self, entry: Entry) -> None:
        """The bytes have not come or are not to be trusted: nobody finds the chunk from now on."""
        if entry.state is EntryState.WITHDRAWN:
            return
        if entry.state is EntryState.READY:
            self.policy.discard(entry.key)
            self._num_idle -= not entry.references
        del self._index[entry.key]
        entry.state = EntryState.WITHDRAWN
        self.num_dropped += 1
        self._withdrawn.add(entry)
        self._be_gone(entry)
        self._free_if_over(entry)

    def pin(self, entry: Entry) -> None:
        """Take a reference to a chunk that is ready or coming."""
        if entry.state is EntryState.WITHDRAWN:
            raise InvariantError(f"chunk {entry.key.hex()} was withdrawn and cannot be needed anew")
        if entry.state is EntryState.READY and not entry.references:
            self._num_idle -= 1
        entry.references += 1

    def unpin(self, entry: Entry) -> None:
        """End a reference."""
        if entry.references < 1:
            raise InvariantError(f"a reference to chunk {entry.key.hex()} was ended twice")
        entry.references -= 1
        if entry.state is EntryState.READY and not entry.references:
            self._num_idle += 1
        self._free_if_over(entry)

    def bring_ahead(self, entry: Entry) -> None:
        """A chunk is coming for a request that does not run yet."""
        entry.is_ahead = True
        self.num_ahead += 1

    def end_ahead(self, entry: Entry) -> None:
        """The chunk is there for a request that runs, or like any other. It may be so already."""
        self.num_ahead -= entry.is_ahead
        entry.is_ahead = False

    def entries(self) -> Iterator[Entry]:
        """Every chunk that has a block, withdrawn ones included."""
        yield from self._index.values()
        yield from self._withdrawn

    def _free_if_over(self, entry: Entry) -> None:
        if entry.state is EntryState.WITHDRAWN and not entry.references:
            self._withdrawn.remove(entry)
            self._free.append(entry.block)

    def _leave(self, victim: Entry) -> None:
        """An idle chunk is evicted."""
        del self._index[victim.key]
        victim.state = EntryState.WITHDRAWN
        self._free.append(victim.block)
        self._num_idle -= 1
        self.num_evicted += 1
        self._be_gone(victim)

    def _be_gone(self, entry: Entry) -> None:
        self.end_ahead(entry)
        if self.on_gone is not None:
            self.on_gone(entry)

    def assert_invariants(self) -> None:
        """Raises `InvariantError` unless every block has one owner and the policy orders exactly the ready chunks."""
        blocks = [entry.block for entry in self.entries()] + self._free
        if sorted(blocks) != list(range(self.num_blocks)):
            raise InvariantError(f"{self.num_blocks} region blocks, but owned or free are {sorted(blocks)}")
        ready = idle = 0
        for key, entry in self._index.items():
            ready += entry.state is EntryState.READY
            idle += entry.state is EntryState.READY and not entry.references
            if entry.key != key or entry.state is EntryState.WITHDRAWN:
                raise InvariantError(f"chunk {key.hex()} is indexed as {entry.state.value} {entry.key.hex()}")
            if (entry.state is EntryState.READY) != (key in self.policy):
                raise InvariantError(f"chunk {key.hex()} is {entry.state.value}; the policy thinks otherwise")
            if entry.state is EntryState.COMING and entry.references < 1:
                raise InvariantError(f"chunk {key.hex()} is coming, but nobody fills it")
        if ready != len(self.policy):
            raise InvariantError(f"{ready} chunks are ready; the policy holds {len(self.policy)}")
        if idle != self._num_idle:
            raise InvariantError(f"{idle} chunks are ready without references, {self._num_idle} were counted")
        ahead = sum(entry.is_ahead for entry in self.entries())
        if ahead != self.num_ahead:
            raise InvariantError(f"{ahead} chunks were brought up ahead, {self.num_ahead} were counted")
        for entry in self._withdrawn:
            if entry.state is not EntryState.WITHDRAWN or entry.references < 1:
                raise InvariantError(f"withdrawn chunk {entry.key.hex()} has {entry.references} references")
        self.policy.assert_invariants()
