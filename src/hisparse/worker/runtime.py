"""HiSparseRuntime: one layer's host and slab views, and what it takes to bring selected rows into the slab.

A leader owns replacement state and resolves. A follower has neither: it replays its leader's plan for bytes of its
own. They are two classes, so that a follower with replacement state cannot be written down.
"""

from dataclasses import dataclass

import torch

from hisparse.errors import InvariantError
from hisparse.kernels.contract import BlockTables, HotState, MissPlan, Resolver, ResolverCounters, Selection
from hisparse.worker.views import PagedCacheView


@dataclass(frozen=True, slots=True)
class ResolveContext:
    """What all layers of a worker share when they resolve."""

    resolver: Resolver
    tables: BlockTables
    counters: ResolverCounters


@dataclass(frozen=True, slots=True)
class CacheViews:
    """One layer's rows on the host and in the slab."""

    host: PagedCacheView
    slab: PagedCacheView


class HiSparseRuntime:
    """What leaders and followers have in common: a layer, its views, and loads of rows that are already planned."""

    __slots__ = ("context", "layer", "views")

    def __init__(self, layer: int, views: CacheViews, context: ResolveContext) -> None:
        self.layer = layer
        self.views = views
        self.context = context

    def load(self, host_row: torch.Tensor, slab_row: torch.Tensor) -> None:
        """Copy host rows to slab rows (int64 `[n]` each) of this layer."""
        self.context.resolver.gather_rows(host_row, slab_row, self.views.host, self.views.slab)


class LeaderRuntime(HiSparseRuntime):
    """A layer with an indexer: it resolves, and remembers what its hot rows hold.

    `state`: changed by `resolve` and `forget` alone. `plan`: the copies of the latest `resolve`.
    """

    __slots__ = ("num_resolved", "plan", "state")

    def __init__(self, layer: int, views: CacheViews, context: ResolveContext, state: HotState, plan: MissPlan) -> None:
        super().__init__(layer, views, context)
        self.state = state
        self.plan = plan
        self.num_resolved = 0

    def resolve(self, selection: Selection) -> torch.Tensor:
        """int32 `[num_rows, topk]` physical rows of the slab; loads this layer's misses and leaves the plan."""
        self.num_resolved += 1
        context = self.context
        return context.resolver.resolve(
            selection, context.tables, self.state, self.views.host, self.views.slab, self.plan, context.counters
        )

    def forget(self, slots: torch.Tensor) -> None:
        """Forget the hot rows of `slots`, int64 `[n]`."""
        self.context.resolver.reset_slots(self.state, slots)


class FollowerRuntime(HiSparseRuntime):
    """A layer that reads what its leader selected."""

    __slots__ = ("leader", "num_replayed")

    def __init__(self, layer: int, views: CacheViews, context: ResolveContext, leader: LeaderRuntime) -> None:
        super().__init__(layer, views, context)
        self.leader = leader
        self.num_replayed = leader.num_resolved

    def replay(self) -> None:
        """Make the copies of the leader's latest `resolve`. Nothing to do when they have been made.

        Raises `InvariantError` when an earlier plan was overwritten before it was replayed: this layer's hot rows
        would silently hold other bytes than the leader's state says.
        """
        behind = self.leader.num_resolved - self.num_replayed
        if behind > 1:
            raise InvariantError(
                f"layer {self.layer} missed {behind - 1} plans of layer {self.leader.layer}: it must load after each"
            )
        if behind:
            context = self.context
            context.resolver.replay_plan(self.leader.plan, self.views.host, self.views.slab, context.counters)
            self.num_replayed = self.leader.num_resolved
