"""Worlds that are closed after the test."""

from collections.abc import Iterator

import pytest

from hisparse.config import CachePlan
from hisparse.worker import Backend
from tests.worker.world import MakeWorld, World, make_plan


@pytest.fixture
def plan() -> CachePlan:
    return make_plan()


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def make(backend: Backend | None = None, seed: int = 0, plan: CachePlan | None = None) -> World:
        worlds.append(World(backend, seed, plan))
        return worlds[-1]

    yield make
    for world in worlds:
        world.worker.close()


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world()
