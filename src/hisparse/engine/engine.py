"""The embedded engine: requests in, tokens out, one step at a time.

schedule → bind, start transfers → forward → sample → report → complete
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

import torch

from hisparse.connector import KVConnector, MultiConnector
from hisparse.engine.batch import ScheduledTokens
from hisparse.engine.config import EngineConfig
from hisparse.engine.executor import (
    CacheSpec,
    Choice,
    Draw,
    Executor,
    InProcessExecutor,
    ModelRank,
    StepWork,
)
from hisparse.engine.hooks import DsaModelRunner, is_hooked
from hisparse.engine.meter import EngineMeter
from hisparse.engine.models import LoadedModel
from hisparse.engine.observer import SelectionObserver
from hisparse.engine.offload import EngineOffload
from hisparse.engine.output import StepOutput, TextStream, TokenOutput
from hisparse.engine.request import FinishReason, Request, RequestStatus, check_stop_tokens, checked_prompt
from hisparse.engine.result import RequestResult
from hisparse.engine.revision import check_weights, model_identity
from hisparse.engine.sampler import SamplingParams
from hisparse.engine.scheduled_step import ScheduledStep
from hisparse.engine.scheduler import Scheduler
from hisparse.engine.stats import BytesMoved, EngineStats, KVUse, PageWatch, RowUse
from hisparse.engine.tp import ProcessExecutor
from hisparse.errors import CapacityError, InputError, InvariantError
from hisparse.offload.engine_layout import ModelIdentity
from hisparse.worker import Backend, HiSparseWorker
from hisparse.worker.memory_limits import require_memory

IDLE_SECONDS = 0.0002
"""How long a step takes that has nothing to compute, where what it waits for may be read by other threads."""


class Engine:
    """Continuous batching over one model whose KV is ours. Close it, or use it as a context manager.

    The model is hooked while the engine is open and is as before afterwards.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        backend: Backend | None = None,
        observer: SelectionObserver | None = None,
        meter: EngineMeter | None = None,
    ) -> None:
        """Take the memory of all caches and hook the model.

        `backend`: the machine, by default the one that the model's device is of. `observer` is shown what is selected,
        `meter` is told of steps and requests.

        Raises `InputError` when another engine drives the model, `config.max_tokens` is more than the model has
        positions, an option is outside its range, the model's rows cannot be stored as `config.kv_dtype` or a directory
        for files cannot be used, `CapacityError` for budgets that cannot run one request or keep one chunk and for host
        pools that there is no memory for, `BackendError` when memory cannot be had.
        """
        if is_hooked(loaded.model):
            raise InputError(f"another engine drives {loaded.name}: close that one first, or load the model once more")
        if config.max_tokens > loaded.max_tokens:
            raise InputError(
                f"requests of up to {config.max_tokens} tokens, prompt and output together, do not fit "
                f"{loaded.name}: it has {loaded.max_tokens} positions"
            )
        self.loaded = loaded
        self.config = config
        self.plan = config.plan(loaded.geometry_for(config.kv_dtype))
        # Before anything that grows with the pools is made.
        num_pools = config.parallel.num_pools if config.parallel is not None else 1
        require_memory("the host pool", num_pools * self.plan.host_pool_physical_bytes)
        self._num_swaps = 0
        self._failed = self._closed = False
        self._offload: EngineOffload | None = None
        self.executor = _make_executor(loaded, config, backend, observer)
        try:
            self._open_caches()
        except BaseException as error:
            self._failed = True
            self.close()
            if isinstance(error, MemoryError):
                raise CapacityError(
                    f"there is no memory to keep account of {self.plan.num_device_blocks} device blocks and "
                    f"{self.plan.num_host_blocks} host blocks: make the device budget, the staging rows or the host "
                    "pool smaller"
                ) from error
            raise
        self._requests: dict[str, Request] = {}
        self._texts: dict[str, TextStream] = {}
        self._ids = itertools.count()
        self._watch = PageWatch()
        self._meter = meter

    # Requests.

    def add_request(self, prompt_ids: Sequence[int] | torch.Tensor, params: SamplingParams) -> str:
        """Queue a prompt, token ids or an integer tensor `[n]` of them. Returns the request's id.

        Raises `InputError` for an empty prompt, for prompt or stop tokens that are not integers of the vocabulary,
        `CapacityError` for what can never fit, `InvariantError` after `close`.
        """
        if self._closed:
            raise InvariantError("this engine was closed")
        tokens = checked_prompt(prompt_ids, self.loaded.vocab_size)
        check_stop_tokens(params, self.loaded.vocab_size)
        request_id = f"request-{next(self._ids)}"
        request = Request(request_id, params, tokens, len(tokens))
        self.scheduler.add(request)
        self._requests[request_id] = request
        self._texts[request_id] = TextStream(self.loaded.tokenizer, params.stop)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request early; what it has generated stays in its result. Raises `InputError` for an unknown id."""
        if request_id not in self._requests:
            raise InputError(f"there is no request {request_id!r} to abort")
        self._end(self._requests[request_id])

    def take_result(self, request_id: str) -> RequestResult:
        """The result of a request that has ended, which is forgotten with it. Raises `InputError` for another one.

        For engines that live long: until then, everything that was ever asked is kept.
        """
        request = self._requests.get(request_id)
        if request is None or request.status is not RequestStatus.FINISHED:
            raise InputError(f"there is no request {request_id!r} that has ended")
        result = self._result(request)
        del self._requests[request_id], self._texts[request_id]
        return result

    # What was computed before.

    def settle(self) -> bool:
        """Have copies for the tiers that were planned carried out and end, between two steps. Whether they do in time.

        For whoever looks at the tiers: an engine that goes on needs no such wait.
        """
        return self._offload is None or self._offload.settle()

    def reset_prefix_cache(self, *, tiers: bool = False) -> None:
        """Forget what finished requests left in the pools, and with `tiers` what is kept below them.

        Requests that run keep what they have. Files stay where they are, and this engine reads none of them any more.
        """
        self.scheduler.reset_prefix_cache(tiers)

    def swap_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Go on with other weights, between two steps: nothing that was computed with the former ones is read again.

        `weights`: the model's whole state, by name. Running requests keep what they have generated, and compute their
        KV anew. Raises `InputError` when names or shapes are not the model's, and then nothing has changed. An engine
        whose swap failed otherwise can only be closed.
        """
        self._check_usable()
        executor = self.executor
        if not isinstance(executor, InProcessExecutor):
            raise InputError("several ranks cannot change their weights while they run: make an engine anew")
        model = self.loaded.model
        check_weights(model, weights)
        self._failed = True
        model.load_state_dict(weights)
        self._num_swaps += 1
        identity = self._identify()
        self.scheduler.invalidate(identity.root)
        if self._offload is not None:
            self._offload.use_model(identity)
        executor.reload()
        self._failed = False

    def _identify(self) -> ModelIdentity:
        # Where nothing outlives the engine, it need only tell its own weights apart.
        kept = self.config.offload is not None
        revision = self.executor.revision() if kept else f"swap {self._num_swaps}"
        return model_identity(self.loaded, self.plan, self.config.prefix_salt, revision)

    def _open_caches(self) -> None:
        """The scheduler's books, the tiers, and the memory of all ranks."""
        config, executor, identity = self.config, self.executor, self._identify()
        offload = None
        if config.offload is not None:
            in_process = config.parallel is None
            offload = EngineOffload(self.plan, config.offload, identity, executor.num_ranks, in_process=in_process)
        self._offload = offload
        source = offload.source if offload is not None else None
        self.scheduler = Scheduler(self.plan, config.chunk_tokens, identity.root, executor.num_ranks, source=source)
        caches = CacheSpec(self.plan, tuple(self.scheduler.kv.staging), offload.spec if offload is not None else None)
        digests = executor.open(caches, offload.regions if offload is not None else None)
        if offload is not None:
            offload.connect(executor.move, digests)
            self.scheduler.connector = MultiConnector((self.scheduler.connector, offload.scheduler_connector))

    # The rank of an engine whose only one is in this process; `InvariantError` where there are others.

    @property
    def worker(self) -> HiSparseWorker:
        """The caches."""
        return self._own_rank.worker

    @property
    def connector(self) -> KVConnector:
        """The connector's worker role."""
        return self._own_rank.connector

    @property
    def runner(self) -> DsaModelRunner:
        """The model and its hooks."""
        return self._own_rank.runner

    @property
    def _own_rank(self) -> ModelRank:
        if not isinstance(self.executor, InProcessExecutor):
            raise InvariantError(f"the {self.executor.num_ranks} ranks of this engine are other processes")
        return self.executor.rank

    # Steps.

    def run(self) -> Iterator[StepOutput]:
        """Step until every request is done, giving out tokens as they come."""
        while self.scheduler.has_work:
            yield self.step()

    def step(self) -> StepOutput:
        """One step. It may compute nothing, when all requests wait for copies.

        A step that fails leaves rows half written, so after one the engine can only be closed.
        """
        self._check_usable()
        self._failed = True
        started = time.perf_counter()
        output = self._step()
        self._failed = False
        if self._meter is not None:
            self._meter.see_step(self, output, time.perf_counter() - started)
        return output

    def _check_usable(self) -> None:
        if self._closed or self._failed:
            raise InvariantError("this engine was closed" if self._closed else "a step of this engine failed")

    def _step(self) -> StepOutput:
        step = self.scheduler.schedule()
        work, requests = self._work_of(step)
        if step.is_empty and self._offload is not None:
            # Whoever waits for files lets the threads have the interpreter that read them.
            time.sleep(IDLE_SECONDS)
        done = self.executor.execute(work)
        self._see_pages()
        self.scheduler.complete(step)
        for report in done.reports:
            self.scheduler.update(report)
        tokens = tuple(self._take_choice(requests[choice.item], choice) for choice in done.choices)
        if any(token.finish_reason for token in tokens):
            self.scheduler.restore_idle()
        if self.config.debug:
            self._assert_invariants()
        return StepOutput(sum(count for _, count in step.prefills), len(step.decodes), tokens)

    def _work_of(self, step: ScheduledStep) -> tuple[StepWork, list[Request]]:
        """A step as its ranks are told of it, and whose its items are."""
        chosen = [(request, 1, True) for request in step.decodes]
        chosen += [(request, count, False) for request, count in step.prefills]
        items = []
        for request, count, is_decode in chosen:
            start = request.num_computed
            wants_logits = start + count == len(request.tokens)
            token_ids = request.tokens[start : start + count]
            items.append(ScheduledTokens(request.slot, token_ids, start, wants_logits, is_decode))
        requests = [request for request, _, _ in chosen]
        work = StepWork(
            meta=step.meta,
            items=tuple(items),
            draws=tuple(Draw(request.params, request.num_output) for request in requests),
            names=tuple(request.request_id for request in requests),
            keeps_logits=self.config.keep_logits,
        )
        return work, requests

    def _assert_invariants(self) -> None:
        self.scheduler.assert_invariants()
        if missing := self.executor.num_missing():
            raise InvariantError(f"{missing} rows of this or an earlier step had no block to go to")

    def _take_choice(self, request: Request, choice: Choice) -> TokenOutput:
        if choice.logits is not None:
            request.logits.append(choice.logits)
        return self._take_token(request, choice.token)

    def _take_token(self, request: Request, token: int) -> TokenOutput:
        request.last_token = time.monotonic()
        if request.first_token is None:
            request.first_token = request.last_token
            if self._meter is not None:
                self._meter.see_first_token(request)
        request.tokens.append(token)
        stream = self._texts[request.request_id]
        is_end = token in request.params.stop_token_ids
        is_end |= token in self.loaded.eos_token_ids and not request.params.ignore_eos
        text = "" if is_end else stream.push(token)
        if is_end or stream.stopped:
            request.finish_reason = FinishReason.STOP
        elif request.num_output >= request.params.max_tokens:
            request.finish_reason = FinishReason.LENGTH
        if request.finish_reason is not None:
            text += stream.flush()
            self._end(request)
        return TokenOutput(request.request_id, token, text, request.finish_reason)

    def _end(self, request: Request) -> None:
        is_over = request.status is RequestStatus.FINISHED
        self.scheduler.finish(request)
        if self._meter is not None and not is_over:
            self._meter.see_end(self, request)

    def _see_pages(self) -> None:
        kv, coordinator = self.scheduler.kv, self.scheduler.coordinator
        hot = sum(request.holds_hot for request in self.scheduler.running.values()) * self.plan.hot_blocks
        self._watch.see(kv.slab.num_leased - hot - len(kv.staging), coordinator.host_pool.num_leased)

    # Results.

    def results(self) -> list[RequestResult]:
        """All requests in the order in which they came, finished or not."""
        return [self._result(request) for request in self._requests.values()]

    def _result(self, request: Request) -> RequestResult:
        return RequestResult.of(request, self._texts[request.request_id].text)

    def stats(self) -> EngineStats:
        """Counters since the engine was made. Waits for the device."""
        counters = self.executor.counters()
        plan, totals = self.plan, self.scheduler.coordinator.totals
        kv = KVUse(
            total_bytes=self._watch.total_bytes(plan.device),
            device_bytes=plan.num_device_blocks * plan.device.payload_bytes,
            staging_bytes=plan.staging_blocks * plan.device.payload_bytes,
            indexer_bytes=plan.num_indexer_blocks * plan.indexer.payload_bytes,
            host_bytes=self._watch.host * plan.host.payload_bytes,
            host_physical_bytes=self.executor.host_physical_bytes,
            pages_resident=self._watch.resident,
            pages_host=self._watch.host,
        )
        rows = RowUse(*(counters[name] for name in ("resident", "hot", "miss", "unreachable")))
        moved = BytesMoved(counters["host_to_device_bytes"], counters["device_to_host_bytes"])
        return EngineStats(
            kv=kv,
            rows=rows,
            moved=moved,
            spills=totals.spills,
            restores=totals.restores,
            preemptions=self.scheduler.num_preemptions,
            reused=replace(self.scheduler.reused),
            tiers=() if self._offload is None else self._offload.tiers(),
        )

    def close(self) -> None:
        """Unhook the model, have files keep what they should, and give the memory back. Idempotent."""
        if not self._closed:
            self._closed = True
            with ExitStack() as last:
                if self._offload is not None:
                    last.callback(self._offload.close)
                last.callback(self.executor.close)
                if self._offload is not None:
                    self._offload.finish(after_failure=self._failed)

    def __enter__(self) -> "Engine":
        if self._closed:
            raise InvariantError("this engine was closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _make_executor(
    loaded: LoadedModel, config: EngineConfig, backend: Backend | None, observer: SelectionObserver | None
) -> Executor:
    if config.parallel is None:
        return InProcessExecutor(loaded, config, backend, observer)
    if backend is not None or observer is not None:
        raise InputError("ranks in processes of their own take neither a backend nor an observer of this one")
    return ProcessExecutor(loaded, config, config.parallel)
