"""Collectives of ranks that share a GPU: every tensor passes through host memory, where gloo sees it.

NCCL wants a GPU for every rank. Gloo takes a GPU's tensors for some collectives only: an all-gather as DTensor asks for
it has gloo read the GPU's addresses as if they were the host's, and the process dies. So gloo never sees such a tensor
here. A copy to the host waits for the stream in which the tensor is computed; the copy back is in the stream that goes
on with it. What is not offered here raises, and is never passed on to gloo.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

# Its groups and works are public, but its annotations do not say so.
dist: Any = distributed_c10d

NAME = "hisparse_host"
"""The backend, as `init_process_group` is told."""


def register() -> None:
    """Have torch know the backend. Idempotent."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, HostStagedGroup, devices=["cpu", "cuda"])


class HostStagedGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group for tensors of any device. Its collectives return when they are done.

    Names, arguments and results of its methods are those of torch's own groups: torch calls them.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._group_name = ""
        self.num_collectives = 0

    def getBackendName(self) -> str:
        return NAME

    # Torch's own groups leave their name to their backends, of which this one has none.

    @property
    def group_name(self) -> str:
        return self._group_name

    def getGroupName(self) -> str:
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    setGroupName = _set_group_name

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Any:
        staged = [to_host(tensor) for tensor in tensors]
        self._wait(self._gloo.allreduce(staged, options if options is not None else dist.AllreduceOptions()))
        return _given_back(staged, tensors)

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], options: Any = None
    ) -> Any:
        staged = [[host_like(tensor) for tensor in each] for each in outputs]
        self._wait(self._gloo.allgather(staged, [to_host(tensor) for tensor in inputs]))
        return _given_back(
            [tensor for each in staged for tensor in each], [tensor for each in outputs for tensor in each]
        )

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, options: Any = None) -> Any:
        staged = host_like(output)
        self._wait(self._gloo._allgather_base(staged, to_host(input)))
        return _given_back([staged], [output])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any = None
    ) -> Any:
        for output, part in zip(outputs, inputs, strict=True):
            self._allgather_base(output, part)
        return _Done()

    # Later versions of torch have other names for the last two.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Any:
        staged = [to_host(tensor) for tensor in tensors]
        self._wait(self._gloo.broadcast(staged, options if options is not None else dist.BroadcastOptions()))
        return _given_back(staged, tensors)

    def barrier(self, options: Any = None) -> Any:
        # Without options: those of a GPU's barrier name devices.
        self._wait(self._gloo.barrier())
        return _Done()

    def _wait(self, work: Any) -> None:
        work.wait()
        self.num_collectives += 1


class _Done(dist.Work):  # type: ignore[misc]
    """A collective that is over: what follows it in the caller's stream sees its results."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([])
        return future


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, contiguous. Returns when its bytes are there, behind what the current stream computes."""
    staged = host_like(tensor)
    staged.copy_(tensor)
    return staged


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor of that shape and dtype, contiguous."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _given_back(staged: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> Any:
    """Put results where they are wanted, in the current stream of that device. Waits, as any copy from pageable memory
    does: the host memory is about to go."""
    for tensor, host in zip(wanted, staged, strict=True):
        tensor.copy_(host)
    return _Done()
