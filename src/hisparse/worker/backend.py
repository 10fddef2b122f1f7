"""What a worker needs of a machine, and the CPU's answer."""

from typing import Protocol

import torch

from hisparse.errors import BackendError
from hisparse.kernels.contract import Resolver
from hisparse.kernels.reference import ReferenceResolver
from hisparse.worker.host_memory import AnonymousMapping, HostMemory
from hisparse.worker.memory_limits import require_memory
from hisparse.worker.side import InlineSideStream, SideStream
from hisparse.worker.stream import CopyDelay, CopyStream, CpuStream


class Backend(Protocol):
    """One kind of device. A worker makes each of these things once."""

    @property
    def device(self) -> torch.device:
        """Where tables, slab and replacement state live."""
        ...

    def allocate_device(self, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]`, zero at first. Raises `BackendError` when there is no room."""
        ...

    def allocate_host(self, num_bytes: int) -> HostMemory:
        """Host memory that the device's copies and resolver can reach.

        Raises `CapacityError` when there is less memory left, `BackendError` when it cannot be had.
        """
        ...

    def make_stream(self) -> CopyStream:
        """The stream that carries the worker's page copies."""
        ...

    def make_side_stream(self) -> SideStream:
        """The stream that loads followers' rows beside the forward pass."""
        ...

    def make_resolver(self) -> Resolver:
        """The resolver for tensors on `device`."""
        ...


class CpuBackend:
    """A device that is ordinary memory, with copies that are late by `delay` and the reference resolver."""

    def __init__(self, delay: CopyDelay | None = None) -> None:
        self._delay = delay if delay is not None else CopyDelay()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def allocate_device(self, num_bytes: int) -> torch.Tensor:
        require_memory("the device's KV", num_bytes)
        try:
            return torch.zeros(num_bytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            raise BackendError(
                f"cannot allocate {num_bytes} bytes for the device's KV: make its budget smaller"
            ) from error

    def allocate_host(self, num_bytes: int) -> HostMemory:
        require_memory("the host pool", num_bytes)
        return AnonymousMapping(num_bytes)

    def make_stream(self) -> CopyStream:
        return CpuStream(self._delay)

    def make_side_stream(self) -> SideStream:
        return InlineSideStream()

    def make_resolver(self) -> Resolver:
        return ReferenceResolver()
