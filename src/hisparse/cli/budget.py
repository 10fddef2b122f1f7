"""The device budget in bytes, from what the user wrote: a size, a share of the KV, everything, or nothing at all."""

import re
from dataclasses import dataclass

from hisparse.config import TAIL_PAGES, ModelGeometry, parse_size
from hisparse.errors import InputError
from hisparse.geometry import ceil_div, device_blocks

EVERYTHING = "all"
DEFAULT_SHARE = 0.25
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Workload:
    """What the budget has to carry. `total_tokens` counts every prompt token and every token that may be generated."""

    model: ModelGeometry
    block_size: int
    hot_rows: int
    staging_rows: int
    num_running: int
    total_tokens: int

    @property
    def total_bytes(self) -> int:
        """Payload of all rows of all layers at the end of the longest possible run."""
        return self.total_tokens * self.model.num_layers * self.model.row.row_bytes

    @property
    def all_host_backed_bytes(self) -> int:
        """The slab in which every running request decodes at once, each with all but its last pages on the host."""
        blocks = 1 + ceil_div(self.staging_rows, self.block_size)
        blocks += self.num_running * (ceil_div(self.hot_rows, self.block_size) + TAIL_PAGES)
        return blocks * device_blocks(self.model.row, self.model.num_layers, self.block_size).payload_bytes


def check_budget(text: str | None) -> None:
    """Raise `InputError` unless `device_budget` can read `text`: no model needed, so that a typo fails at once."""
    if text is None or text == EVERYTHING:
        return
    percent = _PERCENT.fullmatch(text)
    if percent is None:
        parse_size(text, "device KV budget")
    elif not 0 < float(percent.group(1)) <= 100:
        raise InputError(f"device KV budget {text!r} must be above 0% and at most 100%")


def device_budget(text: str | None, workload: Workload) -> int | None:
    """Bytes of the slab, or None for as much as everything resident takes.

    `text` is a size ("512KiB"), a share of the workload's KV ("15%"), "all", or None: a quarter of the KV, or what
    lets every running request decode at once if that is more. Raises `InputError` as `check_budget` does.
    """
    check_budget(text)
    if text == EVERYTHING:
        return None
    if text is None:
        return max(int(workload.total_bytes * DEFAULT_SHARE), workload.all_host_backed_bytes)
    percent = _PERCENT.fullmatch(text)
    if percent is None:
        return parse_size(text, "device KV budget")
    return int(workload.total_bytes * float(percent.group(1)) / 100)
