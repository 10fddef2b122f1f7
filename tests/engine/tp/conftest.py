"""Ranks of these tests start quickly."""

from collections.abc import Iterator

import pytest

from hisparse.engine.tp import ProcessExecutor
from tests.engine.tp.quick_ranks import quick_ranks


@pytest.fixture(scope="package", autouse=True)
def _server() -> Iterator[None]:
    with quick_ranks():
        yield


@pytest.fixture(autouse=True)
def _quick_start(_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessExecutor, "start_method", "forkserver")
