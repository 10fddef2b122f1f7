"""Portable GPU kernels in Triton: attention over resolved rows, packing of new rows, the indexer's scores over paged
keys.

Importing a module of this package imports triton, so callers do it only where a GPU is used (`require_triton`).
Every output row depends on its own inputs alone, bit for bit: never on the rows beside it, nor on how many there are.
"""

import importlib.util

from hisparse.errors import BackendError


def require_triton() -> None:
    """Raises `BackendError` when triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise BackendError("the package triton was not found: install it with: pip install 'hisparse[cuda]'")
