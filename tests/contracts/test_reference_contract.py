"""The shipped contract holds for the reference, and for the naive resolver that the reference is compared with."""

import pytest

from hisparse.kernels.contract import Resolver
from hisparse.kernels.reference import ReferenceResolver
from hisparse.testing.resolver_contract import ResolverContract
from hisparse.testing.resolver_oracle import NaiveResolver


class TestReferenceResolver(ResolverContract):
    num_random_cases = 60

    @pytest.fixture
    def resolver(self) -> Resolver:
        return ReferenceResolver()


class TestNaiveResolver(ResolverContract):
    num_random_cases = 10

    @pytest.fixture
    def resolver(self) -> Resolver:
        return NaiveResolver()
