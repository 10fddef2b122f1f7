"""`--metrics-port`: serve a command's metrics for as long as it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hisparse.cli.streams import complain

if TYPE_CHECKING:
    from hisparse.metrics import EngineMetrics


@contextmanager
def metrics_for(port: int | None) -> "Iterator[EngineMetrics | None]":
    """Metrics for the engine of a command, served on `port` until the context ends; None without a port.

    Says on standard error where they are. Raises `InputError` when the port cannot be had.
    """
    if port is None:
        yield None
        return
    from hisparse.metrics import EngineMetrics, MetricsServer

    metrics = EngineMetrics()
    with MetricsServer(metrics, port) as server:
        complain(f"metrics at {server.url}")
        yield metrics
