"""The hooked model over a real worker: pages resident, then most of them spilled to host, against stock."""

from collections.abc import Iterator

import pytest
import torch

from hisparse.config import CacheConfig, CachePlan, plan_cache
from hisparse.engine.batch import ScheduledTokens, build_batch
from hisparse.engine.hooks import DsaModelRunner
from hisparse.engine.models import LoadedModel
from hisparse.engine.sampler import SamplingParams
from hisparse.engine.stock import StockRun, stock_generate, stock_model
from hisparse.protocol import (
    DeviceBlockId,
    Direction,
    HostBlockId,
    PageCopy,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    Table,
    TableUpdate,
    TransferId,
)
from hisparse.worker import HiSparseWorker

PROMPT = list(b"One page after another leaves for the host, and attention must not notice it. " * 5)
CHUNK, NUM_TOKENS, PAGES, BLOCK = 110, 10, 32, 16
KEPT = (0, 3, 11)
"""Pages that stay resident when the others are spilled; so do those from page 20 on, which the last chunk fills."""
FIRST_RESIDENT, FIRST_INDEXER, FIRST_HOT = 40, 7, 20


def plan_for(loaded: LoadedModel) -> CachePlan:
    config = CacheConfig(
        block_size=BLOCK, slab_bytes=1 << 21, host_pool_bytes=1 << 21, hot_rows=64, staging_rows=96,
        max_running=3, max_tokens=PAGES * BLOCK, indexer_tokens=2048,
    )  # fmt: skip
    return plan_cache(config, loaded.geometry)


class Run:
    """One request in slot 1 over pages whose block ids differ in every table."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.plan = plan_for(loaded)
        staging = [DeviceBlockId(1 + index) for index in range(self.plan.staging_blocks)]
        self.worker = HiSparseWorker(self.plan, staging)
        self.runner = DsaModelRunner(loaded, self.worker)
        self.logits: list[torch.Tensor] = []
        self.tokens = list(PROMPT)
        self.steps = 0
        self.host_blocks = {page: HostBlockId(90 - page) for page in range(20) if page not in KEPT}

    def close(self) -> None:
        self.runner.uninstall()
        self.worker.close()

    def tables(self) -> tuple[TableUpdate, ...]:
        hot = tuple(FIRST_HOT + index for index in range(self.plan.hot_blocks))
        return (
            TableUpdate(Table.RESIDENT, 1, 0, tuple(FIRST_RESIDENT + PAGES - page for page in range(PAGES))),
            TableUpdate(Table.INDEXER, 1, 0, tuple(FIRST_INDEXER + 2 * page for page in range(PAGES))),
            TableUpdate(Table.HOT, 1, 0, hot),
        )

    def spill(self) -> SparseKVPageTransfer:
        pages = self.host_blocks.items()
        copies = tuple(PageCopy(DeviceBlockId(FIRST_RESIDENT + PAGES - page), host) for page, host in pages)
        return SparseKVPageTransfer(TransferId(1), Direction.DEVICE_TO_HOST, copies)

    def spilled(self) -> tuple[TableUpdate, ...]:
        updates = []
        for page, host in self.host_blocks.items():
            updates += [TableUpdate(Table.RESIDENT, 1, page, (0,)), TableUpdate(Table.HOST, 1, page, (host,))]
        return tuple(updates)

    def step(
        self, start: int, updates: tuple[TableUpdate, ...] = (), transfers: tuple[SparseKVPageTransfer, ...] = ()
    ) -> None:
        ids = self.tokens[start : start + CHUNK] if start < len(PROMPT) else self.tokens[start:]
        done = start + len(ids) == len(self.tokens)
        self.worker.start_step(SparseKVOffloadCommand(self.steps, transfers, (), updates))
        batch = build_batch([ScheduledTokens(1, ids, start, wants_logits=done, is_decode=start >= len(PROMPT))])
        logits = self.runner.run(batch)
        self.worker.finish_step()
        self.steps += 1
        if done:
            self.logits.append(logits[0])
            self.tokens.append(int(logits[0].argmax()))

    def generate(self, spills: bool) -> torch.Tensor:
        """Prefill three chunks, spill if asked to, prefill the last one over what is on host, then decode."""
        self.step(0, updates=self.tables())
        self.step(CHUNK)
        self.step(2 * CHUNK)
        if spills:
            self.worker.start_step(SparseKVOffloadCommand(self.steps, (self.spill(),)))
            self.worker.finish_step()
            self.steps += 1
        self.step(3 * CHUNK, updates=self.spilled() if spills else ())
        while len(self.logits) < NUM_TOKENS:
            self.step(len(self.tokens) - 1)
        return torch.stack(self.logits)


@pytest.fixture
def run(tiny: LoadedModel) -> Iterator[Run]:
    made = Run(tiny)
    yield made
    made.close()


@pytest.fixture
def stock(tiny: LoadedModel) -> StockRun:
    return stock_generate(stock_model(tiny), PROMPT, SamplingParams(), NUM_TOKENS)


def test_with_everything_resident_the_worker_gives_what_stock_gives(run: Run, stock: StockRun) -> None:
    logits = run.generate(spills=False)
    assert tuple(run.tokens[len(PROMPT) : len(PROMPT) + NUM_TOKENS]) == stock.tokens
    torch.testing.assert_close(logits, stock.logits, atol=2e-5, rtol=0)
    assert run.worker.counters()["miss"] == 0


def test_with_most_pages_on_host_no_bit_of_the_logits_changes(tiny: LoadedModel, run: Run) -> None:
    spilled = run.generate(spills=True)
    counters = run.worker.counters()
    assert counters["miss"] > 0
    assert counters["hot"] > 0
    assert counters["unreachable"] == 0
    run.runner.uninstall()
    resident = Run(tiny)
    try:
        assert torch.equal(resident.generate(spills=False), spilled)
    finally:
        resident.close()


def test_control_one_flipped_bit_in_each_row_of_one_host_page_is_seen(
    tiny: LoadedModel, run: Run, stock: StockRun
) -> None:
    host_rows = run.worker.handles[0].runtime.views.host
    original = run.worker.finish_step

    def corrupt() -> object:
        report = original()
        if run.steps == 3:
            rows = torch.tensor([int(run.host_blocks[19]) * BLOCK + row for row in range(BLOCK)])
            values = host_rows.read(rows, tiny.dtype)
            values.view(torch.int32)[:, 0] ^= 1 << 29
            host_rows.write(rows, values)
        return report

    run.worker.finish_step = corrupt  # type: ignore[method-assign,assignment]
    logits = run.generate(spills=True)
    assert float((logits - stock.logits).abs().max()) > 2e-4
