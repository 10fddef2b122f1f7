"""Proof, at start-up, that the ranks' mappings store every byte of every canonical page once and load it where it was.

A proof looks at the mappings alone, not at how they came about. Every rank makes it for the whole group from its own
tensors, and gets a digest of what all ranks do to the canonical page; ranks exchange these and compare them, so that
one which was configured otherwise, or has other tensors, is found before the first byte moves. Whatever fails raises
`LayoutError`: there is no fallback to another layout.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hisparse.errors import LayoutError
from hisparse.offload.layout import DIGEST_BYTES, LayerMapping, joined


@dataclass(frozen=True, slots=True)
class Certificate:
    """One rank's proved mappings, by layer, and the digest (16 bytes) of what all ranks do with all layers."""

    mappings: tuple[LayerMapping, ...]
    digest: bytes

    def agree(self, digests: Sequence[bytes]) -> None:
        """`digests[r]`: what rank r has. Raises `LayoutError` that names the ranks which have another."""
        other = [rank for rank, digest in enumerate(digests) if digest != self.digest]
        if other:
            raise LayoutError(
                f"ranks {other} of {len(digests)} map canonical pages otherwise than this one: their tensors, heads, "
                "block size or parallel options differ"
            )


def certify_layers(groups: Sequence[Sequence[LayerMapping]]) -> bytes:
    """`groups[l][r]`: layer l on rank r. The digest of all layers. Raises `LayoutError` like `certify`."""
    if not groups:
        raise LayoutError("there are no layers to certify")
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for mappings in groups:
        digest.update(certify(mappings))
    return digest.digest()


def certify(mappings: Sequence[LayerMapping]) -> bytes:
    """`mappings[r]`: one layer on rank r, all ranks. The digest of what they do to the canonical page: 16 bytes.

    Raises `LayoutError` unless every rank's runs cover its page once and stay within the canonical page, and the ranks
    that write a page tile it, whichever replicas are elected.
    """
    if not mappings:
        raise LayoutError("there are no ranks to certify")
    first = mappings[0]
    for rank, mapping in enumerate(mappings):
        _check_alike(rank, mapping, first)
        _check_rank(rank, mapping)
    for turn in range(first.replication):
        _check_tiles([mapping for mapping in mappings if mapping.writes(turn)], turn)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for mapping in mappings:
        digest.update(mapping.canonical_digest())
    return digest.digest()


def _check_alike(rank: int, mapping: LayerMapping, first: LayerMapping) -> None:
    for name in ("layer", "canonical_page_bytes", "replication"):
        if getattr(mapping, name) != getattr(first, name):
            raise LayoutError(
                f"rank {rank} has {name} {getattr(mapping, name)} where rank 0 has {getattr(first, name)}"
            )
    if not 0 <= mapping.replica < mapping.replication:
        raise LayoutError(f"layer {mapping.layer}: rank {rank} is replica {mapping.replica} of {mapping.replication}")


def _check_rank(rank: int, mapping: LayerMapping) -> None:
    where = f"layer {mapping.layer}, rank {rank}"
    if any(min(run.size, run.count) < 1 for run in mapping.runs):
        raise LayoutError(f"{where}: a run has no bytes")
    pieces = mapping.pieces()
    offsets, sizes = _ascending(pieces.local_offsets, pieces.sizes)
    _check_disjoint(f"{where}: the worker's page", offsets, sizes)
    if int(sizes.sum()) != mapping.local_page_bytes:
        raise LayoutError(f"{where}: runs cover {int(sizes.sum())} of {mapping.local_page_bytes} bytes of the page")
    offsets, sizes = _ascending(pieces.canonical_offsets, pieces.sizes)
    _check_disjoint(f"{where}: the canonical page", offsets, sizes)
    if offsets[0] < 0 or int(offsets[-1] + sizes[-1]) > mapping.canonical_page_bytes:
        raise LayoutError(f"{where}: runs leave the canonical page of {mapping.canonical_page_bytes} bytes")


def _check_tiles(writers: Sequence[LayerMapping], turn: int) -> None:
    if not writers:
        raise LayoutError(f"no rank is elected to write pages of turn {turn}")
    pieces = [mapping.pieces() for mapping in writers]
    offsets, sizes = _ascending(
        np.concatenate([piece.canonical_offsets for piece in pieces]), np.concatenate([piece.sizes for piece in pieces])
    )
    where = f"layer {writers[0].layer}, page turn {turn}"
    _check_disjoint(f"{where}: what the elected writers store", offsets, sizes)
    whole = joined(offsets, sizes)
    if whole.tolist() != [[0], [writers[0].canonical_page_bytes]]:
        raise LayoutError(
            f"{where}: the elected writers store {int(sizes.sum())} of {writers[0].canonical_page_bytes} bytes"
        )


def _ascending(offsets: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(offsets, kind="stable")
    return offsets[order], sizes[order]


def _check_disjoint(what: str, offsets: np.ndarray, sizes: np.ndarray) -> None:
    overlaps = np.flatnonzero(offsets[1:] < offsets[:-1] + sizes[:-1])
    if len(overlaps):
        raise LayoutError(f"{what} has byte {int(offsets[overlaps[0] + 1])} twice")
