"""What carries out an engine's steps: one rank in the calling process, or several in processes of their own.

The scheduler's side says in a `StepWork` what is to be computed; every rank does the same, with its part of the model's
heads, and gives a report of its own. Tokens are chosen where the logits are, by rank 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hisparse.cache.groups import GroupKind
from hisparse.config import CachePlan
from hisparse.connector import (
    ConnectorMetadata,
    ConnectorWorkerMetadata,
    HiSparseConnector,
    KVConnector,
    MultiConnector,
    RegionCopies,
)
from hisparse.engine.batch import ScheduledTokens, build_batch
from hisparse.engine.config import EngineConfig
from hisparse.engine.hooks import DsaModelRunner
from hisparse.engine.models import LoadedModel
from hisparse.engine.observer import SelectionObserver, SelectionWatch
from hisparse.engine.offload import OffloadSpec, RankOffload, Regions, Reports
from hisparse.engine.revision import weights_revision
from hisparse.engine.sampler import SamplingParams, sample
from hisparse.errors import InvariantError
from hisparse.kernels.triton_ops import require_triton
from hisparse.protocol import DeviceBlockId
from hisparse.worker import Backend, CopyDelay, CpuBackend, HiSparseWorker
from hisparse.worker.shared_pool import PoolSharing


@dataclass(frozen=True, slots=True)
class Draw:
    """How a request's next token is chosen: its parameters, and how many tokens it has generated before."""

    params: SamplingParams
    step: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step for all ranks. `draws[i]` and `names[i]`, the request's id, belong to `items[i]`.

    `meta` is the connector's. `keeps_logits`: whether the caller wants to see them. Without `items` no forward runs.
    """

    meta: ConnectorMetadata
    items: tuple[ScheduledTokens, ...] = ()
    draws: tuple[Draw, ...] = ()
    names: tuple[str, ...] = ()
    keeps_logits: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The token that was chosen for item `item` of a step; `logits`, float32 `[vocab]`, if they were asked for."""

    item: int
    token: int
    logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepDone:
    """What a step gave: a token for every item that wanted logits, in the batch's order, and one report per rank."""

    choices: tuple[Choice, ...]
    reports: tuple[ConnectorWorkerMetadata, ...]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The caches of every rank of an engine: their plan, the slab blocks that were leased for staging, and the tiers
    below, if there are any."""

    plan: CachePlan
    staging: tuple[DeviceBlockId, ...]
    offload: OffloadSpec | None = None

    def make_worker(self, backend: Backend, rank: int = 0, sharing: PoolSharing | None = None) -> HiSparseWorker:
        """Take the memory. Raises as `HiSparseWorker` does."""
        return HiSparseWorker(self.plan, self.staging, rank=rank, backend=backend, sharing=sharing)


class Executor(Protocol):
    """One or more ranks, as an engine drives them: `open`, then `execute` once a step, then `close`."""

    @property
    def num_ranks(self) -> int:
        """Ranks; each gives a report a step."""
        ...

    @property
    def host_physical_bytes(self) -> int:
        """What the host pools of all ranks occupy together, alignment included; a shared one once."""
        ...

    def revision(self) -> str:
        """What `weights_revision` gives for the whole model. Raises `BackendError` for a rank that ended."""
        ...

    def open(self, caches: CacheSpec, regions: Regions | None = None) -> Sequence[Mapping[GroupKind, bytes]]:
        """Take the memory of all caches, and map the tiers' regions: those of this process, where ranks are in it.

        Returns the digests of each rank's mapping to them. Raises as `HiSparseWorker` and `RankOffload`.
        """
        ...

    def execute(self, work: StepWork) -> StepDone:
        """Carry out one step. Raises whatever a rank found wrong, and `BackendError` for a rank that ended."""
        ...

    def counters(self) -> dict[str, int]:
        """As `HiSparseWorker.counters`, of rank 0: selections are the same in all. Waits for the device."""
        ...

    def num_missing(self) -> int:
        """Rows that had no block to go to, in any rank, since the start. Waits for the device."""
        ...

    def move(self, copies: tuple[RegionCopies, ...]) -> Reports:
        """Have all ranks begin copies to or from the tiers between two steps; what they have to report."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


class ModelRank:
    """One rank: its part of the model, its caches, and the connector's worker role."""

    def __init__(
        self,
        loaded: LoadedModel,
        worker: HiSparseWorker,
        config: EngineConfig,
        offload: OffloadSpec | None = None,
        *,
        regions: Regions | None = None,
        observer: SelectionObserver | None = None,
    ) -> None:
        """Hook the model, and connect the tiers, whose `regions` stay the caller's.

        The rank closes `worker`. Raises as `RankOffload` and the model runners do, and then has closed it.
        """
        self.worker = worker
        self.offload: RankOffload | None = None
        self.connector: KVConnector = HiSparseConnector.for_worker(worker)
        try:
            if offload is not None:
                if regions is None:
                    raise InvariantError(f"rank {worker.rank} is told of tiers, but not of their regions")
                # A seed of its own, so that these copies are not late whenever pages of the pools are.
                delay = CopyDelay(config.seed + 1, config.copy_delay)
                self.offload = RankOffload(offload, worker, delay, regions)
                self.connector = MultiConnector((self.connector, self.offload.connector))
            self.watch: SelectionWatch | None = None
            if observer is not None:
                self.watch = SelectionWatch(observer, worker.tables.block_tables(), config.block_size)
            self.runner = make_runner(loaded, worker, config, self.watch)
        except BaseException:
            self.connector.shutdown()
            raise

    def run(self, work: StepWork) -> tuple[tuple[Choice, ...], ConnectorWorkerMetadata]:
        """One step. Ranks but the first choose nothing."""
        self.connector.bind_connector_metadata(work.meta)
        self.connector.start_load_kv()
        choices = self._forward(work) if work.items else ()
        self.connector.wait_for_save()
        report = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        return choices, report

    def move(self, copies: tuple[RegionCopies, ...]) -> Reports:
        """Begin copies to or from the tiers between two steps; what there is to report."""
        if self.offload is None:
            raise InvariantError(f"rank {self.worker.rank} has no tiers to move KV to")
        return self.offload.move(copies)

    def rehook(self, loaded: LoadedModel, config: EngineConfig) -> None:
        """Take the hooks off the model and put new ones on."""
        self.runner.uninstall()
        self.runner = make_runner(loaded, self.worker, config, self.watch)

    def close(self) -> None:
        """Unhook the model and give the memory back. Idempotent."""
        self.runner.uninstall()
        self.connector.shutdown()

    def _forward(self, work: StepWork) -> tuple[Choice, ...]:
        if self.watch is not None:
            self.watch.begin_step(work.names, work.items)
        batch = build_batch(work.items)
        logits = self.runner.run(batch)
        if self.worker.rank or not batch.logit_items:
            return ()
        draws = [work.draws[item] for item in batch.logit_items]
        names = [work.names[item] for item in batch.logit_items]
        tokens = sample(logits, [draw.params for draw in draws], [draw.step for draw in draws], names)
        kept: Sequence[torch.Tensor | None] = [None] * len(tokens)
        if work.keeps_logits:
            kept = [row.clone() for row in logits]
        return tuple(Choice(*choice) for choice in zip(batch.logit_items, tokens, kept, strict=True))


class InProcessExecutor:
    """One rank, in the calling process."""

    num_ranks = 1

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        backend: Backend | None = None,
        observer: SelectionObserver | None = None,
    ) -> None:
        """`backend`: the machine, by default that of the model's device. `observer` is shown what is selected."""
        self._loaded = loaded
        self._config = config
        self._backend = backend
        self._observer = observer
        self._rank: ModelRank | None = None

    @property
    def rank(self) -> ModelRank:
        """The rank. Raises `InvariantError` before `open`."""
        if self._rank is None:
            raise InvariantError("this executor's caches were not opened")
        return self._rank

    @property
    def host_physical_bytes(self) -> int:
        return self.rank.worker.host_pool.physical_bytes

    def revision(self) -> str:
        return weights_revision(self._loaded.model)

    def open(self, caches: CacheSpec, regions: Regions | None = None) -> Sequence[Mapping[GroupKind, bytes]]:
        backend = self._backend if self._backend is not None else default_backend(self._loaded, self._config)
        self._rank = ModelRank(
            self._loaded,
            caches.make_worker(backend),
            self._config,
            caches.offload,
            regions=regions,
            observer=self._observer,
        )
        return [self._rank.offload.digests if self._rank.offload is not None else {}]

    def reload(self) -> None:
        """The model's weights are others now: its hooks hold products of them, and a GPU's graphs their addresses."""
        self.rank.rehook(self._loaded, self._config)

    def execute(self, work: StepWork) -> StepDone:
        choices, report = self.rank.run(work)
        return StepDone(choices, (report,))

    def counters(self) -> dict[str, int]:
        return self.rank.worker.counters()

    def num_missing(self) -> int:
        return int(self.rank.worker.tables.num_missing())

    def move(self, copies: tuple[RegionCopies, ...]) -> Reports:
        return self.rank.move(copies)

    def close(self) -> None:
        if self._rank is not None:
            self._rank.close()


def default_backend(loaded: LoadedModel, config: EngineConfig) -> Backend:
    """The backend of the device that the model lies on. Raises `BackendError` for a GPU without Triton."""
    if loaded.model.device.type == "cpu":
        return CpuBackend(CopyDelay(config.seed, config.copy_delay))
    require_triton()
    # Loaded where it is used: without a GPU neither its driver nor its compilers need be there.
    from hisparse.worker.cuda import CudaBackend

    return CudaBackend(loaded.model.device)


def make_runner(
    loaded: LoadedModel, worker: HiSparseWorker, config: EngineConfig, watch: SelectionWatch | None = None
) -> DsaModelRunner:
    """The runner of the device that the model lies on; its hooks are installed."""
    if loaded.model.device.type == "cpu":
        return DsaModelRunner(loaded, worker, watch)
    from hisparse.engine.cuda_runner import CudaModelRunner

    return CudaModelRunner(loaded, worker, config, watch)
