"""Small host values on their way to a device, without the host ever waiting for it."""

from collections.abc import Sequence

import torch


def upload(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` as a tensor `[len(values)]` of `dtype` on `device`.

    To a GPU they travel through pinned memory and in the current stream: a pageable copy would make the host wait.
    torch's allocator keeps the pinned memory from being used again before the copy is done.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)
