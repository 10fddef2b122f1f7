"""The collectives of ranks, done by a group of gloo's and by one that passes through the host."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from hisparse.engine.tp.host_group import HostStagedGroup

dist: Any = torch.distributed
TIMEOUT = timedelta(seconds=30)
Collective = Callable[[Any, torch.Tensor], torch.Tensor]
"""Done with a group and one tensor; returns the result."""


@dataclass
class Watched:
    """A group of gloo's that notes where the tensors are that it is given."""

    gloo: Any
    addresses: set[int]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def collective(*arguments: Any) -> Any:
            tensors = _tensors(arguments)
            assert {tensor.device.type for tensor in tensors} <= {"cpu"}
            self.addresses |= {tensor.data_ptr() for tensor in tensors}
            return getattr(self.gloo, name)(*arguments)

        return collective


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def assert_like_gloo(collective: Collective, dtype: torch.dtype, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Two ranks, as threads, do `collective` with transposed tensors; gloo does it for the same ones on the CPU.

    `make`: what brings a rank's tensor to the device on which the collective is tried, in the current stream.
    """
    stores = [dist.HashStore(), dist.HashStore()]

    def rank(number: int) -> None:
        original = (torch.arange(24).reshape(6, 4) * (number + 1)).to(dtype).t()
        gloo = dist.ProcessGroupGloo(stores[0], number, 2, TIMEOUT)
        expected = collective(gloo, original.clone(memory_format=torch.contiguous_format))
        staged = HostStagedGroup(stores[1], number, 2, TIMEOUT)
        staged._gloo = watched = Watched(staged._gloo, set())
        mine = make(original)
        before = mine.data_ptr()
        got = collective(staged, mine)
        assert got.device == mine.device
        assert torch.equal(got.cpu(), expected)
        assert staged.num_collectives == 1
        assert watched.addresses
        assert not watched.addresses & {before, got.data_ptr()}

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(rank, range(2)))


def summed(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    return tensor


def greatest(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([tensor], options).wait()
    return tensor


def gathered(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    output = tensor.new_empty(2 * tensor.shape[0], tensor.shape[1])
    group._allgather_base(output, tensor).wait()
    return output


def gathered_as_dtensor_does(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(group, HostStagedGroup):  # torch has no such method on gloo's own object
        return gathered(group, tensor)
    output = tensor.new_empty(2 * tensor.shape[0], tensor.shape[1])
    group.allgather_into_tensor_coalesced([output], [tensor]).wait()
    return output


def gathered_in_a_list(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    outputs = [torch.empty_like(tensor) for _ in range(2)]
    group.allgather([outputs], [tensor]).wait()
    return outputs[0] + 2 * outputs[1]


def sent_to_all(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    options = dist.BroadcastOptions()
    options.rootRank = 1
    group.broadcast([tensor], options).wait()
    return tensor


COLLECTIVES = (summed, greatest, gathered, gathered_as_dtensor_does, gathered_in_a_list, sent_to_all)
