"""What a run did, in numbers."""

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hisparse.engine.reuse import ReusedTokens
from hisparse.geometry import BlockGeometry
from hisparse.offload.stats import OffloadStats

if TYPE_CHECKING:
    from hisparse.cache.groups import GroupKind
    from hisparse.offload.manager import OffloadManager


@dataclass(frozen=True, slots=True)
class KVUse:
    """Where the KV was when there was most of it. Sizes in bytes of payload, pages of all requests together.

    `total_bytes`: all pages. `device_bytes`: the slab, whatever it was used for, staging (`staging_bytes`)
    included. `indexer_bytes`: the indexer's pool. `host_bytes`: pages on the host. `host_physical_bytes`: what the
    host pool occupies, used or not, alignment included.
    """

    total_bytes: int
    device_bytes: int
    staging_bytes: int
    indexer_bytes: int
    host_bytes: int
    host_physical_bytes: int
    pages_resident: int
    pages_host: int


@dataclass(frozen=True, slots=True)
class RowUse:
    """Selected rows of all leaders and steps, by where they were found.

    Decode rows count as the resolver counts them. Prefill rows that are not resident are staged, pass by pass: each
    distinct row that a pass loads is a `miss`, further selections of it in the same pass are `hot`. `unreachable`
    selections found no row; it stays 0 unless something is broken.
    """

    resident: int
    hot: int
    miss: int
    unreachable: int


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """Payload that crossed between device and host since the start, single rows and whole pages together."""

    host_to_device_bytes: int
    device_to_host_bytes: int


@dataclass(frozen=True, slots=True)
class TierUse:
    """What the tiers below the pools did for one group of KV, and how full its CPU tier is. Bytes of payload.

    `num_evicted`: chunks that left the CPU tier for others.
    """

    group: str
    traffic: OffloadStats
    used_bytes: int
    free_bytes: int
    num_evicted: int

    @classmethod
    def of(cls, group: "GroupKind", manager: "OffloadManager", chunk_bytes: int) -> "TierUse":
        """As the manager's books, which change while it is used, stand now."""
        cpu = manager.cpu
        used = (cpu.num_blocks - cpu.num_free) * chunk_bytes
        return cls(group.value, replace(manager.stats), used, cpu.num_free * chunk_bytes, cpu.num_evicted)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Everything that an engine counts. `spills` and `restores` count pages, `preemptions` requests sent back.

    `reused`: tokens of all prompts that were computed, by where their KV came from. `tiers`: one for each group that
    is kept below the pools.
    """

    kv: KVUse
    rows: RowUse
    moved: BytesMoved
    spills: int
    restores: int
    preemptions: int
    reused: ReusedTokens = field(default_factory=ReusedTokens)
    tiers: tuple[TierUse, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same as nested dictionaries of numbers."""
        return asdict(self)


@dataclass(slots=True)
class PageWatch:
    """Remembers the step with the most pages. The engine feeds it once a step."""

    resident: int = 0
    host: int = 0
    _most: int = field(default=-1)

    def see(self, resident: int, host: int) -> None:
        """Take one step's pages on the device and on the host; of equally full steps the later one is kept."""
        if resident + host >= self._most:
            self._most = resident + host
            self.resident, self.host = resident, host

    def total_bytes(self, page: BlockGeometry) -> int:
        """Payload of the pages that are remembered."""
        return (self.resident + self.host) * page.payload_bytes
