"""The shipped resolver contract, held by both CUDA kernels and by every size of cluster."""

from functools import partial

import pytest
import torch

from hisparse.kernels.contract import Resolver
from hisparse.kernels.cuda import parameters
from hisparse.kernels.cuda.parameters import DeviceLimits
from hisparse.kernels.cuda.resolver import CudaResolver
from hisparse.testing.resolver_cases import Case
from hisparse.testing.resolver_checker import check_replay, check_resolve
from hisparse.testing.resolver_contract import ResolverContract
from hisparse.testing.resolver_random import random_shape, random_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES_PER_SHARD = 100
HAS_CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability() in ((9, 0), (10, 0), (10, 3))
CLUSTERS = (1, 2, 4, 8) if HAS_CLUSTERS else ()
KERNELS = ("team", "team without bulk copies", *CLUSTERS)


def use_kernel(patch: pytest.MonkeyPatch, kernel: str | int) -> None:
    """Let launches take one kernel whatever the device: what runs before 9.0, or clusters of one size."""
    if isinstance(kernel, int):
        patch.setattr(parameters, "cluster_size", lambda num_requests, limits: kernel)
        return
    patch.setattr(DeviceLimits, "has_clusters", property(lambda self: False))
    if "without" in kernel:
        patch.setattr(DeviceLimits, "has_bulk_copies", property(lambda self: False))


class TestCudaResolver(ResolverContract):
    device = "cuda"

    @pytest.fixture
    def resolver(self) -> Resolver:
        return CudaResolver()


class TestCudaResolverBeforeClusters(ResolverContract):
    device = "cuda"

    @pytest.fixture
    def resolver(self, monkeypatch: pytest.MonkeyPatch) -> Resolver:
        use_kernel(monkeypatch, "team without bulk copies")
        return CudaResolver()


@pytest.mark.parametrize("shard", range(3))
@pytest.mark.parametrize("kernel", KERNELS)
def test_thousands_of_random_sequences(kernel: str | int, shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(monkeypatch, kernel)
    resolver = CudaResolver()
    for seed in range(shard * CASES_PER_SHARD, (shard + 1) * CASES_PER_SHARD):
        case = Case(random_shape(seed), seed, "cuda")
        for selection, ended in random_steps(case, num_steps=8):
            resolver.reset_slots(case.state, torch.tensor(ended, dtype=torch.int64, device="cuda"))
            outcome = check_resolve(resolver, case, selection)
            check_replay(resolver, case, outcome, (case.shape.leader + 1) % case.shape.num_layers)


def test_the_choice_of_a_kernel_changes_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = DeviceLimits((9, 0), 132, 227 * 1024)
    plan = partial(parameters.plan_resolve, parameters.ResolveShape(1, 2048, 4096, 32768, 656), limits)
    assert plan().specialization.kernel == "resolve_cluster"
    with monkeypatch.context() as patch:
        use_kernel(patch, 2)
        assert plan().specialization.cluster == 2
    use_kernel(monkeypatch, "team without bulk copies")
    assert (plan().specialization.kernel, plan().specialization.use_bulk) == ("resolve", False)
