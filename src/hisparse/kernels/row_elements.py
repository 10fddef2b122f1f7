"""How attention sees the rows of a cache. Needs no GPU package."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowElements:
    """How rows are made up: `lora` latents, then `rope` rotated key elements, of `dtype`; uint8 is `fp8_ds_mla`."""

    dtype: torch.dtype
    lora: int
    rope: int

    @property
    def is_packed(self) -> bool:
        """Whether rows are `fp8_ds_mla`."""
        return self.dtype is torch.uint8
