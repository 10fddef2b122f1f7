"""Where tests of the whole way that KV goes keep it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse.offload.layout import Family
from hisparse.offload.sharding import Topology
from tests.offload.chain import Start
from tests.offload.chain_model import Model
from tests.offload.members import shared_folder


@pytest.fixture
def memory() -> Iterator[Path]:
    """Shared memory of this test alone. Nothing may be left in it."""
    with shared_folder() as folder:
        yield folder
        assert list(folder.iterdir()) == [], "a test left files in shared memory"


@pytest.fixture
def start(tmp_path: Path, memory: Path) -> Start:
    """What tests take and change: tp 2 of a model with split pages and four heads."""
    return Start(Model(Family.SPLIT_HND, 4), Topology(2), 2, tmp_path, memory)
