"""Ranks that start quickly: from a server that has imported already what every rank needs."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from hisparse.engine.tp import ProcessExecutor
from tests.engine.tp.faults import PRELOADED


@pytest.fixture(scope="package", autouse=True)
def _server() -> Iterator[None]:
    """Other tests have a server of their own, with other imports: it makes room, and comes back when it is asked."""
    server = forkserver._forkserver
    others = server._preload_modules
    server._stop()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    yield
    server._stop()
    server._preload_modules = others


@pytest.fixture(autouse=True)
def _quick_start(_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessExecutor, "start_method", "forkserver")
