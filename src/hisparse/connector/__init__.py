"""Connectors: the only road between the scheduler's and the worker's side."""

from hisparse.connector.base import ConnectorMetadata, ConnectorRole, ConnectorWorkerMetadata, KVConnector
from hisparse.connector.hisparse_connector import HiSparseConnector, HiSparseMetadata, HiSparseWorkerMetadata
from hisparse.connector.multi_connector import MultiConnector, MultiMetadata, MultiWorkerMetadata
from hisparse.connector.offloading_connector import OffloadingConnector
from hisparse.connector.offloading_messages import OffloadingMetadata, OffloadingWorkerMetadata, RegionCopies
from hisparse.connector.offloading_source import OffloadingSource
from hisparse.connector.offloading_worker import OffloadingWorker
from hisparse.connector.prefix_source import (
    GroupPages,
    Match,
    PrefixSource,
    StoreTicket,
    TicketId,
    TierEvent,
    TierOutcome,
)

__all__ = [
    "ConnectorMetadata",
    "ConnectorRole",
    "ConnectorWorkerMetadata",
    "GroupPages",
    "HiSparseConnector",
    "HiSparseMetadata",
    "HiSparseWorkerMetadata",
    "KVConnector",
    "Match",
    "MultiConnector",
    "MultiMetadata",
    "MultiWorkerMetadata",
    "OffloadingConnector",
    "OffloadingMetadata",
    "OffloadingSource",
    "OffloadingWorker",
    "OffloadingWorkerMetadata",
    "PrefixSource",
    "RegionCopies",
    "StoreTicket",
    "TicketId",
    "TierEvent",
    "TierOutcome",
]
