"""Coordinator and worker together, without a model: whatever is done in whatever order, every row keeps its bytes."""

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hisparse.cache import KVCacheManager, TableLog
from hisparse.config import CacheConfig, CachePlan, ModelGeometry, WriteBack, plan_cache
from hisparse.connector import HiSparseConnector
from hisparse.errors import InvariantError, ProtocolError
from hisparse.geometry import RowFormat, device_blocks
from hisparse.kernels.contract import Selection
from hisparse.protocol import SparseKVPageTransfer, SparseKVWorkerReport, Table
from hisparse.residency import HiSparseCoordinator, RequestPages
from hisparse.residency.transactions import Transaction
from hisparse.worker import Backend, CopyDelay, CopyStream, CpuBackend, CpuStream, HiSparseWorker
from hisparse.worker.runtime import LeaderRuntime
from hisparse.worker.stream import CopyEvent
from hisparse.worker.transfers import TransferEngine
from hisparse.worker.views import BlockCopies

ELEMENTS = 4
BLOCK_SIZE = 4
TOPK = 4
MAX_TOKENS = 64
SHARED_TOKENS = 10
LEADER_OF = (0, 0, 2)
NUM_SLOTS = 3
ROOT = b"root".ljust(16, b"\0")


def make_plan(num_device: int, num_host: int, write_back: WriteBack = WriteBack.PRESSURE) -> CachePlan:
    row = RowFormat("float32", 4 * ELEMENTS)
    page = device_blocks(row, len(LEADER_OF), BLOCK_SIZE).payload_bytes
    config = CacheConfig(
        block_size=BLOCK_SIZE,
        slab_bytes=num_device * page,
        host_pool_bytes=num_host * page,
        hot_rows=2 * TOPK,
        staging_rows=2 * TOPK,
        max_running=NUM_SLOTS,
        max_tokens=MAX_TOKENS,
        indexer_tokens=30 * BLOCK_SIZE,
        write_back=write_back,
    )
    return plan_cache(config, ModelGeometry(row, LEADER_OF, TOPK, index_row_bytes=16))


def text(seed: int, num_tokens: int) -> "array[int]":
    """Texts of two seeds begin alike if half of the one is half of the other."""
    return array("i", [100 * (seed if at >= SHARED_TOKENS else 50 + seed // 2) + at for at in range(num_tokens)])


def truth(tokens: "array[int]", positions: torch.Tensor, layer: int) -> torch.Tensor:
    """float32 `[..., ELEMENTS]`: what the rows of `positions` must hold. The token says the whole text before it."""
    token = torch.tensor(tokens)[positions.long().clamp(min=0)]
    row = (1 + token + 10_000 * layer).unsqueeze(-1) * ELEMENTS + torch.arange(ELEMENTS)
    return row.float().masked_fill((positions < 0).unsqueeze(-1), 0.0)


class Running:
    """The naive model of one request: a list of tokens, of which the first `computed` have their bytes."""

    def __init__(self, name: str, slot: int, seed: int, computed: int) -> None:
        self.name = name
        self.slot = slot
        self.seed = seed
        self.tokens = text(seed, MAX_TOKENS)
        self.computed = computed
        self.planned = computed
        self.decodes = False


class System:
    """Both sides and the connector between them. Calls plan a step; `step` runs it and compares all that it reads."""

    def __init__(self, plan: CachePlan, backend: Backend) -> None:
        self.plan = plan
        log = TableLog()
        self.kv = KVCacheManager(plan, log)
        self.coordinator = HiSparseCoordinator(self.kv, log, ROOT)
        self.scheduler = HiSparseConnector.for_scheduler(self.coordinator, log)
        self.worker = HiSparseWorker(plan, self.kv.staging, backend=backend)
        self.connector = HiSparseConnector.for_worker(self.worker)
        self.running: dict[str, Running] = {}
        self.completed_keys: set[bytes] = set()
        self.counted: dict[str, int] = {}
        self._slots = list(range(NUM_SLOTS))
        self._steps = self._names = 0

    # Plans.

    def start(self, seed: int, num_prompt: int) -> Running | None:
        """Start a request with what a prefix hit gives it, if a slot and the hit's blocks are free."""
        hit = self.coordinator.find_prefix(self.coordinator.prefix_keys(text(seed, num_prompt)))
        if not self._slots or hit.num_free_adopted > self.kv.slab.num_free:
            return None
        self._names += 1
        name, slot = f"request-{self._names}", self._slots.pop()
        request = Running(name, slot, seed, hit.num_pages * BLOCK_SIZE)
        self.kv.add(name, slot)
        self.coordinator.add(name, slot, request.tokens)
        self.coordinator.adopt_prefix(name, hit)
        self.running[name] = request
        return request

    def grow(self, request: Running, num_tokens: int) -> None:
        """Compute `num_tokens` more in the next step, if there is room for them."""
        planned = min(request.planned + num_tokens, MAX_TOKENS)
        if self.kv.grow(request.name, -(-planned // BLOCK_SIZE)).granted:
            request.planned = planned

    def decide_decode(self, request: Running) -> None:
        """Have the request read through the resolver in the next step: whole, or with a hot lease, as it is now."""
        if not self.coordinator.pages(request.name).num_host_backed or self.kv.take_hot(request.name).granted:
            request.decodes = True

    def remove(self, request: Running) -> None:
        """The request finished, or was preempted: for what lies below the scheduler that is the same."""
        self.coordinator.remove(request.name)
        self._slots.append(request.slot)
        del self.running[request.name]

    # The step.

    def step(self, seed: int) -> SparseKVWorkerReport:
        """One step. `seed` draws which rows are read."""
        self._steps += 1
        self.connector.bind_connector_metadata(self.scheduler.build_connector_meta(self._steps))
        self.connector.start_load_kv()
        self._forward(random.Random(seed))
        self.connector.wait_for_save()
        answer = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        for request in self.running.values():
            request.computed = request.planned
            self.coordinator.seal(request.name, request.computed)
            request.decodes = False
        self._note_completions(answer.report)
        self.scheduler.update_connector_output(answer)
        self.counted = self.worker.counters()
        assert self.counted["unreachable"] == 0
        assert self.counted["status"] == 0
        self.check()
        return answer.report

    def _note_completions(self, report: SparseKVWorkerReport) -> None:
        transactions = {each.transfer.transfer_id: each for each in self.coordinator._transactions.open()}
        for transfer_id in report.completed:
            self.completed_keys.update(transactions[transfer_id].keys)

    def _forward(self, rng: random.Random) -> None:
        for request in self.running.values():
            self._write(request)
        readers = [request for request in self.running.values() if request.planned]
        decoders = [request for request in readers if request.decodes]
        if decoders:
            self._decode(decoders, rng)
        if readers:
            self._prefill(readers, rng)

    def _write(self, request: Running) -> None:
        positions = torch.arange(request.computed, request.planned)
        slots = torch.full_like(positions, request.slot)
        rows = self.worker.tables.physical_rows(Table.RESIDENT, slots, positions)
        for handle in self.worker.handles:
            handle.write(rows, truth(request.tokens, positions, handle.layer))

    def _decode(self, requests: list[Running], rng: random.Random) -> None:
        slots = torch.tensor([request.slot for request in requests], dtype=torch.int32)
        rows = torch.empty(0)
        positions = torch.empty(0)
        for layer, handle in enumerate(self.worker.handles):
            if LEADER_OF[layer] == layer:
                positions = torch.stack([_selection(request, rng) for request in requests])
                rows = handle.resolve(Selection(positions, slots))
            else:
                handle.load_followed()
            self._compare(requests, positions, handle.gather(rows), layer)

    def _prefill(self, requests: list[Running], rng: random.Random) -> None:
        rows = [rng.choice(requests) for _ in range(6)]
        positions = torch.stack([_selection(request, rng) for request in rows])
        slots = torch.tensor([request.slot for request in rows])
        for layer, handle in enumerate(self.worker.handles):
            done = 0
            while done < len(rows):
                found = handle.stage(positions[done:], slots[done:])
                end = done + found.shape[0]
                self._compare(rows[done:end], positions[done:end], handle.gather(found), layer)
                done = end

    def _compare(self, requests: list[Running], positions: torch.Tensor, got: torch.Tensor, layer: int) -> None:
        for request, wanted, values in zip(requests, positions, got, strict=True):
            expected = truth(request.tokens, wanted, layer)
            assert torch.equal(values, expected), f"{request.name} reads other bytes in layer {layer}"

    # What always holds.

    def check(self) -> None:
        self.coordinator.assert_invariants()
        self._check_published()

    def _check_published(self) -> None:
        """A host page that can be found was computed and copied, and holds its bytes now, for any reader."""
        for seed in range(4):
            tokens = text(seed, MAX_TOKENS)
            for page, key in enumerate(self.coordinator.prefix_keys(tokens)):
                block = self.coordinator.host_pool.lookup(key)
                if block is None:
                    continue
                assert key in self.completed_keys, f"page {page} is published before its copy is completed"
                positions = page * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
                for layer in range(len(LEADER_OF)):
                    rows = block * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
                    values = self.worker.host_pool.layer(layer).read(rows, torch.float32)
                    expected = truth(tokens, positions, layer)
                    assert torch.equal(values, expected), f"page {page} is published and differs"


def _selection(request: Running, rng: random.Random) -> torch.Tensor:
    """int32 `[TOPK]`: distinct positions of the request, ascending, -1 where it has fewer."""
    chosen = sorted(rng.sample(range(request.planned), min(TOPK, request.planned)))
    return torch.tensor(chosen + [-1] * (TOPK - len(chosen)), dtype=torch.int32)


class CoordinatorAndWorkerMachine(RuleBasedStateMachine):
    """Everything that a scheduler may ask of the two sides, in any order."""

    system: System

    @initialize(
        num_device=st.integers(8, 22),
        num_host=st.integers(2, 30),
        write_back=st.sampled_from([WriteBack.PRESSURE, WriteBack.EAGER]),
        delay=st.integers(0, 6),
        seed=st.integers(0, 99),
    )
    def open(self, num_device: int, num_host: int, write_back: WriteBack, delay: int, seed: int) -> None:
        self.system = System(make_plan(num_device, num_host, write_back), CpuBackend(CopyDelay(seed, delay)))

    def _any(self, pick: int) -> Running | None:
        requests = list(self.system.running.values())
        return requests[pick % len(requests)] if requests else None

    @rule(seed=st.integers(0, 3), prompt=st.integers(1, 60), first=st.integers(1, 30))
    def start(self, seed: int, prompt: int, first: int) -> None:
        request = self.system.start(seed, prompt)
        if request is not None:
            self.system.grow(request, first)

    @rule(pick=st.integers(0, 5), num_tokens=st.integers(1, 20))
    def grow(self, pick: int, num_tokens: int) -> None:
        if request := self._any(pick):
            self.system.grow(request, num_tokens)

    @rule(pick=st.integers(0, 5))
    def decode(self, pick: int) -> None:
        if request := self._any(pick):
            self.system.decide_decode(request)

    @rule(num_blocks=st.integers(1, 12))
    def reclaim(self, num_blocks: int) -> None:
        self.system.coordinator.reclaim(num_blocks)

    @rule(pick=st.integers(0, 5), max_pages=st.integers(1, 6))
    def restore(self, pick: int, max_pages: int) -> None:
        if request := self._any(pick):
            self.system.coordinator.restore(request.name, max_pages)

    @rule(pick=st.integers(0, 5))
    def remove(self, pick: int) -> None:
        if request := self._any(pick):
            self.system.remove(request)

    @rule(seed=st.integers(0, 1 << 30))
    def step(self, seed: int) -> None:
        """With new tokens or without: an idle step is a step."""
        self.system.step(seed)

    @rule(seed=st.integers(0, 1 << 30))
    def everybody_decodes(self, seed: int) -> None:
        for request in self.system.running.values():
            self.system.grow(request, 1)
            self.system.decide_decode(request)
        self.system.step(seed)

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "system"):
            self.system.check()

    def teardown(self) -> None:
        """Left alone, every copy ends, and nothing stays leased but what was meant to."""
        if not hasattr(self, "system"):
            return
        system = self.system
        for request in list(system.running.values()):
            system.remove(request)
        for seed in range(40):
            system.step(seed)
        assert system.coordinator.num_in_flight == 0
        assert system.coordinator.host_pool.num_leased == 0
        assert system.kv.slab.num_leased == len(system.kv.staging)
        assert system.kv.index_pool.num_leased == 0
        system.worker.close()


TestCoordinatorAndWorker = CoordinatorAndWorkerMachine.TestCase
TestCoordinatorAndWorker.settings = settings(max_examples=100, stateful_step_count=40)


# The same churn without hypothesis, sound and with one rule of the house broken.


class UnorderedStream(CpuStream):
    """Forgets that what is computed after a copy comes behind it."""

    def order_before_compute(self) -> None:
        pass


class ForgetfulStream(CpuStream):
    """Loses every third submission, and says that it was done."""

    _count = 0

    def submit(self, copies: BlockCopies) -> CopyEvent:
        self._count += 1
        if self._count % 3 == 0:
            nothing = copies.source_blocks[:0]
            copies = BlockCopies(copies.source, copies.destination, nothing, nothing)
        return super().submit(copies)


class DelayedBackend(CpuBackend):
    """A backend whose copies are late, in a stream of a given class."""

    def __init__(self, stream: type[CpuStream] = CpuStream) -> None:
        super().__init__()
        self._make = stream

    def make_stream(self) -> CopyStream:
        return self._make(CopyDelay(seed=5, max_polls=8))


def churn(stream: type[CpuStream] = CpuStream, num_ops: int = 300) -> System:
    """Requests come, grow, decode under pressure and go. Returns the system, closed, with what it counted."""
    rng = random.Random(1)
    system = System(make_plan(16, 40), DelayedBackend(stream))
    with system.worker:
        for _ in range(num_ops):
            requests = list(system.running.values())
            if len(requests) < NUM_SLOTS and (request := system.start(rng.randrange(4), rng.randint(20, 60))):
                system.grow(request, 60 - request.computed)
                system.grow(request, 8)
            for request in requests:
                system.grow(request, rng.choice([1, 1, 6]))
                system.decide_decode(request)
            system.coordinator.reclaim(rng.choice([0, 2, 5]))
            if requests and rng.random() < 0.6:
                system.coordinator.restore(rng.choice(requests).name, 2)
            if requests and rng.random() < 0.06:
                system.remove(rng.choice(requests))
            system.step(rng.randrange(1 << 30))
    return system


def test_the_churn_reaches_every_kind_of_move() -> None:
    system = churn()
    totals = system.coordinator.totals
    assert totals.spills - totals.shared_spills > 50
    assert totals.shared_spills > 10
    assert totals.restores > 5
    assert system.counted["hot"] > 100
    assert system.counted["miss"] > 100


def _publish_at_enqueue(patch: pytest.MonkeyPatch) -> None:
    sound = HiSparseCoordinator._spill_enqueued

    def broken(self: HiSparseCoordinator, transaction: Transaction) -> None:
        sound(self, transaction)
        for copy, key in zip(transaction.transfer.copies, transaction.keys, strict=True):
            self.host_pool.publish(copy.host_block, key)

    patch.setattr(HiSparseCoordinator, "_spill_enqueued", broken)


def _release_at_begin(patch: pytest.MonkeyPatch) -> None:
    sound = HiSparseCoordinator._begin

    def broken(self: HiSparseCoordinator, *arguments: Any) -> None:
        sound(self, *arguments)
        self.kv.slab.release(copy.device_block for copy in arguments[2])

    patch.setattr(HiSparseCoordinator, "_begin", broken)


def _leave_at_once_without_a_copy(patch: pytest.MonkeyPatch) -> None:
    sound = HiSparseCoordinator._spill

    def broken(self: HiSparseCoordinator, pages: RequestPages, limit: int) -> int:
        given = sound(self, pages, limit)
        for owner, page in self._leaving:
            self._leave_device(owner, page)
        self._leaving.clear()
        return given

    patch.setattr(HiSparseCoordinator, "_spill", broken)


def _never_forget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaderRuntime, "forget", lambda self, slots: None)


def _copy_late_and_acknowledge_in_time(patch: pytest.MonkeyPatch) -> None:
    """Copies start two commands late, when their blocks may long hold other pages."""
    sound = TransferEngine.enqueue
    held: list[Sequence[SparseKVPageTransfer]] = [(), ()]

    def broken(self: TransferEngine, transfers: Sequence[SparseKVPageTransfer]) -> None:
        sound(self, held.pop(0))
        self._enqueued.clear()
        self._enqueued.extend(transfer.transfer_id for transfer in transfers)
        held.append(transfers)

    patch.setattr(TransferEngine, "enqueue", broken)


CAUGHT = (AssertionError, InvariantError, ProtocolError)


@pytest.mark.parametrize(
    "damage",
    [
        _publish_at_enqueue,
        _release_at_begin,
        _leave_at_once_without_a_copy,
        _never_forget,
        _copy_late_and_acknowledge_in_time,
    ],
)
def test_control_a_broken_rule_is_caught(damage: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        with pytest.raises(CAUGHT):
            churn()


@pytest.mark.parametrize("stream", [UnorderedStream, ForgetfulStream])
def test_control_a_stream_without_order_or_with_losses_is_caught(stream: type[CpuStream]) -> None:
    with pytest.raises(AssertionError, match=r"reads other bytes|published and differs"):
        churn(stream)
