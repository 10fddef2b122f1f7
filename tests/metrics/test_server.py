"""Metrics over HTTP: where they are, and what becomes of the port."""

import socket
import urllib.request

import pytest

from hisparse.errors import InputError
from hisparse.metrics import EngineMetrics, MetricsServer
from tests.metrics.scraped import Scrape


def test_the_address_it_names_gives_the_metrics() -> None:
    with MetricsServer(EngineMetrics(), 0) as server, urllib.request.urlopen(server.url) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        seen = Scrape(answer.read().decode("utf-8"))
    assert server.port > 0
    assert seen["hisparse_requests_total"] == {("abort",): 0, ("length",): 0, ("stop",): 0}


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 cannot be had: Address already in use"):
            MetricsServer(EngineMetrics(), port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(InputError, match="ports are 1 to 65535"):
        MetricsServer(EngineMetrics(), port)


def test_a_closed_server_gives_its_port_back() -> None:
    server = MetricsServer(EngineMetrics(), 0)
    server.close()
    with MetricsServer(EngineMetrics(), server.port) as again:
        assert again.port == server.port
