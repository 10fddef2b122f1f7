"""Connectors: the only road between the scheduler's and the worker's side."""

from hisparse.connector.base import ConnectorMetadata, ConnectorRole, ConnectorWorkerMetadata, KVConnector
from hisparse.connector.hisparse_connector import HiSparseConnector, HiSparseMetadata, HiSparseWorkerMetadata

__all__ = [
    "ConnectorMetadata",
    "ConnectorRole",
    "ConnectorWorkerMetadata",
    "HiSparseConnector",
    "HiSparseMetadata",
    "HiSparseWorkerMetadata",
    "KVConnector",
]
