"""KV below an engine's own pools: regions, managers and files of all groups, made together and given back together.

The scheduler's side of it, `EngineOffload`, is there once; each rank has a `RankOffload`, in the same process or in one
of its own, where it maps the same regions. What crosses between processes is an `OffloadSpec`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hisparse.cache.groups import GroupKind
from hisparse.config import CachePlan
from hisparse.connector import OffloadingConnector, OffloadingSource, OffloadingWorker, RegionCopies
from hisparse.engine.stats import TierUse
from hisparse.errors import BackendError, LayoutError
from hisparse.offload.config import OffloadConfig
from hisparse.offload.daemon_executor import DaemonExecutor
from hisparse.offload.engine_layout import OFFLOADED_GROUPS, GroupLayout, ModelIdentity, rows_for
from hisparse.offload.files import FileTier
from hisparse.offload.late_copies import LateCpuCopies
from hisparse.offload.manager import OffloadManager
from hisparse.offload.messages import OffloadReport
from hisparse.offload.page_copies import CopyDevice
from hisparse.offload.region import Membership, SharedRegion, new_region_name
from hisparse.offload.sharding import Topology
from hisparse.offload.tier import Below
from hisparse.offload.transfer import RegionTransfers
from hisparse.worker import CopyDelay, HiSparseWorker

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
FAILED_CLOSE_SECONDS = 1.0
_LOOKUP_THREADS = 2
_POLL_SECONDS = 0.001

Regions = Mapping[GroupKind, SharedRegion]
Reports = Sequence[tuple[GroupKind, OffloadReport]]
MoveKV = Callable[[tuple[RegionCopies, ...]], Reports]
"""Has all ranks begin copies between two steps, and gives what they have to report."""


@dataclass(frozen=True, slots=True)
class OffloadSpec:
    """What a rank is told of the tiers. `region_names` are the places where ranks of other processes map the regions.

    The scheduler's process is a member of each region too, the first one, because files are read into it there.
    """

    plan: CachePlan
    config: OffloadConfig
    model: ModelIdentity
    num_ranks: int
    region_names: Mapping[GroupKind, str]

    def layouts(self, rank: int = 0) -> dict[GroupKind, GroupLayout]:
        """How a rank's pages of each group lie in the rows of its region. Raises as `GroupLayout.of` does."""
        topology = Topology(self.num_ranks, rank=rank)
        return {
            group: GroupLayout.of(group, self.plan, self.model, self.config, topology) for group in OFFLOADED_GROUPS
        }

    def membership(self, member: int, layout: GroupLayout, *, in_process: bool) -> Membership:
        """Who shares a region: the scheduler's process, as member 0, and each rank that has one of its own."""
        return Membership(member, 1 if in_process else self.num_ranks + 1, layout.identity.digest)


class RankOffload:
    """One rank's side: its pages, mapped to the rows of the regions, and the copies between the two."""

    def __init__(self, spec: OffloadSpec, worker: HiSparseWorker, delay: CopyDelay, regions: Regions) -> None:
        """Map and certify `worker`'s pages. `delay`: of copies on a CPU. `regions`: as this process has them mapped;
        they stay the caller's.

        Raises `LayoutError` for caches that cannot be mapped, `BackendError` when a region cannot be pinned.
        """
        layouts = spec.layouts(worker.rank)
        leaders = range(len(spec.plan.model.leaders))
        views = {
            GroupKind.RESIDENT: [worker.slab.layer(layer) for layer in range(spec.plan.model.num_layers)],
            GroupKind.INDEXER: [worker.indexer.view(leader) for leader in leaders],
        }
        self.digests: dict[GroupKind, bytes] = {}
        """Of each group's mapping: all ranks must have the same."""
        with ExitStack() as undo:
            on_gpu = worker.tables.device.type == "cuda"
            device = _pinned_copies(worker.tables.device, regions, undo) if on_gpu else LateCpuCopies(delay)
            transfers = {}
            for group, layout in layouts.items():
                pages = layout.pages(views[group])
                self.digests[group] = pages.digest
                transfers[group] = RegionTransfers(pages.layers, regions[group], layout.rows, device, pages.slot)
            release = undo.pop_all().close
        self._worker = OffloadingWorker(worker.rank, transfers, device, worker.order_before_compute, release)
        self.connector = OffloadingConnector.for_worker(self._worker)

    def move(self, copies: tuple[RegionCopies, ...]) -> Reports:
        """Begin copies between two steps; what there is to report."""
        self._worker.start(copies)
        return self._worker.take_reports()


class EngineOffload:
    """The scheduler's side of an engine's tiers. `connect` it to the ranks; in the end, `finish` and `close`."""

    def __init__(
        self, plan: CachePlan, config: OffloadConfig, model: ModelIdentity, num_ranks: int, *, in_process: bool
    ) -> None:
        """Take the CPU tier's memory and open the directories. `in_process`: the only rank is in this process.

        Raises `CapacityError` for a CPU tier or a file capacity that holds no chunk, or where the machine has no room
        for the tier; `InputError` for a directory that cannot be used.
        """
        names = {group: new_region_name(f"engine-{group.value}") for group in OFFLOADED_GROUPS}
        self.spec = OffloadSpec(plan, config, model, num_ranks, names)
        self.config = config
        self._move: MoveKV | None = None
        self._is_stuck = False
        """Whether files are still read into the regions or written from them, although their tiers were closed."""
        self._layouts = self.spec.layouts()
        self._managers: dict[GroupKind, OffloadManager] = {}
        with ExitStack() as undo:
            num_rows = rows_for(config.cpu_bytes, list(self._layouts.values()))
            # A look-up that hangs must not keep the process from ending.
            self._executor = DaemonExecutor(_LOOKUP_THREADS, "hisparse-lookup")
            undo.callback(self._executor.shutdown, wait=False, cancel_futures=True)
            self.regions: dict[GroupKind, SharedRegion] = {}
            for group, layout in self._layouts.items():
                membership = self.spec.membership(0, layout, in_process=in_process)
                region = SharedRegion.create(names[group], num_rows, layout.rows.row_bytes, membership)
                undo.callback(region.close)
                self.regions[group] = region
            self._managers = self._make_managers()
            self.source = OffloadingSource(self._managers, config.blocks_per_chunk)
            self._at_close = undo.pop_all()
        self.scheduler_connector = OffloadingConnector.for_scheduler(self.source)

    def connect(self, move: MoveKV, digests: Sequence[Mapping[GroupKind, bytes]]) -> None:
        """The ranks are there. `digests`: of their mappings, rank by rank.

        Raises `LayoutError` when ranks map their pages by different rules.
        """
        for rank, own in enumerate(digests):
            if own != digests[0]:
                raise LayoutError(f"ranks 0 and {rank} map their pages to the region by different rules")
        self._move = move

    def settle(self, deadline_s: float = CLOSE_SECONDS) -> bool:
        """Carry out and report everything that was planned, between two steps. Whether all of it is over in time."""
        if self._move is None:
            return True
        copies = self.source.take_copies()
        until_s = time.monotonic() + deadline_s
        while copies or self.source.num_under_way:
            for group, report in self._move(copies):
                self.source.report(group, report)
            copies = ()
            if self.source.num_under_way and time.monotonic() >= until_s:
                return False
            if self.source.num_under_way:
                time.sleep(_POLL_SECONDS)
        return True

    def use_model(self, model: ModelIdentity) -> None:
        """Keep what other weights compute from now on. What is kept in memory is forgotten, files stay with theirs.

        Raises `BackendError` when copies of the former weights' KV do not end. The regions cannot be used for other KV
        then, but `finish` and `close` work, and do not wait for those copies once more.
        """
        if not self.settle():
            raise BackendError(
                f"{self.source.num_under_way} copies of KV do not end: the device or a file system hangs"
            )
        # What did not end in time may have ended with its tier: the second call only counts.
        if self.source.close(CLOSE_SECONDS) and (num_left := self.source.close(0.0)):
            self._is_stuck = True
            raise BackendError(
                f"{num_left} reads or writes of files with KV do not end, and rows of memory are theirs until they do: "
                f"the file system hangs"
            )
        spec = self.spec
        self.spec = OffloadSpec(spec.plan, spec.config, model, spec.num_ranks, spec.region_names)
        self._layouts = self.spec.layouts()
        self._managers = self._make_managers()
        self.source.rebind(self._managers)

    def tiers(self) -> tuple[TierUse, ...]:
        """What each group's tiers did, and how full the CPU tier is."""
        layouts = self._layouts
        return tuple(TierUse.of(group, m, layouts[group].rows.used_bytes) for group, m in self._managers.items())

    def finish(self, *, after_failure: bool = False) -> None:
        """Write what is worth keeping to files; the ranks may go then. Idempotent.

        `after_failure`: a step was broken off, and copies that it was to begin may never end.
        """
        try:
            self.settle(FAILED_CLOSE_SECONDS if after_failure else CLOSE_SECONDS)
        except BackendError as error:
            logger.warning("not all KV that was to be kept could be copied: %s", error)
        self._move = None
        if not self._is_stuck:
            self.scheduler_connector.shutdown()

    def close(self) -> None:
        """Give the memory back, when no rank of this process uses it any more. Idempotent."""
        self.finish()
        self._at_close.close()

    def _make_managers(self) -> dict[GroupKind, OffloadManager]:
        with ExitStack() as undo:
            managers = {}
            for group, layout in self._layouts.items():
                region, below = self.regions[group], None
                if self.config.files is not None:
                    tier = FileTier(self.config.files, layout.identity)
                    undo.callback(tier.close, 0.0)
                    below = Below(tier, region.row, self._executor)
                former = self._managers.get(group)
                last_id = former.last_transfer_id if former is not None else 0
                managers[group] = OffloadManager(
                    self.config, region.num_blocks, self.spec.num_ranks, below, last_transfer_id=last_id
                )
            undo.pop_all()
        return managers


def attach_regions(spec: OffloadSpec, rank: int, undo: ExitStack) -> Regions:
    """Map the regions that `spec` names, in the process of rank `rank`; `undo` gives them back.

    A region has its name until the last rank has done so: first thing, before anything that takes long. Raises
    `BackendError` when one does not appear in time, or another member gave up.
    """
    regions = {}
    for group, layout in spec.layouts(rank).items():
        membership = spec.membership(rank + 1, layout, in_process=False)
        regions[group] = SharedRegion.attach(spec.region_names[group], membership)
        undo.callback(regions[group].close)
    return regions


def _pinned_copies(device: torch.device, regions: Regions, undo: ExitStack) -> CopyDevice:
    # Loaded where they are used: without a GPU neither its driver nor its compilers need be there.
    from hisparse.offload.cuda_copies import CudaCopies
    from hisparse.offload.pinning import PinnedRegion

    copies = CudaCopies(device)
    index = torch.empty(0, device=device).device.index
    for region in regions.values():
        undo.callback(PinnedRegion(region, index).release)
    return copies
