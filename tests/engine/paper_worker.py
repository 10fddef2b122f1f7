"""A worker on paper: it keeps tables and pages as dictionaries, and "computes" by writing down what was computed.

A row's content is the whole text up to it, so a row that is read from the wrong block, too early or too late, or after
its page was lost, is told apart from the right one. Nothing here is torch.
"""

import random
from collections import deque
from collections.abc import Sequence

from hisparse.cache.groups import GroupKind
from hisparse.config import CacheConfig, CachePlan, ModelGeometry, WriteBack, plan_cache
from hisparse.connector import ConnectorMetadata, HiSparseMetadata, HiSparseWorkerMetadata
from hisparse.engine.request import Request, RequestStatus
from hisparse.engine.scheduled_step import ScheduledStep
from hisparse.engine.scheduler import Scheduler
from hisparse.geometry import RowFormat, device_blocks
from hisparse.protocol import Direction, SparseKVWorkerReport, Table, TransferId
from tests.engine.paper_tiers import PaperTiers

BLOCK_SIZE = 4
ROOT = b"root".ljust(16, b"\0")
Rows = dict[int, int]


def small_plan(
    device_blocks_: int = 14,
    host_blocks: int = 24,
    index_blocks: int = 24,
    max_running: int = 4,
    write_back: WriteBack = WriteBack.PRESSURE,
) -> CachePlan:
    """Hot leases of two blocks, one block of staging, pages of four tokens, requests of up to 80."""
    model = ModelGeometry(RowFormat("test", 64), (0,), index_topk=4, index_row_bytes=32)
    page = device_blocks(model.row, 1, BLOCK_SIZE).payload_bytes
    config = CacheConfig(
        block_size=BLOCK_SIZE,
        slab_bytes=device_blocks_ * page,
        host_pool_bytes=host_blocks * page,
        hot_rows=8,
        staging_rows=4,
        max_running=max_running,
        max_tokens=80,
        indexer_tokens=(index_blocks - 1) * BLOCK_SIZE,
        write_back=write_back,
    )
    return plan_cache(config, model)


def random_plan(rng: random.Random) -> CachePlan:
    return small_plan(
        device_blocks_=rng.choice([6, 7, 9, 14, 30]),
        host_blocks=rng.choice([17, 22, 40, 90]),
        index_blocks=rng.choice([21, 23, 30, 80]),
        max_running=rng.choice([1, 2, 4, 6]),
        write_back=rng.choice([WriteBack.PRESSURE, WriteBack.EAGER]),
    )


class PaperWorker:
    """Carries out commands at once, and acknowledges completion up to `max_delay` steps later."""

    def __init__(self, plan: CachePlan, rng: random.Random, max_delay: int = 0) -> None:
        self.plan = plan
        self._rng = rng
        self._max_delay = max_delay
        self._step = 0
        self._in_flight: deque[tuple[int, TransferId]] = deque()
        self.tables: dict[Table, dict[tuple[int, int], int]] = {table: {} for table in Table}
        self.slab: dict[int, Rows] = {}
        self.host: dict[int, Rows] = {}
        self.keys: dict[int, Rows] = {}
        self.copied_pages = 0
        self.weights = 0
        """Of the model that computes: part of every row."""

    def store_of(self, group: GroupKind) -> dict[int, Rows]:
        """The device blocks of a group, by number."""
        return {GroupKind.RESIDENT: self.slab, GroupKind.INDEXER: self.keys}[group]

    def start(self, meta: ConnectorMetadata) -> tuple[TransferId, ...]:
        """Copies first, then the tables. Returns what is enqueued."""
        assert isinstance(meta, HiSparseMetadata)
        command = meta.command
        self._step += 1
        for transfer in command.transfers:
            for copy in transfer.copies:
                if transfer.direction is Direction.DEVICE_TO_HOST:
                    self.host[copy.host_block] = dict(self.slab[copy.device_block])
                else:
                    self.slab[copy.device_block] = dict(self.host[copy.host_block])
            self.copied_pages += len(transfer.copies)
            due = self._step + self._rng.randint(0, self._max_delay)
            self._in_flight.append((due, transfer.transfer_id))
        for table in self.tables.values():
            for cell in [cell for cell in table if cell[0] in command.resets]:
                del table[cell]
        for update in command.updates:
            for page, block in enumerate(update.blocks, update.first_page):
                self.tables[update.table][update.slot, page] = block
        return tuple(transfer.transfer_id for transfer in command.transfers)

    def finish(self, enqueued: Sequence[TransferId], rank: int = 0) -> HiSparseWorkerMetadata:
        """The step's report: events are seen in the stream's order."""
        done = []
        while self._in_flight and self._in_flight[0][0] <= self._step:
            done.append(self._in_flight.popleft()[1])
        return HiSparseWorkerMetadata(SparseKVWorkerReport(rank, tuple(enqueued), tuple(done)))

    def compute(self, step: ScheduledStep) -> None:
        """Write the rows of the step's tokens, then read back every row that their requests may select."""
        for request, count in [*((request, 1) for request in step.decodes), *step.prefills]:
            texts = self._texts(request, request.num_computed + count)
            for position in range(request.num_computed, request.num_computed + count):
                page, row = divmod(position, BLOCK_SIZE)
                for table, store in ((Table.RESIDENT, self.slab), (Table.INDEXER, self.keys)):
                    block = self.tables[table].get((request.slot, page), 0)
                    assert block, f"{request.request_id} has no {table.value} block for position {position}"
                    rows = store.setdefault(block, {})
                    if row == 0:
                        rows.clear()
                    rows[row] = texts[position]
        for request in step.decodes:
            self._read(request, request.num_computed + 1, is_decode=True)
        for request, count in step.prefills:
            self._read(request, request.num_computed + count, is_decode=False)

    def _read(self, request: Request, num_tokens: int, is_decode: bool) -> None:
        leased = self.tables[Table.HOT].get((request.slot, self.plan.hot_blocks - 1), 0)
        for position, text in enumerate(self._texts(request, num_tokens)):
            page, row = divmod(position, BLOCK_SIZE)
            cell = (request.slot, page)
            where = f"position {position} of {request.request_id}"
            if block := self.tables[Table.RESIDENT].get(cell, 0):
                assert self.slab[block].get(row) == text, f"{where} differs in slab block {block}"
            else:
                block = self.tables[Table.HOST].get(cell, 0)
                assert block, f"{where} is nowhere"
                assert leased or not is_decode, f"{where} is on the host and the request has no hot lease"
                assert self.host[block].get(row) == text, f"{where} differs in host block {block}"
            assert self.keys[self.tables[Table.INDEXER][cell]].get(row) == text, f"the index key of {where} differs"

    def _texts(self, request: Request, num_tokens: int) -> list[int]:
        """For each position a number that names the weights and all tokens up to it."""
        texts, text = [], self.weights
        for token in request.tokens[:num_tokens]:
            text = hash((text, token))
            texts.append(text)
        return texts


class Drive:
    """The engine's loop around a scheduler and workers on paper: every token that is sampled is drawn from `rng`."""

    def __init__(
        self,
        plan: CachePlan,
        seed: int,
        max_delay: int = 0,
        num_workers: int = 1,
        chunk: int = 12,
        tiers: PaperTiers | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.tiers = tiers
        self.scheduler = Scheduler(plan, chunk, ROOT, num_workers, source=tiers)
        self.workers = [PaperWorker(plan, self.rng, max_delay) for _ in range(num_workers)]
        self._late: list[deque[HiSparseWorkerMetadata]] = [deque() for _ in range(num_workers)]
        self.admitted: list[str] = []
        """Requests in the order in which they first ran."""
        self.finished: list[Request] = []
        self.num_steps = self.num_swaps = 0
        if tiers is not None:
            tiers.workers = self.workers

    def step(self) -> int:
        """One step. Returns how many tokens it computed."""
        self.num_steps += 1
        scheduler = self.scheduler
        step = scheduler.schedule()
        enqueued = [worker.start(step.meta) for worker in self.workers]
        if self.tiers is not None:
            self.tiers.tick()
        self.admitted += [name for name in scheduler.running if name not in self.admitted]
        for worker in self.workers:
            worker.compute(step)
        work = [(request, 1) for request in step.decodes] + step.prefills
        sampled = [request for request, count in work if request.num_computed + count == len(request.tokens)]
        scheduler.complete(step)
        for rank, worker in enumerate(self.workers):
            self._late[rank].append(worker.finish(enqueued[rank], rank))
            # Any worker but the first may be a few reports behind.
            while len(self._late[rank]) > (0 if rank == 0 else self.rng.randint(0, 3)):
                scheduler.update(self._late[rank].popleft())
        ended = [request for request in sampled if self._take_token(request)]
        if ended:
            scheduler.restore_idle()
        scheduler.assert_invariants()
        for request in step.prefills:
            self._check_reused(request[0])
        return sum(count for _, count in work)

    def swap_weights(self) -> None:
        """From now on all rows are computed differently, whatever was computed before."""
        self.num_swaps += 1
        for worker in self.workers:
            worker.weights = self.num_swaps
        self.scheduler.invalidate(ROOT[:-1] + bytes([self.num_swaps % 256]))

    def _check_reused(self, request: Request) -> None:
        """Every token of the prompt is counted once, wherever it came from."""
        if request.status is not RequestStatus.WAITING:
            counted, known = request.reused.total, min(request.num_prompt, request.num_computed or request.num_prompt)
            assert counted == known, f"{request.request_id} knows {known} tokens and counts {request.reused}"

    def _take_token(self, request: Request) -> bool:
        request.tokens.append(self.rng.randrange(2))
        if request.num_output < request.params.max_tokens:
            return False
        self.scheduler.finish(request)
        self.finished.append(request)
        return True
