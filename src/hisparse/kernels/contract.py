"""What every resolver backend is given and what it must do. The reference and the CUDA kernel share these types.

`resolve` turns the logical positions that an indexer selected into physical rows of the slab, for all rows of a
step at once:

1. A position whose page is resident gives its slab row.
2. Otherwise, a position that holds a hot row gives that row and touches the replacement state.
3. Otherwise, if its page is valid on host, a victim slot is chosen, the host row is copied into it, and the
   slot's slab row is given (a *miss*).
4. Otherwise it gives -1 and counts as unreachable.

Rows with `row_slot = -1` are padding and give -1 everywhere; so does a position below 0, without being counted. A
position that the replacement state has no room for (`max_tokens` or more), or beyond the tables, is unreachable, even
where the page that it would lie in is resident.

All rows of one slot are resolved as one union: a position selected by several rows, or twice in one row, is loaded
once and counts one miss, and no row evicts what another row of the step reads. The union holds the positions that
are not resident. A position that is resident and also has a hot copy is read from its page: the copy is neither
touched nor protected, and may be a victim in the same call. `resident` and `hot` count selections (one per output
element served that way); `miss` counts loaded rows; the further selections of a row loaded in the same call count as
`hot`; `unreachable` counts output elements.

A victim is legal when it is empty, or belongs to no position of this call's union and no legal slot that was kept
has an older stamp (exact LRU at step granularity; which of several equally old slots goes first is the backend's
choice; the reference takes the lowest slot). An empty hot row is older than any other, whatever its stamp says.

When a union needs more slots than the hot lease has, exactly as many misses are loaded as there are victims; which of
them is the backend's choice. The others give -1, are counted as unreachable, and `status` gets
`STATUS_UNION_OVERFLOW`. A slot without any hot block has no lease: what only the host has is unreachable for it, and
that alone is no overflow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hisparse.geometry import PagedLayout, align_up

STATUS_OK = 0
STATUS_UNION_OVERFLOW = 1

EMPTY = -1
"""No position, no slot, no row."""


class PagedRows(Protocol):
    """Rows of one layer in a paged allocation. `worker.views.PagedCacheView` is the implementation."""

    @property
    def storage(self) -> torch.Tensor:
        """uint8 `[num_bytes]`, contiguous: the whole allocation, shared by all layers."""
        ...

    @property
    def layout(self) -> PagedLayout:
        """Where the layer's rows lie in `storage`."""
        ...


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The worker's tables, int32, one row per slot. Entry 0 means "not here". The scheduler's updates change them.

    `resident`, `host`: `[num_slots, max_pages]`, by logical page. `hot`: `[num_slots, hot_blocks]`, by hot block.
    """

    resident: torch.Tensor
    host: torch.Tensor
    hot: torch.Tensor


@dataclass(frozen=True, slots=True)
class HotState:
    """Replacement state of one leader. Only `resolve` and `reset_slots` change it; it never leaves the device.

    `position_of`: int32 `[num_slots, hot_rows]`, the logical position that each hot row holds, or -1.
    `hot_row_of`: int16 `[num_slots, max_tokens]`, the inverse. An entry counts only if `position_of` agrees, so
    that forgetting a slot means clearing `position_of` alone.
    `stamp`: int32 `[num_slots, hot_rows]`, the step that last read the row; 0 for never.
    `step`: int32 `[num_slots]`, a request's own clock: every call of `resolve` with a row of the slot advances it,
    while the slot has a hot lease.
    `queue`, int16 `[num_slots, hot_rows]` (padded to a multiple of 4), and `queue_state`, int32 `[num_slots, 4]`: a
    backend's own notes on which rows go next. Zeros mean that there are none; `reset_slots` puts zeros.
    """

    position_of: torch.Tensor
    hot_row_of: torch.Tensor
    stamp: torch.Tensor
    step: torch.Tensor
    queue: torch.Tensor
    queue_state: torch.Tensor

    @classmethod
    def allocate(cls, num_slots: int, hot_rows: int, max_tokens: int, device: torch.device | str) -> "HotState":
        """An empty state for `num_slots` requests of up to `max_tokens` tokens with `hot_rows` hot rows each."""
        return cls(
            position_of=torch.full((num_slots, hot_rows), EMPTY, dtype=torch.int32, device=device),
            hot_row_of=torch.full((num_slots, max_tokens), EMPTY, dtype=torch.int16, device=device),
            stamp=torch.zeros((num_slots, hot_rows), dtype=torch.int32, device=device),
            step=torch.zeros(num_slots, dtype=torch.int32, device=device),
            queue=torch.zeros((num_slots, align_up(hot_rows, 4)), dtype=torch.int16, device=device),
            queue_state=torch.zeros((num_slots, 4), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class MissPlan:
    """The copies that one `resolve` made, as physical rows, so that followers replay them for their own bytes.

    The copies for a request stand in the plan's row of the request's first batch row, so that requests need not agree
    on anything: `count`: int32 `[max_rows]`, 0 in every other row. `host_row`, `slab_row`: int64
    `[max_rows, capacity]`; row r is valid up to `count[r]`, in any order.
    """

    count: torch.Tensor
    host_row: torch.Tensor
    slab_row: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, capacity: int, device: torch.device | str) -> "MissPlan":
        """An empty plan for steps of up to `max_rows` rows and `capacity` copies a request (hot rows is enough)."""
        return cls(
            count=torch.zeros(max_rows, dtype=torch.int32, device=device),
            host_row=torch.full((max_rows, capacity), EMPTY, dtype=torch.int64, device=device),
            slab_row=torch.full((max_rows, capacity), EMPTY, dtype=torch.int64, device=device),
        )

    def copies(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Host rows and slab rows of all copies, int64 `[n]` each. Waits for the device; never call it in a step."""
        valid = torch.arange(self.host_row.shape[1], device=self.count.device) < self.count[:, None]
        return self.host_row[valid], self.slab_row[valid]


@dataclass(frozen=True, slots=True)
class ResolverCounters:
    """Running totals on the device. They survive graph replay; `resolve` and replays of its plan only add.

    `totals`: int64 `[5]`, in the order of `COUNTER_NAMES`. `status`: int32 `[1]`, a sticky word.
    """

    totals: torch.Tensor
    status: torch.Tensor

    @classmethod
    def allocate(cls, device: torch.device | str) -> "ResolverCounters":
        """Counters at zero."""
        return cls(
            totals=torch.zeros(len(COUNTER_NAMES), dtype=torch.int64, device=device),
            status=torch.zeros(1, dtype=torch.int32, device=device),
        )

    def read(self) -> dict[str, int]:
        """The totals by name. Waits for the device; never call it inside a step."""
        return dict(zip(COUNTER_NAMES, self.totals.tolist(), strict=True))


COUNTER_NAMES = ("resident", "hot", "miss", "bytes", "unreachable")
"""`bytes` counts what was copied from host, followers included; the others count as told above."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What the indexer chose.

    `positions`: int32 `[num_rows, topk]`, logical positions, -1 where a row has fewer. `row_slot`: int32
    `[num_rows]`, the slot of the request that each row belongs to, -1 for padding; rows of one slot may stand
    anywhere. `priority`: optional float32 `[num_slots, max_tokens]`, the indexer's scores, for victim rules that
    use them; exact LRU ignores it. `leased`: False promises that no slot of `row_slot` has a hot block, as whoever
    leases them knows without asking the device. Then nothing can be loaded, and a backend may do less for the same
    result.
    """

    positions: torch.Tensor
    row_slot: torch.Tensor
    priority: torch.Tensor | None = None
    leased: bool = True


class Resolver(Protocol):
    """One backend. The same object serves all layers; it holds no state of theirs."""

    def resolve(
        self,
        selection: Selection,
        tables: BlockTables,
        state: HotState,
        source: PagedRows,
        destination: PagedRows,
        plan: MissPlan,
        counters: ResolverCounters,
    ) -> torch.Tensor:
        """Plan and copy for a leader. Returns int32 `[num_rows, topk]` physical rows; overwrites `plan`."""
        ...

    def replay_plan(
        self,
        plan: MissPlan,
        sources: Sequence[PagedRows],
        destinations: Sequence[PagedRows],
        counters: ResolverCounters,
    ) -> None:
        """Make the leader's copies for its followers. Counts the bytes of each, and nothing else.

        `sources[i]` and `destinations[i]` are one follower's rows; all of them share one host and one slab allocation.
        It reads the plan and host rows and writes the slab rows that the plan names, the counters and nothing else, so
        it may run beside what touches none of these, in another stream than `resolve` if it is ordered behind it.
        """
        ...

    def gather_rows(
        self, host_row: torch.Tensor, slab_row: torch.Tensor, source: PagedRows, destination: PagedRows
    ) -> None:
        """Copy host rows to slab rows: int64 `[n]` each, -1 pairs are skipped. Serves prefill staging."""
        ...

    def reset_slots(self, state: HotState, slots: torch.Tensor) -> None:
        """Forget the hot rows of `slots` (int64 `[n]`)."""
        ...
