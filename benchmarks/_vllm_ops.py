"""vLLM's released operators on the inputs of one of our scenarios, from a shared library that the user names.

    pip download --no-deps vllm && unzip -o vllm-*.whl 'vllm/*.so'
    python benchmarks/resolver.py --vllm-lib vllm/_C_stable_libtorch.abi3.so

The operators take positional arguments whose meaning their schema does not tell, so the types that it does tell are
compared with those that this file was written for; any other schema ends the run with a line that shows it.
"""

from pathlib import Path
from typing import Any

import torch

RESOLVE = "hisparse_resolve_residency"
GATHER = "hisparse_gather_compact"
_RESOLVE_TYPES = "TTTTTTTTiTTTiTTiTTTTTTi"  # then integers that may be 0
_GATHER_TYPES = "TTTTT"


def load(path: str) -> tuple[Any, Any]:
    """Both operators, resolve first. Raises `SystemExit` when the library or an operator is not what is expected."""
    if not Path(path).is_file():
        raise SystemExit(f"--vllm-lib {path}: no such file")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise SystemExit(f"--vllm-lib {path} cannot be loaded by torch {torch.__version__}: {error}") from error
    return _operator(RESOLVE, _RESOLVE_TYPES), _operator(GATHER, _GATHER_TYPES)


def _operator(name: str, expected: str) -> Any:
    try:
        operator = getattr(torch.ops._C_cache_ops, name).default
    except AttributeError as error:
        raise SystemExit(f"the library has no operator _C_cache_ops::{name}") from error
    types = "".join(letter(str(argument.type)) for argument in operator._schema.arguments)
    if not types.startswith(expected) or types[len(expected) :].strip("i"):
        raise SystemExit(f"_C_cache_ops::{name} has a schema that this benchmark does not know: {operator._schema}")
    return operator


def letter(type_name: str) -> str:
    """T for a tensor or none, i for an integer, ? for anything else."""
    if "Tensor" in type_name and "List" not in type_name:
        return "T"
    return "i" if type_name in ("int", "Optional[int]") else "?"


class VllmResolver:
    """The two operators with the state that they keep, for one query row per request and nothing resident."""

    def __init__(
        self, path: str, host: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], sizes: "Sizes"
    ) -> None:
        """`host`: pinned uint8 `[rows, row_bytes]`. `tables`: int32 host and hot blocks by request, block 0 unused."""
        self._resolve, self._gather = load(path)
        self._host, (self._host_table, self._hot_table) = host, tables
        requests, topk, hot_rows, block = sizes
        self._sizes = sizes
        blocks = int(self._hot_table.max()) + 1
        self.hot = torch.zeros(blocks, block, host.shape[1], dtype=torch.uint8, device="cuda")
        self._held = torch.full((requests, hot_rows), -1, dtype=torch.int32, device="cuda")
        self._order = torch.arange(hot_rows, dtype=torch.int16, device="cuda").repeat(requests, 1)
        self._requests = torch.arange(requests, dtype=torch.int32, device="cuda")
        self._slots, self.rows, self._from, self._to = (
            torch.full((requests, topk), -1, dtype=torch.int32, device="cuda") for _ in range(4)
        )
        self._valid, self.counts = (torch.zeros(requests, dtype=torch.int32, device="cuda") for _ in range(2))

    def run(self, positions: torch.Tensor) -> torch.Tensor:
        """Resolve int32 `[requests, topk]` positions and copy. Returns physical rows of `hot`."""
        block = self._sizes[3]
        arguments = [
            *(self._host, self.hot, self._hot_table, positions, self._slots, self._held, self._order),
            *(self._requests, self._sizes[2], None, None, self.rows, block, self._requests, self._host_table, block),
            *(None, self._valid, self._from, self._to, self.counts, None, 0),
        ]
        self._call(self._resolve, arguments)
        self._call(self._gather, [self._host, self.hot, self._from, self._to, self.counts])
        return self.rows

    @staticmethod
    def _call(operator: Any, arguments: list[Any]) -> None:
        missing = operator._schema.arguments[len(arguments) :]
        operator(*arguments, *(0 for argument in missing if not argument.has_default_value()))


Sizes = tuple[int, int, int, int]
"""Requests, positions of each, hot rows of each, rows of a block."""
