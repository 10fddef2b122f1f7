"""Copies written down without looking at the layout again: addresses of blocks in, descriptors of fragments out.

A plan is a mapping's runs, expanded once. A transfer adds every fragment's offsets to every page's addresses, straight
into arrays that exist already. Everything that the layout or the topology decides is bound when a plan is made, so a
call has no such branch, and it allocates no buffer: it makes views of arrays, whose number is fixed. That is why sums
are not left to numpy's broadcasting, which takes buffers of 64 KiB and is slower for it: addresses are assigned to a
page's descriptors (which takes none), and offsets, repeated beforehand, are added in place.

Addresses, offsets and sizes are unsigned numbers of 64 bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import gcd

import numpy as np

from hisparse.errors import InvariantError
from hisparse.offload.layout import LayerMapping

_FEW_FRAGMENTS = 2
"""Up to here a call of numpy for each fragment of a page costs less than an inner loop over so few."""

_PATTERN_LENGTH = 1 << 14
"""Offsets that are repeated in memory: with the descriptors that they are added to, they fit a core's cache."""

_ADDRESS = np.dtype(np.uint64)

_MAX_ALIGNMENT = 4096


class Direction(Enum):
    """Which end of a mapping is read: STORE reads the worker's page, LOAD the canonical page."""

    STORE = "store"
    LOAD = "load"


class Descriptors:
    """Room for `capacity` copies: `sources`, `destinations` (addresses) and `sizes` (bytes), uint64 `[capacity]`.

    `sizes` is read-only to everyone but `CopyPlan.fill`, which leaves alone what it wrote in the call before. `over`
    makes descriptors of arrays that another library owns, of pinned memory say, without a copy.
    """

    def __init__(self, capacity: int) -> None:
        """Raises `InvariantError` for a capacity below 1."""
        if capacity < 1:
            raise InvariantError(f"descriptors with room for {capacity} copies hold nothing")
        self._bind(*np.zeros((3, capacity), dtype=np.uint64))

    @classmethod
    def over(cls, sources: np.ndarray, destinations: np.ndarray, sizes: np.ndarray) -> "Descriptors":
        """Views of int64 or uint64 arrays of one length. Raises `InvariantError` for others."""
        arrays = (sources, destinations, sizes)
        right = all(a.ndim == 1 and a.dtype in (np.int64, np.uint64) and a.flags.c_contiguous for a in arrays)
        if not right or not len(sources) == len(destinations) == len(sizes) > 0:
            raise InvariantError("descriptors are three contiguous arrays of 64-bit integers of one length")
        made = cls.__new__(cls)
        made._bind(*(array.view(np.uint64) for array in arrays))
        return made

    def _bind(self, sources: np.ndarray, destinations: np.ndarray, sizes: np.ndarray) -> None:
        self.sources, self.destinations, self._writable_sizes = sources, destinations, sizes
        self.sizes = sizes.view()
        self.sizes.flags.writeable = False
        # Whose sizes were written last, from which descriptor on and for how many pages. Changed by `CopyPlan.fill`.
        self._sized_by: CopyPlan | None = None
        self._sized_at = self._sized_pages = 0

    @property
    def capacity(self) -> int:
        """Copies that there is room for."""
        return len(self.sources)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one layer's pages lie for a plan of several layers: added to a block's and a page's address."""

    local_offset: int
    canonical_offset: int


class CopyPlan:
    """The fragments of one mapping's page, or of several layers' pages that share block and page addresses.

    `num_fragments` and `total_bytes` are those of one page. `alignment` (a power of two up to 4096) divides every
    offset and size, and `min_fragment_bytes` and `max_fragment_bytes` bound the sizes: together they choose a way to
    copy.
    """

    def __init__(self, mapping: LayerMapping, direction: Direction = Direction.STORE) -> None:
        self._expand([mapping], [Placement(0, 0)], direction)

    @classmethod
    def of_layers(
        cls, mappings: Sequence[LayerMapping], placements: Sequence[Placement], direction: Direction
    ) -> "CopyPlan":
        """A plan that copies a block's pages of all layers: one call for the block, however many layers there are.

        For layers whose blocks lie equally far apart; `placements[l]` is where layer l's begin. The writer filter must
        suit all, so their replication is the same. Raises `InvariantError` otherwise.
        """
        if not mappings or len(mappings) != len(placements):
            raise InvariantError(f"{len(mappings)} mappings do not go with {len(placements)} placements")
        if len({(mapping.replication, mapping.replica) for mapping in mappings}) > 1:
            raise InvariantError("layers that are replicated differently are not written by the same ranks")
        plan = cls.__new__(cls)
        plan._expand(mappings, placements, direction)
        return plan

    def _expand(self, mappings: Sequence[LayerMapping], placements: Sequence[Placement], direction: Direction) -> None:
        pieces = [mapping.pieces() for mapping in mappings]
        local = np.concatenate([p.local_offsets + at.local_offset for p, at in zip(pieces, placements, strict=True)])
        canonical = np.concatenate(
            [p.canonical_offsets + at.canonical_offset for p, at in zip(pieces, placements, strict=True)]
        )
        sizes = np.concatenate([p.sizes for p in pieces])
        if not len(sizes) or min(local.min(), canonical.min()) < 0 or sizes.min() < 1:
            raise InvariantError("a plan needs fragments of at least one byte, at offsets that are not negative")
        self.num_fragments = len(sizes)
        self.total_bytes = int(sizes.sum())
        self.min_fragment_bytes, self.max_fragment_bytes = int(sizes.min()), int(sizes.max())
        self.alignment = gcd(_MAX_ALIGNMENT, *np.unique(np.concatenate([local, canonical, sizes])).tolist())
        ends = (local, canonical) if direction is Direction.STORE else (canonical, local)
        self._is_few = self.num_fragments <= _FEW_FRAGMENTS
        write: Callable[[np.ndarray, np.ndarray, Sequence[np.ndarray]], None] = self._by_page
        # Offsets as `write` takes them: one array for each fragment, or one for several pages.
        self._pages_at_once = max(1, _PATTERN_LENGTH // self.num_fragments)
        self._offsets: list[Sequence[np.ndarray]] = [[np.tile(e.astype(np.uint64), self._pages_at_once)] for e in ends]
        if self._is_few:
            write = self._by_fragment
            self._offsets = [[np.array(offset, dtype=np.uint64) for offset in end] for end in ends]
        self._write = write
        self._sizes = sizes.astype(np.uint64).reshape((-1, 1) if self._is_few else (1, -1))
        self._is_prefix_stable = not self._is_few or self.min_fragment_bytes == self.max_fragment_bytes

    def fill(self, descriptors: Descriptors, at: int, source_bases: np.ndarray, destination_bases: np.ndarray) -> int:
        """Write the fragments of `n` pages from descriptor `at` on, and return the index past the last one.

        `source_bases`, `destination_bases`: uint64 `[n]`, the addresses at which the pages begin. Descriptors come page
        by page, or fragment by fragment where a page has few. Raises `InvariantError` when there is no room, or for
        arrays of other types or of different lengths, with nothing written.
        """
        num_pages = len(source_bases)
        end = at + num_pages * self.num_fragments
        if len(destination_bases) != num_pages or not 0 <= at <= end <= len(descriptors.sources):
            raise InvariantError(
                f"{num_pages} x {self.num_fragments} copies to {len(destination_bases)} pages do not fit from {at} on "
                f"into {descriptors.capacity} descriptors"
            )
        if source_bases.dtype != _ADDRESS or destination_bases.dtype != _ADDRESS:
            raise InvariantError(
                f"addresses are uint64, not {source_bases.dtype} and {destination_bases.dtype}: to convert them would "
                "take a buffer"
            )
        self._write(descriptors.sources[at:end], source_bases, self._offsets[0])
        self._write(descriptors.destinations[at:end], destination_bases, self._offsets[1])
        if not self._has_sized(descriptors, at, num_pages):
            shape = (self.num_fragments, num_pages) if self._is_few else (num_pages, self.num_fragments)
            descriptors._writable_sizes[at:end].reshape(shape)[:] = self._sizes
            descriptors._sized_by, descriptors._sized_at, descriptors._sized_pages = self, at, num_pages
        return end

    def _has_sized(self, descriptors: Descriptors, at: int, num_pages: int) -> bool:
        """Whether the sizes stand there from the call before, for these pages or more."""
        if descriptors._sized_by is not self or descriptors._sized_at != at:
            return False
        more = descriptors._sized_pages - num_pages
        return more == 0 or (more > 0 and self._is_prefix_stable)

    def _by_fragment(self, out: np.ndarray, bases: np.ndarray, offsets: Sequence[np.ndarray]) -> None:
        num_pages, at = len(bases), 0
        for offset in offsets:
            np.add(bases, offset, out[at : at + num_pages])
            at += num_pages

    def _by_page(self, out: np.ndarray, bases: np.ndarray, offsets: Sequence[np.ndarray]) -> None:
        (pattern,) = offsets
        step, num_fragments = self._pages_at_once, self.num_fragments
        for first in range(0, len(bases), step):
            pages = bases[first : first + step]
            part = out[first * num_fragments : (first + len(pages)) * num_fragments]
            part.reshape(len(pages), num_fragments)[:] = pages[:, None]
            np.add(part, pattern[: len(part)], part)


class WriterFilter:
    """Keeps the pages that this rank is elected to write, for stores of up to `capacity` pages. Loads need none.

    Allocates nothing per call: kept addresses go to arrays of its own, which the next call overwrites.
    """

    def __init__(self, mapping: LayerMapping, capacity: int) -> None:
        self._replication, self._replica = np.uint64(mapping.replication), np.uint64(mapping.replica)
        self._capacity = capacity
        self._sources, self._destinations = np.zeros((2, capacity), dtype=np.uint64)
        self._kept, self._places = np.zeros((2, capacity), dtype=np.uint64)
        self._select = self._all if mapping.replication == 1 else self._elected

    def select(
        self, page_ids: np.ndarray, source_bases: np.ndarray, destination_bases: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The bases of the pages to write, in order: the arguments themselves, or views valid until the next call.

        uint64 `[n]` each. Raises `InvariantError` for more pages than the capacity, or arrays of different lengths.
        """
        if not len(page_ids) == len(source_bases) == len(destination_bases) <= self._capacity:
            raise InvariantError(
                f"{len(page_ids)} page ids for {len(source_bases)} sources and {len(destination_bases)} destinations, "
                f"where {self._capacity} pages fit"
            )
        return self._select(page_ids, source_bases, destination_bases)

    def _all(
        self, page_ids: np.ndarray, source_bases: np.ndarray, destination_bases: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return source_bases, destination_bases

    def _elected(
        self, page_ids: np.ndarray, source_bases: np.ndarray, destination_bases: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        count = len(page_ids)
        kept, places = self._kept[:count], self._places[:count]
        # 1 for a page to write, 0 for another.
        np.remainder(page_ids, self._replication, kept)
        np.bitwise_xor(kept, self._replica, kept)
        np.minimum(kept, np.uint64(1), out=kept)
        np.bitwise_xor(kept, np.uint64(1), kept)
        # A page goes to the place after those kept before it. Pages that are not kept go there too, but the page that
        # is kept next comes later and is what stays.
        np.add.accumulate(kept, out=places)
        num_kept = int(places[-1]) if count else 0
        np.subtract(places, kept, places)
        index = places.view(np.int64)
        self._sources[index] = source_bases
        self._destinations[index] = destination_bases
        return self._sources[:num_kept], self._destinations[:num_kept]
