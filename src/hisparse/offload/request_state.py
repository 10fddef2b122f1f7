"""What the offload manager remembers of one request from its first lookup or store until it is finished."""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from hisparse.offload.cpu_tier import CpuTier, Entry
from hisparse.offload.transfer_log import OpenTransfer


@dataclass(slots=True, eq=False)
class RequestState:
    """One request. Only the manager changes it.

    `patience_s`: when lookups stop telling it to ask again; None before the first. `is_waiting`: the last one did.
    `claims`: chunks of its prefix that it may load, one reference each, in order. `chain`: keys of its prompt that
    were loaded or accepted for storing, in order; its own stores never evict them. `probe`, `probed`: the one question
    to the tier below and the keys it was about. `gave_up`: a load of it failed, so it computes from now on. `load`,
    `transfers`: what is open of it.
    """

    patience_s: float | None = None
    claims: dict[bytes, Entry] = field(default_factory=dict)
    chain: dict[bytes, None] = field(default_factory=dict)
    probe: "Future[int] | None" = None
    probed: tuple[bytes, ...] | None = None
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
