"""Which requests compute how many tokens in a step, and the blocks they do it in.

Order is age: the request admitted first is served first and preempted last. A decode that crosses no page boundary and
changes no state costs one comparison. Spills for the next step are begun in this one, so that their copies run beside
its forward.
"""

import heapq
import time

from hisparse.cache import GRANTED, Admission, KVCacheManager, TableLog
from hisparse.config import CachePlan
from hisparse.connector import ConnectorWorkerMetadata, HiSparseConnector, KVConnector
from hisparse.connector.prefix_source import PrefixSource
from hisparse.engine.admission_gate import AdmissionGate, Follow
from hisparse.engine.pages_underway import PagesUnderway
from hisparse.engine.prefix_loads import PrefixLoads
from hisparse.engine.request import Request, RequestStatus
from hisparse.engine.reuse import ReusedTokens, count_hit
from hisparse.engine.scheduled_step import ScheduledStep
from hisparse.engine.waiting_queue import WaitingQueue
from hisparse.errors import InvariantError
from hisparse.geometry import ceil_div
from hisparse.residency import Demand, HiSparseCoordinator, PrefixHit


class Scheduler:
    """Continuous batching over one replica's caches.

    `chunk_tokens` bounds the prompt tokens of a step. `root` is the prefix key of the model at hand. `source` keeps KV
    below the pools. `connector` carries the commands; who has others to carry along puts one over it.
    """

    def __init__(
        self,
        plan: CachePlan,
        chunk_tokens: int,
        root: bytes,
        num_workers: int = 1,
        *,
        source: PrefixSource | None = None,
    ) -> None:
        self.plan = plan
        self.block_size = plan.config.block_size
        self.chunk_tokens = chunk_tokens
        log = TableLog()
        self.kv = KVCacheManager(plan, log)
        self.coordinator = HiSparseCoordinator(self.kv, log, root, num_workers)
        self.connector: KVConnector = HiSparseConnector.for_scheduler(self.coordinator, log)
        self.loads = None if source is None else PrefixLoads(source, self.coordinator, self.block_size)
        self.waiting = WaitingQueue()
        self.underway = PagesUnderway(self.waiting)
        self.running: dict[str, Request] = {}
        self.num_preemptions = 0
        self.reused = ReusedTokens()
        """Where prompts came from: of every request, once its prompt was computed for the first time."""
        self._free_slots = list(range(plan.config.max_running))
        self._promised = 0
        self._gate = AdmissionGate(plan, self.kv, self.coordinator, self.underway)
        self._step = 0

    # Requests.

    def add(self, request: Request) -> None:
        """Queue a request. Raises `CapacityError` when it could not run even with all pools to itself."""
        self._gate.require_possible(request)
        request.asks_tiers = self.loads is not None
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """The request is done: give back all it holds. What it computed stays findable."""
        if request.status is RequestStatus.RUNNING:
            if self.loads is not None:
                self.loads.finish(request)
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            if self.loads is not None:
                self.loads.forget(request)
        request.status = RequestStatus.FINISHED

    def reset_prefix_cache(self, tiers: bool = False) -> None:
        """Forget the content of all pools, and with `tiers` of what is below them: prompts are computed anew.

        Requests that run keep what they have.
        """
        self.coordinator.forget_content()
        if tiers and self.loads is not None:
            self.loads.source.reset()
        self.underway.clear()
        self._gate.reopen()

    def invalidate(self, root: bytes) -> None:
        """The weights changed, and `root` names the new ones: nothing that was computed so far is read again.

        Running requests are preempted, between two steps; they keep what they have generated.
        """
        for request in reversed(list(self.running.values())):
            self._send_back(request)
        for request in self.waiting:
            request.prefix_keys = None
            if self.loads is not None:
                self.loads.forget(request)
        self.coordinator.forget_content(root)
        if self.loads is not None:
            self.loads.source.reset()
        self._gate.reopen()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_open(self) -> int:
        """Loads and stores that have not ended. They end in steps, which may be empty ones."""
        return 0 if self.loads is None else self.loads.num_open

    # One step.

    def schedule(self) -> ScheduledStep:
        """Choose the step's work and build the workers' command for it."""
        self._step += 1
        step = ScheduledStep(self._step)
        budget, coming = self.chunk_tokens, 0
        preemptions = self.num_preemptions
        block_size = self.block_size
        if self.loads is not None:
            self.loads.take_events()
            self.loads.look_ahead(self.waiting.ready)
        for request_id in self.coordinator.take_newly_backed():
            if request_id in self.running:
                self.running[request_id].free_until = 0
        decode = step.decodes.append
        for request in list(self.running.values()):
            if request.num_computed < request.free_until:
                decode(request)
                continue
            if request.status is not RequestStatus.RUNNING:
                continue
            if request.asks_tiers and self._await_tiers(request, step):
                coming += ceil_div(min(self.chunk_tokens, len(request.tokens) - request.num_computed), block_size)
                continue
            computed = request.num_computed
            if len(request.tokens) - computed == 1 and computed >= request.num_prompt:
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
            computed = request.num_computed + count
            request.reused.computed += request.prompt_tokens(request.num_computed, computed)
            request.num_computed = computed
            if computed >= request.num_prompt and not request.is_counted:
                request.is_counted = True
                self.reused.add(request.reused)
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
        num_full = request.num_computed // self.block_size
        first = num_full if request.pages is None else request.pages.num_sealed
        self.coordinator.seal(request.request_id, request.num_computed)
        self.underway.advance(request)
        request.next_seal = (num_full + 1) * self.block_size
        if self.loads is not None:
            self.loads.offer(request, first, num_full)

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
            if not self._make_room(answer, step):
                return False
        return False

    def _grant_prefill(self, request: Request, budget: int, step: ScheduledStep) -> int:
        """Give the next chunk of a prompt its pages: a full chunk, or what there is room for. Returns its tokens."""
        while request.status is RequestStatus.RUNNING:
            count = min(budget, len(request.tokens) - request.num_computed)
            answer = self._grow(request, request.num_computed + count)
            if not answer.granted and not answer.indexer_short:
                if self.coordinator.reclaim(answer.slab_short) >= answer.slab_short:
                    return 0
                if fitting := self._fitting(request, count):
                    count = fitting
                    answer = self._grow(request, request.num_computed + count)
            if answer.granted:
                step.prefills.append((request, count))
                return count
            if not self._make_room(answer, step):
                return 0
        return 0

    def _await_tiers(self, request: Request, step: ScheduledStep) -> bool:
        """Get a request its next pages from below, if they are there. Returns whether it computes nothing now."""
        while self.loads is not None and request.status is RequestStatus.RUNNING:
            answer = self.loads.advance(request)
            self.underway.advance(request)
            if answer is None:
                return False
            if answer.granted or not self._make_room(answer, step):
                return True
        return True

    def _make_room(self, answer: Admission, step: ScheduledStep) -> bool:
        """Have blocks that are short become free. Returns whether to try again now, rather than in the next step."""
        given = 0 if answer.indexer_short else self.coordinator.reclaim(answer.slab_short)
        if given or self._helps_to_wait(answer, step):
            return False
        return self._preempt_youngest(step)

    def _helps_to_wait(self, answer: Admission, step: ScheduledStep) -> bool:
        """Whether the next step has more to give: copies end, on either side, or pages fill up and may leave."""
        is_indexer = bool(answer.indexer_short)
        if self.loads is not None and self.loads.gives_back(slab=not is_indexer, indexer=is_indexer):
            return True
        return not is_indexer and (self.coordinator.num_in_flight > 0 or bool(step.prefills))

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
        while self._free_slots and budget and (request := self.waiting.first) is not None:
            hit = self._find_start(request)
            if isinstance(hit, Follow):
                self._park(request, hit.key)
                continue
            if hit is None:
                break
            if hit.num_free_adopted > self.kv.slab.num_free:
                self.coordinator.reclaim(hit.num_free_adopted - self.kv.slab.num_free)
                break
            self.waiting.remove(request)
            self._gate.reopen()
            self._enter(request, self._gate.demand(request, hit))
            self.coordinator.adopt_prefix(request.request_id, hit)
            request.has_pages(hit.num_pages, self.block_size)
            self.underway.enter(request)
            count_hit(request.reused, hit.host, request.num_prompt, self.block_size)
            if self.loads is not None:
                self.loads.enter(request, hit)
            awaits = request.asks_tiers and self._await_tiers(request, step)
            done = 0 if awaits else self._grant_prefill(request, budget, step)
            if request.status is not RequestStatus.RUNNING:
                break
            budget -= done
            rest = len(request.tokens) - request.num_computed - done
            coming += ceil_div(min(self.chunk_tokens, rest), self.block_size)
        return coming

    def _find_start(self, request: Request) -> PrefixHit | Follow | None:
        return self._gate.find_start(request, self._promised, is_alone=not self.running)

    def _park(self, request: Request, key: bytes) -> None:
        """Let others pass a request until a running one has the page with this key. It asks tiers when it is next."""
        self.waiting.park(request, key)
        if self.loads is not None:
            self.loads.forget(request)

    def _enter(self, request: Request, demand: Demand) -> None:
        request.slot = heapq.heappop(self._free_slots)
        request.status = RequestStatus.RUNNING
        if request.admitted is None:
            request.admitted = time.monotonic()
        self.running[request.request_id] = request
        request.footprint = demand.footprint(self.plan)
        self._promised += request.footprint
        self.kv.add(request.request_id, request.slot)
        may_spill = demand.may_spill(self.plan)
        self.coordinator.add(request.request_id, request.slot, request.tokens, may_spill)
        request.pages = self.coordinator.pages(request.request_id)

    def _leave(self, request: Request) -> None:
        self.underway.leave(request)
        if self.loads is not None:
            self.loads.forget(request)
            request.asks_tiers = not request.tiers_failed
        self.coordinator.remove(request.request_id)
        heapq.heappush(self._free_slots, request.slot)
        del self.running[request.request_id]
        self._promised -= request.footprint
        request.slot, request.pages, request.prefix_keys = -1, None, None
        request.num_computed = request.capacity = request.free_until = 0
        request.holds_hot = False

    def _preempt_youngest(self, step: ScheduledStep) -> bool:
        """Take everything from the request admitted last; it computes again later what no cache kept for it.

        Returns whether there was one to take it from; else what tickets hold has to come back first.
        """
        youngest = next(reversed(self.running.values()))
        if len(self.running) == 1:
            if self.num_open:
                return False
            raise InvariantError(
                f"request {youngest.request_id} runs alone and finds no block: {self.kv.slab.num_free} free, "
                f"{self.coordinator.num_reclaimable()} reclaimable, {self.coordinator.host_pool.num_free} host free"
            )
        self._send_back(youngest)
        if youngest in step.decodes:
            step.decodes.remove(youngest)
        step.prefills = [work for work in step.prefills if work[0] is not youngest]
        return True

    def _send_back(self, request: Request) -> None:
        """Preempt a running request: it waits before all others."""
        self._leave(request)
        request.status = RequestStatus.WAITING
        request.reused = ReusedTokens()
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def assert_invariants(self) -> None:
        """The laws of the caches below and of the queue, and that every slot is lent once."""
        self.coordinator.assert_invariants()
        self.waiting.assert_invariants()
        self.underway.assert_invariants(self.running)
        if self.loads is not None:
            self.loads.assert_invariants(self.running)
        lent = sorted(request.slot for request in self.running.values())
        if sorted(lent + self._free_slots) != list(range(self.plan.config.max_running)):
            raise InvariantError(f"slots lent {lent} and free {sorted(self._free_slots)} do not add up")
