"""What the offload manager says to the scheduler and to the workers, and hears from them. No behaviour."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

from hisparse.protocol import TransferId

RegionBlockId = NewType("RegionBlockId", int)
"""A row of the CPU region, which holds one chunk. A type of its own, so that it never indexes another pool."""


class LookupStatus(Enum):
    """What a request should do about its prefix.

    HIT: its first `num_chunks` chunks can be loaded now. PENDING: chunks are on their way into the CPU tier; ask
    again in a later step. RETRY: whether there are any is not known yet; ask again. MISS: compute.
    """

    HIT = "hit"
    PENDING = "pending"
    RETRY = "retry"
    MISS = "miss"


class Lookup(NamedTuple):
    """Answer to a lookup. `num_chunks` is what could be loaded at once; only a HIT promises it."""

    status: LookupStatus
    num_chunks: int


class TransferKind(Enum):
    """Which way a transfer goes: from the device into the region, or from the region to the device."""

    STORE = "store"
    LOAD = "load"


class ChunkCopy(NamedTuple):
    """One chunk of a transfer: its place in the sequence of keys that was passed in, and its region block."""

    position: int
    block: RegionBlockId


@dataclass(frozen=True, slots=True)
class RegionTransfer:
    """Chunks that every worker copies between its own pages and the region, acknowledged together."""

    transfer_id: TransferId
    kind: TransferKind
    chunks: tuple[ChunkCopy, ...]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Answer to an offer of chunks to store.

    The first `num_accepted` of the offered chunks are in the tier or on their way: those of `transfer` must be
    copied now, the others are there already. The rest was dropped; it may be offered again while the device still
    has it.
    """

    num_accepted: int
    transfer: RegionTransfer | None


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What one worker saw since its last report, in the order in which it happened.

    `enqueued`: the copies are in the worker's stream. `completed`: they are done. `failed`: they will not be done,
    and the worker no longer touches either end; a transfer may fail before it was enqueued. A transfer may be
    enqueued and completed in one report.
    """

    worker: int
    enqueued: tuple[TransferId, ...] = ()
    completed: tuple[TransferId, ...] = ()
    failed: tuple[TransferId, ...] = ()


class TransferOutcome(Enum):
    """What has become of a transfer, over all workers.

    ENQUEUED: in every worker's stream. DONE: completed by every worker. FAILED: over, but not done by every worker.
    OVERDUE: not over in time. What a store read is not kept, so its device blocks may be reused. The request of a load
    computes instead, into other device blocks: those of the transfer stay untouched until DONE or FAILED follows.
    """

    ENQUEUED = "enqueued"
    DONE = "done"
    FAILED = "failed"
    OVERDUE = "overdue"


class TransferEvent(NamedTuple):
    """One thing that happened to a transfer. `request` is None once the request was finished."""

    transfer_id: TransferId
    kind: TransferKind
    request: str | None
    outcome: TransferOutcome
