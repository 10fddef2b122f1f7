"""The embedded engine: requests in, tokens out, one step at a time.

schedule → bind, start transfers → forward → sample → report → complete
"""

import itertools
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from hisparse.cache.prefix import root_key
from hisparse.connector import HiSparseConnector
from hisparse.engine.batch import ScheduledTokens, build_batch
from hisparse.engine.config import EngineConfig
from hisparse.engine.hooks import DsaModelRunner
from hisparse.engine.models import LoadedModel
from hisparse.engine.observer import SelectionObserver, SelectionWatch
from hisparse.engine.output import StepOutput, TextStream, TokenOutput
from hisparse.engine.request import FinishReason, Request
from hisparse.engine.sampler import SamplingParams, sample
from hisparse.engine.scheduler import ScheduledStep, Scheduler
from hisparse.engine.stats import BytesMoved, EngineStats, KVUse, PageWatch, RowUse
from hisparse.errors import InputError, InvariantError
from hisparse.kernels.triton_ops import require_triton
from hisparse.worker import Backend, CopyDelay, CpuBackend, HiSparseWorker


@dataclass(frozen=True, slots=True)
class RequestResult:
    """A request's outcome, finished or so far. Times in seconds; `tpot_s` is the mean after the first token.

    `logits`: float32 `[vocab]` for each output token, kept only when the engine was asked to.
    """

    request_id: str
    prompt_tokens: int
    output_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    ttft_s: float | None
    tpot_s: float | None
    logits: tuple[torch.Tensor, ...] = ()


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
    ) -> None:
        """Take the memory of all caches and hook the model.

        `backend`: the machine, by default the one that the model's device is of. `observer` is shown what is selected.

        Raises `InputError` when `config.max_tokens` is more than the model has positions, an option is outside its
        range or the model's rows cannot be stored as `config.kv_dtype`, `CapacityError` for budgets that cannot run
        one request, `BackendError` when memory cannot be had.
        """
        if config.max_tokens > loaded.max_tokens:
            raise InputError(
                f"requests of up to {config.max_tokens} tokens, prompt and output together, do not fit "
                f"{loaded.name}: it has {loaded.max_tokens} positions"
            )
        self.loaded = loaded
        self.config = config
        self.plan = config.plan(loaded.geometry_for(config.kv_dtype))
        root = root_key(loaded.name, self.plan.model.row.name, config.block_size)
        self.scheduler = Scheduler(self.plan, config.chunk_tokens, root)
        backend = backend if backend is not None else default_backend(loaded, config)
        self.worker = HiSparseWorker(self.plan, self.scheduler.kv.staging, backend=backend)
        self.connector = HiSparseConnector.for_worker(self.worker)
        self._watch_selections = None
        if observer is not None:
            self._watch_selections = SelectionWatch(observer, self.worker.tables.block_tables(), config.block_size)
        self.runner = _runner(loaded, self.worker, config, self._watch_selections)
        self._requests: dict[str, Request] = {}
        self._texts: dict[str, TextStream] = {}
        self._ids = itertools.count()
        self._watch = PageWatch()
        self._closed = False
        self._failed = False

    # Requests.

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> str:
        """Queue a prompt. Returns the request's id.

        Raises `InputError` for an empty prompt or ids outside the vocabulary, `CapacityError` for one that can
        never fit.
        """
        if not prompt_ids:
            raise InputError("the prompt is empty: it needs at least one token")
        vocab = self.loaded.vocab_size
        for token in prompt_ids:
            if not 0 <= token < vocab:
                raise InputError(f"token id {token} is outside the vocabulary of {vocab}")
        request_id = f"request-{next(self._ids)}"
        request = Request(request_id, params, array("i", prompt_ids), len(prompt_ids))
        self.scheduler.add(request)
        self._requests[request_id] = request
        self._texts[request_id] = TextStream(self.loaded.tokenizer, params.stop)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request early; what it has generated stays in its result. Raises `InputError` for an unknown id."""
        if request_id not in self._requests:
            raise InputError(f"there is no request {request_id!r} to abort")
        self.scheduler.finish(self._requests[request_id])

    # Steps.

    def run(self) -> Iterator[StepOutput]:
        """Step until every request is done, giving out tokens as they come."""
        while self.scheduler.has_work:
            yield self.step()

    def step(self) -> StepOutput:
        """One step. It may compute nothing, when all requests wait for copies.

        A step that fails leaves rows half written, so after one the engine can only be closed.
        """
        if self._closed or self._failed:
            raise InvariantError("this engine was closed" if self._closed else "a step of this engine failed")
        self._failed = True
        output = self._step()
        self._failed = False
        return output

    def _step(self) -> StepOutput:
        step = self.scheduler.schedule()
        self.connector.bind_connector_metadata(step.meta)
        self.connector.start_load_kv()
        chosen = [] if step.is_empty else self._forward(step)
        self.connector.wait_for_save()
        report = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        self._see_pages()
        self.scheduler.complete(step)
        self.scheduler.update(report)
        tokens = tuple(self._take_token(request, token) for request, token in chosen)
        if any(token.finish_reason for token in tokens):
            self.scheduler.restore_idle()
        if self.config.debug:
            self._assert_invariants()
        return StepOutput(sum(count for _, count in step.prefills), len(step.decodes), tokens)

    def _forward(self, step: ScheduledStep) -> list[tuple[Request, int]]:
        """Compute the step and choose a token for every request whose tokens are now all computed."""
        work = [(request, 1, True) for request in step.decodes]
        work += [(request, count, False) for request, count in step.prefills]
        items = []
        for request, count, is_decode in work:
            start = request.num_computed
            wants_logits = start + count == len(request.tokens)
            token_ids = request.tokens[start : start + count]
            items.append(ScheduledTokens(request.slot, token_ids, start, wants_logits, is_decode))
        if self._watch_selections is not None:
            self._watch_selections.begin_step([request.request_id for request, _, _ in work], items)
        batch = build_batch(items)
        logits = self.runner.run(batch)
        requests = [work[index][0] for index in batch.logit_items]
        if self.config.keep_logits:
            for request, row in zip(requests, logits, strict=True):
                request.logits.append(row.clone())
        tokens = sample(logits, [r.params for r in requests], [r.num_output for r in requests]) if requests else []
        return list(zip(requests, tokens, strict=True))

    def _assert_invariants(self) -> None:
        self.scheduler.assert_invariants()
        if missing := self.worker.tables.num_missing():
            raise InvariantError(f"{missing} rows of this or an earlier step had no block to go to")

    def _take_token(self, request: Request, token: int) -> TokenOutput:
        now = time.monotonic()
        request.first_token = request.first_token or now
        request.last_token = now
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
            self.scheduler.finish(request)
        return TokenOutput(request.request_id, token, text, request.finish_reason)

    def _see_pages(self) -> None:
        kv, coordinator = self.scheduler.kv, self.scheduler.coordinator
        hot = sum(request.holds_hot for request in self.scheduler.running.values()) * self.plan.hot_blocks
        self._watch.see(kv.slab.num_leased - hot - len(kv.staging), coordinator.host_pool.num_leased)

    # Results.

    def results(self) -> list[RequestResult]:
        """All requests in the order in which they came, finished or not."""
        return [self._result(request) for request in self._requests.values()]

    def _result(self, request: Request) -> RequestResult:
        ttft = tpot = None
        if request.first_token is not None and request.last_token is not None:
            ttft = request.first_token - request.arrival
            if request.num_output > 1:
                tpot = (request.last_token - request.first_token) / (request.num_output - 1)
        return RequestResult(
            request_id=request.request_id,
            prompt_tokens=request.num_prompt,
            output_ids=tuple(request.output),
            text=self._texts[request.request_id].text,
            finish_reason=request.finish_reason,
            ttft_s=ttft,
            tpot_s=tpot,
            logits=tuple(request.logits),
        )

    def stats(self) -> EngineStats:
        """Counters since the engine was made. Waits for the device."""
        counters = self.worker.counters()
        plan, totals = self.plan, self.scheduler.coordinator.totals
        kv = KVUse(
            total_bytes=self._watch.total_bytes(plan.device),
            device_bytes=plan.num_device_blocks * plan.device.payload_bytes,
            staging_bytes=plan.staging_blocks * plan.device.payload_bytes,
            indexer_bytes=plan.num_indexer_blocks * plan.indexer.payload_bytes,
            host_bytes=self._watch.host * plan.host.payload_bytes,
            host_physical_bytes=self.worker.host_pool.physical_bytes,
            pages_resident=self._watch.resident,
            pages_host=self._watch.host,
        )
        rows = RowUse(*(counters[name] for name in ("resident", "hot", "miss", "unreachable")))
        moved = BytesMoved(counters["host_to_device_bytes"], counters["device_to_host_bytes"])
        return EngineStats(kv, rows, moved, totals.spills, totals.restores, self.scheduler.num_preemptions)

    def close(self) -> None:
        """Unhook the model and give the memory back. Idempotent."""
        if not self._closed:
            self._closed = True
            self.runner.uninstall()
            self.connector.shutdown()

    def __enter__(self) -> "Engine":
        if self._closed:
            raise InvariantError("this engine was closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def default_backend(loaded: LoadedModel, config: EngineConfig) -> Backend:
    """The backend of the device that the model lies on. Raises `BackendError` for a GPU without Triton."""
    if loaded.model.device.type == "cpu":
        return CpuBackend(CopyDelay(config.seed, config.copy_delay))
    require_triton()
    # Loaded where it is used: without a GPU neither its driver nor its compilers need be there.
    from hisparse.worker.cuda import CudaBackend

    return CudaBackend(loaded.model.device)


def _runner(
    loaded: LoadedModel, worker: HiSparseWorker, config: EngineConfig, watch: SelectionWatch | None
) -> DsaModelRunner:
    if loaded.model.device.type == "cpu":
        return DsaModelRunner(loaded, worker, watch)
    from hisparse.engine.cuda_runner import CudaModelRunner

    return CudaModelRunner(loaded, worker, config, watch)
