"""Metrics over HTTP."""

from types import TracebackType
from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from hisparse.errors import InputError

if TYPE_CHECKING:
    from hisparse.metrics.engine_metrics import EngineMetrics

MAX_PORT = 65535
LOCALHOST = "127.0.0.1"


class MetricsServer:
    """Serves metrics at `url` from threads of its own until it is closed."""

    def __init__(self, metrics: "EngineMetrics", port: int, address: str = LOCALHOST) -> None:
        """Begin to serve. Port 0 takes a free one. Raises `InputError` when port or address cannot be had."""
        if not 0 <= port <= MAX_PORT:
            raise InputError(f"metrics port {port} is none: ports are 1 to {MAX_PORT}, and 0 takes a free one")
        try:
            self._server, self._thread = start_http_server(port, address, metrics.registry)
        except OSError as error:
            raise InputError(
                f"metrics port {port} of {address} cannot be had: {error.strerror}; 0 takes a free one"
            ) from error
        self.port = int(self._server.server_port)
        self.url = f"http://{address}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving and give the port back. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
