"""What a run did, in numbers."""

from dataclasses import asdict, dataclass, field
from typing import Any

from hisparse.geometry import BlockGeometry


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
    """Selected rows by where decoding found them; prefill rows count as resident or, staged, as miss."""

    resident: int
    hot: int
    miss: int
    unreachable: int


@dataclass(frozen=True, slots=True)
class BytesMoved:
    host_to_device_bytes: int
    device_to_host_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    kv: KVUse
    rows: RowUse
    moved: BytesMoved
    spills: int
    restores: int
    preemptions: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class PageWatch:
    """Remembers the step with the most pages. The engine feeds it once a step."""

    resident: int = 0
    host: int = 0
    _most: int = field(default=-1)

    def see(self, resident: int, host: int) -> None:
        if resident + host >= self._most:
            self._most = resident + host
            self.resident, self.host = resident, host

    def total_bytes(self, page: BlockGeometry) -> int:
        return (self.resident + self.host) * page.payload_bytes
