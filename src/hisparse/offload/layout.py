"""The words in which layouts of KV are described: what a tensor looks like, and what maps it to a canonical page.

A *page* is one block of one layer. A worker has it as its cache tensor has it; the canonical page has all KV heads and
all tokens of all ranks, in an order that the family names. Sizes and offsets in bytes, unless a name says otherwise.
"""

import hashlib
import struct
from dataclasses import dataclass
from enum import Enum

import numpy as np

from hisparse.errors import LayoutError

DIGEST_BYTES = 16


class Family(Enum):
    """The order of the bytes of a page, outermost axis first.

    packed: a head's key and value lie together; split: all keys, then all values. NHD: tokens outside of heads; HND:
    heads outside of tokens. LATENT: one row per token, the same on every rank (MLA latents, indexer keys).
    """

    PACKED_NHD = "packed-nhd"
    PACKED_HND = "packed-hnd"
    SPLIT_NHD = "split-nhd"
    SPLIT_HND = "split-hnd"
    LATENT = "latent"

    @property
    def axes(self) -> str:
        """Axes of a page in the order of its bytes: K key/value, T token, H head, D bytes of a head or row."""
        return _FAMILY_AXES[self]


_FAMILY_AXES = {
    Family.PACKED_NHD: "THKD",
    Family.PACKED_HND: "HTKD",
    Family.SPLIT_NHD: "KTHD",
    Family.SPLIT_HND: "KHTD",
    Family.LATENT: "TD",
}


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What one layer stores, of all ranks together, in blocks of `block_tokens` tokens at each rank.

    `head_bytes`: one head's key of one token; its value takes as many. LATENT: one head, `head_bytes` is the row.
    Raises `LayoutError` for a size below 1 or a latent with heads.
    """

    family: Family
    num_kv_heads: int
    head_bytes: int
    block_tokens: int

    def __post_init__(self) -> None:
        if min(self.num_kv_heads, self.head_bytes, self.block_tokens) < 1:
            raise LayoutError(
                f"{self.num_kv_heads} KV heads of {self.head_bytes} bytes in blocks of {self.block_tokens} tokens "
                "hold nothing: every size must be at least 1"
            )
        if self.family is Family.LATENT and self.num_kv_heads != 1:
            raise LayoutError(f"a latent row has no heads, but num_kv_heads is {self.num_kv_heads}: it must be 1")

    @property
    def num_kinds(self) -> int:
        """Entries of the key/value axis: 2, or 1 for a latent."""
        return 1 if self.family is Family.LATENT else 2

    @property
    def token_bytes(self) -> int:
        """What one token takes, all heads together."""
        return self.num_kinds * self.num_kv_heads * self.head_bytes

    def canonical_page_bytes(self, context_ranks: int = 1) -> int:
        """The canonical page when `context_ranks` (dcp * pcp) ranks share the tokens. No other parallelism enters."""
        return self.token_bytes * self.block_tokens * context_ranks


@dataclass(frozen=True, slots=True)
class TensorView:
    """A layer's cache tensor as it really is.

    `shape` in elements, `strides_bytes` as long, `element_bytes` the size of one element. `declared` names every axis
    with a letter: B block, K key/value, T token, H head, D element ("BTHD", "KBTHD", "BHTKD" …). Where a family is
    packed and there is no K, D holds a head's key, then its value. The tensor's first byte is offset 0.
    """

    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    element_bytes: int
    declared: str

    @property
    def num_blocks(self) -> int:
        """Entries of the axis B."""
        return self.shape[self.declared.index("B")]

    @property
    def block_stride(self) -> int:
        """From one block to the next."""
        return self.strides_bytes[self.declared.index("B")]


@dataclass(frozen=True, slots=True)
class Run:
    """`count` pieces of `size` bytes: at `local_offset` and `canonical_offset`, and on by the strides.

    The local offset counts from the first byte of a worker's block, the canonical one from that of the page.
    """

    local_offset: int
    canonical_offset: int
    size: int
    count: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """Every piece of some runs: int64 `[n]` each, in the order of the runs."""

    local_offsets: np.ndarray
    canonical_offsets: np.ndarray
    sizes: np.ndarray


@dataclass(frozen=True, slots=True)
class LayerMapping:
    """Which bytes of a worker's page are which of the canonical page, for one layer on one rank.

    `replication` ranks hold the same bytes; this one is number `replica` of them.
    """

    layer: int
    local_page_bytes: int
    canonical_page_bytes: int
    runs: tuple[Run, ...]
    replication: int
    replica: int

    def writes(self, page_id: int) -> bool:
        """Whether this rank stores the canonical page with this number: its replicas take turns."""
        return page_id % self.replication == self.replica

    def pieces(self) -> Pieces:
        """The runs, piece by piece."""
        counts = np.array([run.count for run in self.runs], dtype=np.int64)
        index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)

        def of(name: str) -> np.ndarray:
            return np.repeat(np.array([getattr(run, name) for run in self.runs], dtype=np.int64), counts)

        return Pieces(
            of("local_offset") + index * of("local_stride"),
            of("canonical_offset") + index * of("canonical_stride"),
            of("size"),
        )

    def digest(self) -> bytes:
        """16 bytes over every field."""
        return self._hash(local=True)

    def canonical_digest(self) -> bytes:
        """16 bytes over what other ranks rely on: everything but where the bytes lie at this one."""
        return self._hash(local=False)

    def _hash(self, *, local: bool) -> bytes:
        head = (self.layer, self.local_page_bytes, self.canonical_page_bytes, self.replication, self.replica)
        digest = hashlib.blake2b(struct.pack("<5q", *head), digest_size=DIGEST_BYTES)
        if local:
            for run in self.runs:
                fields = (run.local_offset, run.canonical_offset, run.size)
                digest.update(struct.pack("<6q", *fields, run.count, run.local_stride, run.canonical_stride))
        else:
            digest.update(np.ascontiguousarray(joined(*self._canonical_pieces())).astype("<i8").tobytes())
        return digest.digest()

    def _canonical_pieces(self) -> tuple[np.ndarray, np.ndarray]:
        pieces = self.pieces()
        order = np.argsort(pieces.canonical_offsets, kind="stable")
        return pieces.canonical_offsets[order], pieces.sizes[order]


def joined(offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Ascending intervals with neighbours that touch made one: int64 `[2, m]`, offsets and sizes."""
    if not len(offsets):
        return np.zeros((2, 0), dtype=np.int64)
    first = np.append(True, offsets[1:] != offsets[:-1] + sizes[:-1])
    starts = np.flatnonzero(first)
    return np.stack([offsets[starts], np.add.reduceat(sizes, starts)])
