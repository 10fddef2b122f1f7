"""Which requests compute how many tokens in a step, and the blocks they do it in.

Order is age: the request admitted first is served first and preempted last. A decode that crosses no page boundary and
changes no state costs one comparison. Spills for the next step are begun in this one, so that their copies run beside
its forward.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from hisparse.cache import GRANTED, Admission, KVCacheManager, TableLog, Verdict
from hisparse.config import CachePlan
from hisparse.connector import ConnectorMetadata, ConnectorWorkerMetadata, HiSparseConnector
from hisparse.engine.request import Request, RequestStatus
from hisparse.errors import CapacityError, InvariantError
from hisparse.geometry import ceil_div
from hisparse.residency import Demand, HiSparseCoordinator, PrefixHit, Supply, can_ever_run, may_start


@dataclass(slots=True)
class ScheduledStep:
    """One step's work. `decodes` compute one token each, the last of theirs; `prefills` the next `n` of theirs."""

    number: int
    decodes: list[Request] = field(default_factory=list)
    prefills: list[tuple[Request, int]] = field(default_factory=list)
    meta: ConnectorMetadata = field(default_factory=ConnectorMetadata)

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.prefills)


class Scheduler:
    """Continuous batching over one replica's caches.

    `chunk_tokens` bounds the prompt tokens of a step. `root` is the prefix key of the model at hand.
    """

    def __init__(self, plan: CachePlan, chunk_tokens: int, root: bytes, num_workers: int = 1) -> None:
        self.plan = plan
        self.block_size = plan.config.block_size
        self.chunk_tokens = chunk_tokens
        log = TableLog()
        self.kv = KVCacheManager(plan, log)
        self.coordinator = HiSparseCoordinator(self.kv, log, root, num_workers)
        self.connector = HiSparseConnector.for_scheduler(self.coordinator, log)
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.num_preemptions = 0
        self._free_slots = list(range(plan.config.max_running))
        self._promised = 0
        self._refused: tuple[int, ...] | None = None
        """The most room of each kind that was too little for the first waiting request: a look-up costs its length."""
        self._step = 0

    # Requests.

    def add(self, request: Request) -> None:
        """Queue a request. Raises `CapacityError` when it could not run even with all pools to itself."""
        limit = self.plan.config.max_tokens
        if request.max_length > limit:
            raise CapacityError(
                f"request {request.request_id} may grow to {request.max_length} tokens; the limit is {limit}"
            )
        verdict = can_ever_run(self.plan, Demand.of(self.plan, request.num_prompt, request.max_length))
        if verdict.verdict is Verdict.NEVER:
            raise CapacityError(f"request {request.request_id} of {request.num_prompt} tokens: {verdict.reason}")
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """The request is done: give back all it holds. What it computed stays findable."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self._refused = None
        request.status = RequestStatus.FINISHED

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # One step.

    def schedule(self) -> ScheduledStep:
        """Choose the step's work and build the workers' command for it."""
        self._step += 1
        step = ScheduledStep(self._step)
        budget, coming = self.chunk_tokens, 0
        preemptions = self.num_preemptions
        block_size = self.block_size
        for request_id in self.coordinator.take_newly_backed():
            if request_id in self.running:
                self.running[request_id].free_until = 0
        decode = step.decodes.append
        for request in list(self.running.values()):
            computed = request.num_computed
            if computed < request.free_until:
                decode(request)
            elif request.status is not RequestStatus.RUNNING:
                continue
            elif len(request.tokens) - computed == 1 and computed >= request.num_prompt:
                if self._grant_decode(request, step):
                    decode(request)
                    coming += computed + 1 >= request.capacity
            elif budget:
                done = self._grant_prefill(request, budget, step)
                budget -= done
                coming += ceil_div(min(self.chunk_tokens, len(request.tokens) - computed - done), block_size)
        if self.num_preemptions == preemptions:
            coming += self._admit(step, budget)
        if coming > self.kv.slab.num_free:
            self.coordinator.reclaim(coming - self.kv.slab.num_free)
        step.meta = self.connector.build_connector_meta(self._step)
        return step

    def complete(self, step: ScheduledStep) -> None:
        """The step's forward is done: its tokens are computed, pages that filled up are sealed."""
        for request in step.decodes:
            request.num_computed += 1
            if request.num_computed >= request.next_seal:
                self._seal(request)
        for request, count in step.prefills:
            request.num_computed += count
            if request.num_computed >= request.next_seal:
                self._seal(request)

    def update(self, meta: ConnectorWorkerMetadata) -> None:
        """Take one worker's report."""
        self.connector.update_connector_output(meta)

    def restore_idle(self) -> None:
        """Bring host pages back while blocks would otherwise lie idle.

        Only when nobody waits, and only into blocks that no running request can come to need: a page that is
        brought back is not thrown out again by growth that could be foreseen.
        """
        if self.waiting or not self.coordinator.totals.spills:
            return
        pages_of = self.plan.device.pages
        running = self.running.values()
        growth = sum(pages_of(request.max_length) - request.capacity // self.block_size for request in running)
        spare = self.kv.slab.num_free - growth
        for request in running:
            if spare <= 0:
                break
            spare -= self.coordinator.restore(request.request_id, spare)

    def _seal(self, request: Request) -> None:
        self.coordinator.seal(request.request_id, request.num_computed)
        request.next_seal = (request.num_computed // self.block_size + 1) * self.block_size

    # Granting blocks.

    def _grant_decode(self, request: Request, step: ScheduledStep) -> bool:
        """Have a decode hold its hot lease, if it reads from the host, and the page that its token goes to."""
        while request.status is RequestStatus.RUNNING:
            answer = self._take_hot(request)
            if answer.granted:
                answer = self._grow(request, request.num_computed + 1)
            if answer.granted:
                request.free_until = request.capacity - 1
                return True
            if not answer.indexer_short and (self.coordinator.reclaim(answer.slab_short) or self._helps_to_wait(step)):
                return False
            self._preempt_youngest(step)
        return False

    def _grant_prefill(self, request: Request, budget: int, step: ScheduledStep) -> int:
        """Give the next chunk of a prompt its pages: a full chunk, or what there is room for. Returns its tokens."""
        while request.status is RequestStatus.RUNNING:
            count = min(budget, len(request.tokens) - request.num_computed)
            answer = self._grow(request, request.num_computed + count)
            if not answer.granted and not answer.indexer_short:
                given = self.coordinator.reclaim(answer.slab_short)
                if given >= answer.slab_short:
                    return 0
                count = self._fitting(request, count)
                if count:
                    answer = self._grow(request, request.num_computed + count)
                elif given or self._helps_to_wait(step):
                    return 0
            if answer.granted:
                step.prefills.append((request, count))
                return count
            self._preempt_youngest(step)
        return 0

    def _helps_to_wait(self, step: ScheduledStep) -> bool:
        """Whether the next step has more to give: copies end, on either side, or pages fill up and may leave."""
        return self.coordinator.num_in_flight > 0 or bool(step.prefills)

    def _fitting(self, request: Request, count: int) -> int:
        """The part of a chunk that free blocks hold now."""
        room = request.capacity + self.kv.slab.num_free * self.block_size - request.num_computed
        return min(count, room)

    def _take_hot(self, request: Request) -> Admission:
        assert request.pages is not None
        if not request.pages.num_host_backed or request.holds_hot:
            return GRANTED
        answer = self.kv.take_hot(request.request_id)
        request.holds_hot = answer.granted
        return answer

    def _grow(self, request: Request, num_tokens: int) -> Admission:
        if num_tokens <= request.capacity:
            return GRANTED
        pages = self.plan.device.pages(num_tokens)
        answer = self.kv.grow(request.request_id, pages)
        if answer.granted:
            request.capacity = pages * self.block_size
        return answer

    # Coming and going.

    def _admit(self, step: ScheduledStep, budget: int) -> int:
        """Start waiting requests, first come first served. Returns the blocks they will want in the next step."""
        coming = 0
        while self.waiting and self._free_slots and budget:
            request = self.waiting[0]
            hit = self._find_start(request)
            if hit is None:
                break
            if hit.num_free_adopted > self.kv.slab.num_free:
                self.coordinator.reclaim(hit.num_free_adopted - self.kv.slab.num_free)
                break
            self.waiting.popleft()
            self._refused = None
            self._enter(request, self._demand(request, hit))
            self.coordinator.adopt_prefix(request.request_id, hit)
            request.num_computed = request.capacity = hit.num_pages * self.block_size
            request.next_seal = request.num_computed + self.block_size
            done = self._grant_prefill(request, budget, step)
            if request.status is not RequestStatus.RUNNING:
                break
            budget -= done
            rest = len(request.tokens) - request.num_computed - done
            coming += ceil_div(min(self.chunk_tokens, rest), self.block_size)
        return coming

    def _find_start(self, request: Request) -> PrefixHit | None:
        """The prefix hit with which a waiting request may start now, or None while it has to wait.

        A hit in free blocks of the slab takes them, and may leave too few for the first pages beside it. While others
        run, that passes; when nobody does, a shorter hit has to do.
        """
        supply = Supply.of(self.kv, self.coordinator, self._promised)
        rooms = supply.rooms()
        refused = self._refused or (-math.inf,) * len(rooms)
        if self.running and all(now <= then for now, then in zip(rooms, refused, strict=True)):
            return None
        if request.prefix_keys is None:
            request.prefix_keys = self.coordinator.prefix_keys(request.tokens)
        keys = request.prefix_keys
        while True:
            hit = self.coordinator.find_prefix(keys)
            answer = may_start(self.plan, self._demand(request, hit), supply)
            if answer.granted:
                return hit
            if self.running or not hit.num_pages:
                self._refused = tuple(map(max, rooms, self._refused or rooms))
                return None
            keys = keys[: hit.num_pages - 1]

    def _demand(self, request: Request, hit: PrefixHit) -> Demand:
        return Demand.of(self.plan, len(request.tokens), request.max_length, hit)

    def _enter(self, request: Request, demand: Demand) -> None:
        request.slot = heapq.heappop(self._free_slots)
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request
        request.footprint = demand.footprint(self.plan)
        self._promised += request.footprint
        self.kv.add(request.request_id, request.slot)
        may_spill = demand.may_spill(self.plan)
        self.coordinator.add(request.request_id, request.slot, request.tokens, may_spill)
        request.pages = self.coordinator.pages(request.request_id)

    def _leave(self, request: Request) -> None:
        self.coordinator.remove(request.request_id)
        heapq.heappush(self._free_slots, request.slot)
        del self.running[request.request_id]
        self._promised -= request.footprint
        request.slot, request.pages, request.prefix_keys = -1, None, None
        request.num_computed = request.capacity = request.free_until = 0
        request.holds_hot = False

    def _preempt_youngest(self, step: ScheduledStep) -> None:
        """Take everything from the request admitted last; it computes again later what no cache kept for it."""
        youngest = next(reversed(self.running.values()))
        if len(self.running) == 1:
            raise InvariantError(
                f"request {youngest.request_id} runs alone and finds no block: {self.kv.slab.num_free} free, "
                f"{self.coordinator.num_reclaimable()} reclaimable, {self.coordinator.host_pool.num_free} host free"
            )
        self._leave(youngest)
        youngest.status = RequestStatus.WAITING
        self.waiting.appendleft(youngest)
        self._refused = None
        self.num_preemptions += 1
        if youngest in step.decodes:
            step.decodes.remove(youngest)
        step.prefills = [work for work in step.prefills if work[0] is not youngest]

    def assert_invariants(self) -> None:
        """The laws of the caches below, and that every slot is lent once."""
        self.coordinator.assert_invariants()
        lent = sorted(request.slot for request in self.running.values())
        if sorted(lent + self._free_slots) != list(range(self.plan.config.max_running)):
            raise InvariantError(f"slots lent {lent} and free {sorted(self._free_slots)} do not add up")
        if any(request.status is not RequestStatus.WAITING for request in self.waiting):
            raise InvariantError("a request that waits is not WAITING")
