"""Prefix identity: a key per full page that covers the page's tokens and all before them.

`key[i] = xxh3_128(key[i-1] ‖ tokens of page i as int32)`, starting from a root that names what else the KV depends
on (model, weights, dtype, block size). The hash is fast, not cryptographic: whoever can choose prompts *and* wants a
collision can search for one, so replicas that serve mutually hostile tenants pass a secret `salt` per tenant.
"""

from array import array
from collections.abc import Sequence

import xxhash

KEY_BYTES = 16


def root_key(*parts: str | int, salt: bytes = b"") -> bytes:
    """The key before the first page. `parts` are length-prefixed, so that no two lists of parts collide."""
    digest = xxhash.xxh3_128(salt)
    for part in parts:
        raw = str(part).encode()
        digest.update(len(raw).to_bytes(4, "little"))
        digest.update(raw)
    return digest.digest()


def extend_keys(keys: list[bytes], tokens: "array[int]", block_size: int, num_pages: int, root: bytes) -> None:
    """Append to `keys` until it covers the first `num_pages` pages of `tokens` (array of typecode "i")."""
    page_bytes = block_size * tokens.itemsize
    raw = memoryview(tokens).cast("B")
    digest = xxhash.xxh3_128_digest
    parent = keys[-1] if keys else root
    for start in range(len(keys) * page_bytes, num_pages * page_bytes, page_bytes):
        parent = digest(parent + raw[start : start + page_bytes])
        keys.append(parent)


def page_keys(tokens: Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """Keys of all full pages of `tokens`."""
    keys: list[bytes] = []
    column = tokens if isinstance(tokens, array) else array("i", tokens)
    extend_keys(keys, column, block_size, len(column) // block_size, root)
    return keys
