"""The messages that cross the line between scheduler and worker. No behaviour; the two made by the million are tuples.

One step: the scheduler builds a `SparseKVOffloadCommand`; every worker first puts the command's transfers in its
stream, then applies `resets` and `updates` to its tables, runs the forward pass, and answers with a
`SparseKVWorkerReport`. Transfers name an id and physical coordinates only; no request crosses the line, only the
*slot*, the row of the worker's tables that the scheduler lent to a request.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

DeviceBlockId = NewType("DeviceBlockId", int)
"""A block of a device pool: the slab, or the indexer's pool."""

HostBlockId = NewType("HostBlockId", int)
"""A block of the host pool. A type of its own, so that it never indexes a device pool."""

TransferId = NewType("TransferId", int)
"""Names one transfer for its whole life. Never reused."""


class Direction(Enum):
    """Which way the pages of a transfer go."""

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"


class Table(Enum):
    """The block tables that a worker keeps, one row per slot, one column per page."""

    RESIDENT = "resident"
    HOST = "host"
    HOT = "hot"
    INDEXER = "indexer"


class PageCopy(NamedTuple):
    """One page of all layers of the slab's group. Which end is the source is the transfer's direction."""

    device_block: DeviceBlockId
    host_block: HostBlockId


@dataclass(frozen=True, slots=True)
class SparseKVPageTransfer:
    """Copies that are acknowledged together: once when they are in the stream, once when they are done."""

    transfer_id: TransferId
    direction: Direction
    copies: tuple[PageCopy, ...]


class TableUpdate(NamedTuple):
    """Overwrite `table[slot, first_page : first_page + len(blocks)]` with block ids of that table's pool."""

    table: Table
    slot: int
    first_page: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SparseKVOffloadCommand:
    """What the scheduler wants done before the forward pass of `step`.

    `transfers` see the device blocks as the previous step left them, and the tables of this step do not yet show
    their effect. `resets` are slots whose tables become null and whose hot rows are forgotten; they are applied
    before `updates`, because a slot may be lent again in the step in which it was given back.
    """

    step: int
    transfers: tuple[SparseKVPageTransfer, ...] = ()
    resets: tuple[int, ...] = ()
    updates: tuple[TableUpdate, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether a worker has nothing to do before the forward pass."""
        return not (self.transfers or self.resets or self.updates)


@dataclass(frozen=True, slots=True)
class SparseKVWorkerReport:
    """What one worker saw since its last report, in the order in which it happened.

    `enqueued`: the transfer is in the worker's stream, so later work on that stream cannot overtake it.
    `completed`: the transfer's event was seen; its bytes are where they should be. A transfer may be in both.
    """

    worker: int
    enqueued: tuple[TransferId, ...] = ()
    completed: tuple[TransferId, ...] = ()
