"""HiSparseRuntime: one layer's host and slab views, and what it takes to bring selected rows into the slab.

A leader owns replacement state and resolves. A follower has neither: its leader's plan is replayed for bytes of its
own. They are two classes, so that a follower with replacement state cannot be written down.

Followers' copies start as soon as their leader has resolved, on a side stream, and each follower joins its own when it
is about to read. Nothing else touches what these copies write or read meanwhile:

- They write hot rows of the followers' layers. Who read those rows before (attention of an earlier step) did so in the
  compute stream, ahead of the fork. The next to read them is the follower itself, behind its join. New rows and staged
  rows go to other blocks than a hot lease.
- They read the plan, which the leader's next `resolve` overwrites, and host pages, whose blocks may be given to
  others when the step is over. All followers have joined by then, or `assert_followed` raises; a worker asks it
  before a step ends. So the compute stream is behind the copies, and with it every page transfer of the next
  step, because a copy stream starts those behind what was computed.
- Page transfers of the same step fill blocks that no table of the step names yet, neither hot nor host.

Plan, slab, host pool and counters live as long as the worker, so that no allocator has to be told of the second stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hisparse.errors import InvariantError
from hisparse.kernels.contract import BlockTables, HotState, MissPlan, Resolver, ResolverCounters, Selection
from hisparse.worker.side import Branch, SideStream
from hisparse.worker.views import PagedCacheView

ONE_LAUNCH_ROWS = 8
"""The most rows of a step whose misses all followers of a leader load in one launch. Reasoned, not measured."""


@dataclass(frozen=True, slots=True)
class ResolveContext:
    """What all layers of a worker share when they resolve."""

    resolver: Resolver
    side: SideStream
    tables: BlockTables
    counters: ResolverCounters


@dataclass(frozen=True, slots=True)
class CacheViews:
    """One layer's rows on the host and in the slab."""

    host: PagedCacheView
    slab: PagedCacheView


def launch_sizes(num_rows: int, num_followers: int) -> tuple[int, ...]:
    """How many followers each launch serves, in order, after a leader resolved `num_rows` rows.

    A launch takes some 7 µs until its first rows arrive, which few rows do not add to: they go in one launch. The
    misses of many rows keep the link busy for longer than that in each layer, and a launch is over for all its
    layers at once: then each follower gets its own, and starts when its rows are there.
    """
    if num_followers == 0:
        return ()
    return (num_followers,) if num_rows <= ONE_LAUNCH_ROWS else (1,) * num_followers


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
    """A layer with an indexer: it resolves, remembers what its hot rows hold, and has its followers' rows copied.

    `state`: changed by `resolve` and `forget` alone. `plan`: the copies of the latest `resolve`. `unjoined`: by layer,
    the copies for followers that have not joined them; `resolve` fills it, `join` empties it.
    """

    __slots__ = ("_followers", "plan", "state", "unjoined")

    def __init__(
        self,
        layer: int,
        views: CacheViews,
        context: ResolveContext,
        state: HotState,
        plan: MissPlan,
        followers: Mapping[int, CacheViews],
    ) -> None:
        """`followers`: the views of the layers that follow this one, in the order in which they run."""
        super().__init__(layer, views, context)
        self.state = state
        self.plan = plan
        self.unjoined: dict[int, Branch] = {}
        self._followers = dict(followers)

    def resolve(self, selection: Selection) -> torch.Tensor:
        """int32 `[num_rows, topk]` physical rows of the slab; loads this layer's misses and leaves the plan.

        The followers' copies are launched behind it. Raises `InvariantError` as `assert_followed` does.
        """
        self.assert_followed()
        context = self.context
        rows = context.resolver.resolve(
            selection, context.tables, self.state, self.views.host, self.views.slab, self.plan, context.counters
        )
        if selection.leased:  # otherwise the plan is empty
            self._load_followers(selection.positions.shape[0])
        return rows

    def join(self, layer: int) -> None:
        """What is computed from now on sees the rows of follower `layer`. Once per `resolve`; more is free."""
        branch = self.unjoined.pop(layer, None)
        if branch is not None:
            branch.join()

    def assert_followed(self) -> None:
        """Raises `InvariantError` when a follower has not joined its copies for the latest `resolve`.

        The next `resolve` would overwrite the plan under them, and the next step might reuse blocks under them.
        """
        if self.unjoined:
            layers = ", ".join(map(str, self.unjoined))
            raise InvariantError(f"layer {layers} missed a plan of layer {self.layer}: it must load after each")

    def forget(self, slots: torch.Tensor) -> None:
        """Forget the hot rows of `slots`, int64 `[n]`."""
        self.context.resolver.reset_slots(self.state, slots)

    def _load_followers(self, num_rows: int) -> None:
        layers, groups = list(self._followers), list[Sequence[int]]()
        for size in launch_sizes(num_rows, len(layers)):
            groups.append(layers[:size])
            del layers[:size]
        if not groups:
            return
        branches = self.context.side.launch([partial(self._replay, group) for group in groups])
        for group, branch in zip(groups, branches, strict=True):
            self.unjoined.update(dict.fromkeys(group, branch))

    def _replay(self, layers: Sequence[int]) -> None:
        views = [self._followers[layer] for layer in layers]
        self.context.resolver.replay_plan(
            self.plan, [view.host for view in views], [view.slab for view in views], self.context.counters
        )


class FollowerRuntime(HiSparseRuntime):
    """A layer that reads what its leader selected."""

    __slots__ = ("leader",)

    def __init__(self, layer: int, views: CacheViews, context: ResolveContext, leader: LeaderRuntime) -> None:
        super().__init__(layer, views, context)
        self.leader = leader

    def join(self) -> None:
        """What is computed from now on sees this layer's rows for the leader's latest `resolve`."""
        self.leader.join(self.layer)
