"""An engine whose requests get to their context without a forward pass, so that decoding alone is measured.

Everything but the forward is real: the scheduler admits, grants, spills and preempts; the worker copies; rows and index
keys are random and written where the tables say. A request whose prompt is computed is *held*: it has no token to
compute, so the scheduler passes it by until all are resumed together.
"""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from _synthetic_model import index_keys

from hisparse.engine import Engine, EngineConfig, LoadedModel, SamplingParams
from hisparse.engine.request import Request
from hisparse.protocol import Table

SETTLING_STEPS = 32
"""Steps beyond those asked for in which requests that read from the host may still wait for their hot lease."""

IDLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Decoding:
    """What a stretch of decode steps came to. Counts are differences over the stretch."""

    running: int
    waiting: int
    tokens: int
    seconds: float
    step_ms: float
    step_ms_worst: float
    selected: int
    missed: int
    host_to_device_bytes: int
    device_to_host_bytes: int
    preemptions: int
    pages_host: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def miss_rate(self) -> float:
        return self.missed / self.selected if self.selected else 0.0

    @property
    def link_bytes_per_token(self) -> float:
        return self.host_to_device_bytes / self.tokens


@dataclass(frozen=True, slots=True)
class Stages:
    """How often `measure` may be called, and its decode steps: every request keeps so many tokens to generate."""

    count: int
    warmup: int
    steps: int


class Server:
    """One engine, and requests that all come to about `config.max_tokens` tokens. Close it when done."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, plan: Stages) -> None:
        self._plan = plan
        self._output = plan.count * (plan.warmup + plan.steps + SETTLING_STEPS) + 2
        self._random = random.Random(0)
        self._num_requests = 0
        self._elements = loaded.config.kv_lora_rank + loaded.config.qk_rope_head_dim
        self._longest = config.max_tokens - self._output
        if self._longest <= config.block_size:
            raise SystemExit(f"a context of {config.max_tokens} tokens is too short for {self._output} decode steps")
        self.engine = Engine(loaded, config)

    @property
    def running(self) -> list[Request]:
        return list(self.engine.scheduler.running.values())

    def grow_to(self, concurrency: int) -> None:
        """Have `concurrency` requests, and compute the prompts of all that the scheduler lets run together."""
        params = SamplingParams(max_tokens=self._output, ignore_eos=True)
        for _ in range(concurrency - self._num_requests):
            # Lengths differ by up to a page, so that requests do not all cross into the next one together.
            length = self._longest - self._random.randrange(self.engine.config.block_size)
            # Every prompt is different: nobody finds another's prefix.
            self.engine.add_request(list(self._random.randbytes(length)), params)
            self._num_requests += 1
        patience = time.monotonic() + IDLE_SECONDS
        while self._populate_step() or not self._is_settled():
            if time.monotonic() > patience + self._num_requests:
                raise SystemExit(f"{len(self.running)} requests run, and their prompts are not computed")

    def measure(self) -> Decoding:
        """One stage: decode steps that warm up, with all running requests in them, then the measured ones."""
        for request in self.running:
            request.tokens.append(0)
        warmup = self._plan.warmup
        limit = warmup + SETTLING_STEPS
        full_steps = 0
        for _ in range(limit):
            full_steps += self.engine.step().decode_tokens == len(self.running)
            if full_steps >= warmup:
                break
        else:
            raise SystemExit(f"{len(self.running)} requests decoded together in {full_steps} of {limit} steps only")
        decoding = self._timed()
        for request in self.running:
            # Held again: nothing is left to compute, and nothing granted ahead.
            request.tokens.pop()
            request.free_until = 0
        return decoding

    def _timed(self) -> Decoding:
        engine = self.engine
        before, preemptions = engine.worker.counters(), engine.scheduler.num_preemptions
        stretch = list(self._steps())
        after = engine.worker.counters()
        added = {name: after[name] - before[name] for name in after}
        if added["unreachable"] or after["status"] or engine.worker.tables.num_missing():
            raise SystemExit(f"rows were not where the tables say: {added}")
        seconds = [seconds for _, seconds in stretch]
        return Decoding(
            running=len(self.running),
            waiting=len(engine.scheduler.waiting),
            tokens=sum(tokens for tokens, _ in stretch),
            seconds=sum(seconds),
            step_ms=1e3 * statistics.median(seconds),
            step_ms_worst=1e3 * max(seconds),
            selected=added["resident"] + added["hot"] + added["miss"],
            missed=added["miss"],
            host_to_device_bytes=added["host_to_device_bytes"],
            device_to_host_bytes=added["device_to_host_bytes"],
            preemptions=engine.scheduler.num_preemptions - preemptions,
            pages_host=engine.scheduler.coordinator.host_pool.num_leased,
        )

    def _steps(self) -> Iterator[tuple[int, float]]:
        """Decode tokens and seconds of each step. A step ends by reading its tokens, so the clock sees all of it."""
        for _ in range(self._plan.steps):
            begun = time.perf_counter()
            output = self.engine.step()
            yield output.decode_tokens, time.perf_counter() - begun

    def _populate_step(self) -> int:
        """`Engine.step` with random rows in place of the forward pass. Returns the tokens it "computed"."""
        engine = self.engine
        step = engine.scheduler.schedule()
        if step.decodes:
            raise SystemExit("a request decodes that should be held")
        engine.connector.bind_connector_metadata(step.meta)
        engine.connector.start_load_kv()
        for request, count in step.prefills:
            if count:
                self._write(request, count)
        engine.connector.wait_for_save()
        report = engine.connector.build_connector_worker_meta()
        engine.connector.clear_connector_metadata()
        engine.scheduler.complete(step)
        engine.scheduler.update(report)
        return sum(count for _, count in step.prefills)

    def _write(self, request: Request, count: int) -> None:
        worker = self.engine.worker
        device = worker.tables.device
        positions = torch.arange(request.num_computed, request.num_computed + count, device=device)
        slots = torch.full_like(positions, request.slot)
        rows = worker.tables.physical_rows(Table.RESIDENT, slots, positions)
        for handle in worker.handles:
            handle.write(rows, torch.randn((count, self._elements), dtype=torch.bfloat16, device=device))
        key_rows = worker.tables.physical_rows(Table.INDEXER, slots, positions)
        for leader_index in range(len(worker.plan.model.leaders)):
            worker.indexer.write(leader_index, key_rows, index_keys(count, device))

    def _is_settled(self) -> bool:
        """Whether everything that can run has its prompt computed, and no copy is on its way."""
        computed = all(request.num_computed >= request.num_prompt for request in self.running)
        return computed and not self.engine.scheduler.coordinator.num_in_flight

    def close(self) -> None:
        """Give the memory back, and the model."""
        self.engine.close()
