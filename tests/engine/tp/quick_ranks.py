"""Ranks that start quickly: from a server that has imported already what every rank needs."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

from tests.engine.tp.faults import PRELOADED


@contextmanager
def quick_ranks() -> Iterator[None]:
    """Within, `forkserver` starts ranks. Other tests have a server of their own, with other imports: it makes room,
    and comes back when it is asked."""
    server = forkserver._forkserver
    others = server._preload_modules
    server._stop()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    yield
    server._stop()
    server._preload_modules = others
