"""The shipped resolver contract, held by the CUDA kernels."""

import pytest
import torch

from hisparse.kernels.contract import Resolver
from hisparse.kernels.cuda.resolver import CudaResolver
from hisparse.testing.resolver_contract import ResolverContract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestCudaResolver(ResolverContract):
    device = "cuda"
    num_random_cases = 60

    @pytest.fixture
    def resolver(self) -> Resolver:
        return CudaResolver()
