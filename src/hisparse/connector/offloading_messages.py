"""What the offloading connector's two roles say to each other. No behaviour, no torch."""

from dataclasses import dataclass

from hisparse.cache.groups import GroupKind
from hisparse.connector.base import ConnectorMetadata, ConnectorWorkerMetadata
from hisparse.offload.messages import OffloadReport, TransferKind
from hisparse.protocol import TransferId

NOT_WANTED = -1
"""Stands for the device block of a page that is in a chunk and is not copied."""


@dataclass(frozen=True, slots=True)
class RegionCopies:
    """One transfer of a group: `blocks[i]` are the device blocks of the chunk in region row `rows[i]`, page by page.

    Ids are unique within a group. `NOT_WANTED` where a page of a chunk is left out, which only loads do.
    """

    group: GroupKind
    transfer_id: TransferId
    kind: TransferKind
    rows: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class OffloadingMetadata(ConnectorMetadata):
    """The copies that a step begins, in the order in which they were planned."""

    step: int
    copies: tuple[RegionCopies, ...] = ()


@dataclass(frozen=True, slots=True)
class OffloadingWorkerMetadata(ConnectorWorkerMetadata):
    """What one worker saw since its last answer, for each group of which there is something to say."""

    reports: tuple[tuple[GroupKind, OffloadReport], ...] = ()
