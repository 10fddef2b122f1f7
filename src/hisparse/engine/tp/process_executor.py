"""An engine's steps, carried out by several ranks in processes of their own."""

import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from hisparse.cache.groups import GroupKind
from hisparse.connector import RegionCopies
from hisparse.engine.config import EngineConfig
from hisparse.engine.executor import CacheSpec, StepDone, StepWork
from hisparse.engine.models import LoadedModel, require_device
from hisparse.engine.offload import Regions, Reports
from hisparse.engine.parallel import HostBacking, TensorParallel
from hisparse.engine.tp.meeting import make_store
from hisparse.engine.tp.messages import Count, Counted, Move, Moved, OpenCaches, Opened, Ready, Stepped
from hisparse.engine.tp.processes import RankProcesses, SharedFiles
from hisparse.engine.tp.rank_spec import RankSpec
from hisparse.engine.tp.sharded_model import check_heads
from hisparse.errors import BackendError, InvariantError
from hisparse.geometry import align_up
from hisparse.worker.host_order import HostOrder, create_shared_file

logger = logging.getLogger(__name__)


class ProcessExecutor:
    """`Executor` over `num_ranks` processes: `__init__` starts them and loads the model, `open` takes the caches."""

    start_method = "spawn"
    prepare: Callable[[int], None] | None = None
    """What every rank calls first: tests break something there."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, parallel: TensorParallel) -> None:
        """`loaded` says which model the ranks load; of its weights nothing is used.

        Raises `InputError` for a number of ranks that does not divide the model's heads, `BackendError` for a device
        that is not there and for a rank that ended or hangs, and what a rank found wrong; nothing is left of any then.
        """
        check_heads(loaded.config, parallel.num_ranks)
        require_device(parallel.device)
        self._parallel = parallel
        self._host_bytes = 0
        self._store = make_store()
        self._files = _shared_files(config, loaded, parallel)
        self._processes = RankProcesses(self.start_method)
        try:
            self._processes.start(self._specs(loaded, config), self._files)
            answers = self._processes.ask(None, parallel.start_s)
        except BaseException:
            self._kill()
            raise
        ready: list[Ready] = answers
        self._revision = ready[0].revision
        if len({answer.revision for answer in ready}) != 1:
            self._kill()
            raise BackendError(f"the ranks loaded different weights: {loaded.name} was changed meanwhile; start again")

    @property
    def num_ranks(self) -> int:
        return self._parallel.num_ranks

    @property
    def host_physical_bytes(self) -> int:
        return self._host_bytes

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each rank."""
        return tuple(rank.process.pid or 0 for rank in self._processes.ranks)

    def revision(self) -> str:
        """Only where tiers are configured: ranks are not asked otherwise."""
        if self._revision is None:
            raise InvariantError("ranks without tiers were not asked which weights they have")
        return self._revision

    def open(self, caches: CacheSpec, regions: Regions | None = None) -> Sequence[Mapping[GroupKind, bytes]]:
        """Raises as `__init__`, with the same end. Ranks map regions by name: `regions` are not theirs."""
        try:
            opened: list[Opened] = self._processes.ask(
                OpenCaches(caches, self._parallel.backing), self._parallel.start_s
            )
        except BaseException:
            self._kill()
            raise
        # The ranks hold the shared files by now: whatever ends them gives the memory back.
        self._files.close()
        self._files = SharedFiles()
        self._processes.remove_driver_files()
        # Ranks that map the same file have one pool together, whatever they were told.
        pools = {answer.host_file or rank: answer.host_physical_bytes for rank, answer in enumerate(opened)}
        self._host_bytes = sum(pools.values())
        logger.info(
            "host pool of %d ranks: %d bytes usable, %d bytes of memory",
            self.num_ranks,
            opened[0].host_usable_bytes,
            self._host_bytes,
        )
        return [answer.digests for answer in opened]

    def execute(self, work: StepWork) -> StepDone:
        answers: list[Stepped] = self._processes.ask(work, self._parallel.step_s)
        choices, logits = answers[0].choices, answers[0].logits
        if logits is not None:
            rows = torch.from_numpy(logits)
            choices = tuple(
                type(choice)(choice.item, choice.token, row) for choice, row in zip(choices, rows, strict=True)
            )
        return StepDone(choices, tuple(answer.report for answer in answers))

    def counters(self) -> dict[str, int]:
        return self._count()[0].counters

    def num_missing(self) -> int:
        return sum(counted.num_missing for counted in self._count())

    def move(self, copies: tuple[RegionCopies, ...]) -> Reports:
        answers: list[Moved] = self._processes.ask(Move(copies), self._parallel.step_s)
        return [report for answer in answers for report in answer.reports]

    def close(self) -> None:
        try:
            self._processes.close(self._parallel.close_s)
        finally:
            self._give_back()

    def _kill(self) -> None:
        """End ranks that are not ready, and so would not hear that they are to end."""
        try:
            self._processes.kill()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._files.close()
        self._files = SharedFiles()
        self._store = None

    def _count(self) -> list[Counted]:
        return self._processes.ask(Count(), self._parallel.step_s)

    def _specs(self, loaded: LoadedModel, config: EngineConfig) -> list[RankSpec]:
        num_ranks = self._parallel.num_ranks
        in_main = threading.current_thread() is threading.main_thread()
        return [
            RankSpec(
                rank=rank,
                num_ranks=num_ranks,
                model=loaded.name,
                dtype=str(loaded.dtype).removeprefix("torch."),
                device=self._parallel.device,
                config=config,
                store_port=self._store.port,
                parent=os.getpid(),
                # A thread that ends would take its child processes with it.
                dies_with_parent=in_main and self._parallel.device == "cpu",
                start_s=self._parallel.start_s,
                timeout_s=self._parallel.step_s,
                num_threads=max(1, torch.get_num_threads() // num_ranks),
                wants_revision=config.offload is not None,
                prepare=type(self).prepare,
            )
            for rank in range(num_ranks)
        ]


def _shared_files(config: EngineConfig, loaded: LoadedModel, parallel: TensorParallel) -> SharedFiles:
    """The host pool for all ranks, and its order. Nothing of it is in memory yet."""
    if parallel.backing is HostBacking.PRIVATE:
        return SharedFiles()
    plan = config.plan(loaded.geometry_for(config.kv_dtype))
    pool = create_shared_file("host-pool", align_up(plan.host_pool_physical_bytes, mmap.PAGESIZE))
    try:
        return SharedFiles(pool, HostOrder.create_file(parallel.num_ranks))
    except BaseException:
        os.close(pool)
        raise
