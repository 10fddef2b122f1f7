"""`CudaBackend`: what a worker needs, on one NVIDIA GPU."""

import torch

from hisparse.errors import BackendError
from hisparse.kernels.contract import Resolver
from hisparse.kernels.cuda.resolver import CudaResolver
from hisparse.worker.cuda import driver, numa
from hisparse.worker.cuda.host_memory import PinnedMapping, PinRequest
from hisparse.worker.cuda.side import CudaSideStream
from hisparse.worker.cuda.stream import CudaStream
from hisparse.worker.host_memory import HostMemory
from hisparse.worker.memory_limits import require_memory
from hisparse.worker.side import SideStream
from hisparse.worker.stream import CopyStream


class CudaBackend:
    """One CUDA device, host memory that is pinned for it, and the resolver's kernels."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        """Raises `BackendError` when there is no usable device."""
        if not torch.cuda.is_available():
            raise BackendError("no CUDA device is usable: install a driver and a CUDA build of torch, or use the CPU")
        # An empty tensor says which device "cuda" is, and has torch open it.
        self._device = torch.empty(0, device=device).device

    @property
    def device(self) -> torch.device:
        return self._device

    def allocate_device(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise BackendError(
                f"cannot allocate {num_bytes} bytes for the device's KV: {free} of the GPU's {total} bytes are free. "
                "Make its budget smaller, or free memory"
            ) from error

    def allocate_host(self, num_bytes: int) -> HostMemory:
        require_memory("the host pool", num_bytes)
        return PinnedMapping(PinRequest(num_bytes, self._device.index, self._node()))

    def make_stream(self) -> CopyStream:
        return CudaStream(self._device)

    def make_side_stream(self) -> SideStream:
        return CudaSideStream(self._device)

    def make_resolver(self) -> Resolver:
        return CudaResolver(self._device)

    def _node(self) -> int | None:
        """The NUMA node of the GPU, where the machine has several."""
        return numa.node_of_device(driver.bus_id(self._device.index)) if len(numa.nodes()) > 1 else None
