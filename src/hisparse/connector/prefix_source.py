"""What a scheduler asks of KV that is kept below its own pools, and what it is told. No torch.

One load:   match … match → begin_load ──(workers copy)──► TierEvent DONE, or FAILED, or first OVERDUE
One store:  offer ────────────────────────(workers copy)──► TierEvent DONE or FAILED

Device blocks of a load or a store stay leased by whoever leased them until its *last* event (`is_last`): until then a
copy may still read or write them. Whatever goes wrong is a miss: the request computes.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, NewType, Protocol

from hisparse.cache.groups import GroupKind
from hisparse.protocol import DeviceBlockId

TicketId = NewType("TicketId", int)
"""Names one load or one store for its whole life. Never reused."""


class Match(NamedTuple):
    """Answer to `PrefixSource.match`.

    `num_pages`: pages of the prompt, from its first on, that every group has or could load at once. `wait`: more may
    be there soon, ask again in a later step; for a bounded time, after which it is False.
    """

    num_pages: int
    wait: bool


class GroupPages(NamedTuple):
    """Pages `first_page` … of a request in one group, and the device blocks that hold or shall hold them."""

    group: GroupKind
    first_page: int
    blocks: tuple[DeviceBlockId, ...]


class TierOutcome(Enum):
    """What became of a ticket. OVERDUE is not the last word: the request goes on without, the blocks stay leased."""

    DONE = "done"
    FAILED = "failed"
    OVERDUE = "overdue"


class TierEvent(NamedTuple):
    """One thing that happened to a ticket. `num_pages_from_files`: of a load that is DONE, the pages that came from
    the file tier in some group; the others came from the CPU tier.
    """

    ticket: TicketId
    outcome: TierOutcome
    num_pages_from_files: int = 0

    @property
    def is_last(self) -> bool:
        """Whether no worker touches the ticket's blocks any more."""
        return self.outcome is not TierOutcome.OVERDUE


class StoreTicket(NamedTuple):
    """What of an offer is being copied now. `pages` are those whose device blocks have to stay leased."""

    ticket: TicketId
    pages: tuple[GroupPages, ...]


class PrefixSource(Protocol):
    """KV of full pages, found by prefix key, group by group. One thread makes all calls; none waits."""

    groups: tuple[GroupKind, ...]
    """The groups whose pages it keeps: RESIDENT and INDEXER, or INDEXER alone."""

    pages_per_chunk: int
    """Pages that are kept and found together. What is offered begins and ends with a chunk."""

    def match(
        self, request_id: str, keys: Sequence[bytes], have: Mapping[GroupKind, int], *, ahead: bool = False
    ) -> Match:
        """How long a prefix of the prompt with page keys `keys` every group can have.

        `have[group]` are the pages that the scheduler holds itself; only what follows them is looked for, and of a
        group that this source does not keep nothing is. The first pages of a READY answer stay loadable until the
        request loads, asks again or is forgotten. A request that is told to wait asks again in the next step; best with
        the same `keys` object, which nobody changes.

        `ahead`: the request does not run yet. What it could use is brought nearer as far as that takes nothing from
        requests that run. Nothing is promised and nothing held for it.
        """

    def begin_load(self, request_id: str, keys: Sequence[bytes], pages: Sequence[GroupPages]) -> TicketId | None:
        """Have the workers fill `pages`, which the last `match` promised. None when that is no longer true: match
        again. `keys` as they were matched.
        """

    def offer(self, request_id: str, keys: Sequence[bytes], pages: Sequence[GroupPages]) -> StoreTicket | None:
        """Full, computed pages that may be kept. `keys` are those of the whole prompt, `pages` all of one range.

        None when nothing has to be copied: the pages are there, or there is no room for them now.
        """

    def take_events(self) -> tuple[TierEvent, ...]:
        """What has become of tickets since the last call. Call it every step: it notices what is overdue."""

    def forget(self, request_id: str) -> None:
        """The request ended or was preempted. Its tickets go on to their last event."""

    def reset(self) -> None:
        """Nothing that was stored so far is found any more: the weights changed."""

    @property
    def num_open(self) -> int:
        """Tickets whose last event has not been taken."""
