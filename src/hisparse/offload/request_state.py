"""What the offload manager remembers of one request from its first lookup or store until it is finished."""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from hisparse.offload.cpu_tier import CpuTier, Entry
from hisparse.offload.transfer_log import OpenTransfer


@dataclass(slots=True, eq=False)
class RequestState:
    """One request. Only the manager changes it.

    `patience_s`: when lookups stop telling it to ask again; None before the first, and after a load. `is_waiting`: the
    last one did. `claims`: chunks of its prefix that it may load, one reference each, in order. `chain`: keys of its
    prompt that were loaded or accepted for storing, in order; its own stores never evict them.

    `probe`, `probing`: the open question to the tier below and the keys it is about. `asked`: all keys that such
    questions were about; none is asked about twice. `seen`: those that lookups looked at since the last load, asked
    about or there then. `found`: those that the tier below has and that were not brought up yet; each is brought up
    once. `may_promote`: whether some may be at the next lookup. `awaited`: chunks that came up while it waited.

    `gave_up`: a load of it failed, so it computes from now on. `load`, `transfers`: what is open of it.
    """

    patience_s: float | None = None
    claims: dict[bytes, Entry] = field(default_factory=dict)
    chain: dict[bytes, None] = field(default_factory=dict)
    probe: "Future[int] | None" = None
    probing: tuple[bytes, ...] = ()
    asked: set[bytes] = field(default_factory=set)
    seen: set[bytes] = field(default_factory=set)
    found: set[bytes] = field(default_factory=set)
    awaited: set[bytes] = field(default_factory=set)
    may_promote: bool = False
    is_waiting: bool = False
    gave_up: bool = False
    load: OpenTransfer | None = None
    transfers: set[OpenTransfer] = field(default_factory=set)

    def claim(self, cpu: CpuTier, entries: Iterable[Entry]) -> None:
        """Hold exactly `entries` from now on, which are ready or coming."""
        former = self.claims
        self.claims = {}
        for entry in entries:
            if entry.key in self.claims:
                continue
            if former.get(entry.key) is entry:
                del former[entry.key]
            else:
                cpu.pin(entry)
            self.claims[entry.key] = entry
        for entry in former.values():
            cpu.unpin(entry)
