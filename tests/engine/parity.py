"""Runs of the engine over little text, and what stock transformers makes of the same prompts."""

import random
from dataclasses import dataclass, replace
from functools import cache

import torch

from hisparse.config import TAIL_PAGES, KVDtype, WriteBack
from hisparse.engine import Engine, EngineConfig, LoadedModel, RequestResult, SamplingParams, load_model
from hisparse.engine.parallel import TensorParallel
from hisparse.engine.stats import EngineStats
from hisparse.engine.stock import StockRun, stock_generate, stock_model
from hisparse.geometry import ceil_div, device_blocks
from hisparse.offload.config import OffloadConfig

LOGIT_BOUND = 1e-4
"""How far a float32 logit may be from stock's. Seen are 2e-5."""

TOPK = 32
HOT_ROWS = 64
STAGING_ROWS = 128
MAX_LENGTH = 640
GREEDY = SamplingParams()


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """`length` random tokens."""
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(length))


@dataclass(frozen=True)
class Case:
    """One engine run. `spare_blocks`: slab blocks beyond the least that runs one request; None is everything."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int = 8
    spare_blocks: int | None = 0
    block_size: int = 16
    chunk: int = 96
    max_running: int = 3
    write_back: WriteBack = WriteBack.PRESSURE
    copy_delay: int = 0
    params: SamplingParams = GREEDY
    kv_dtype: KVDtype = "auto"
    parallel: TensorParallel | None = None
    offload: OffloadConfig | None = None

    def config(self, loaded: LoadedModel) -> EngineConfig:
        small = None
        if self.spare_blocks is not None:
            small = slab_bytes(loaded, self.block_size, self.spare_blocks, self.kv_dtype)
        return EngineConfig(
            max_tokens=MAX_LENGTH,
            slab_bytes=small,
            host_pool_bytes=8 << 20,
            block_size=self.block_size,
            hot_rows=HOT_ROWS,
            staging_rows=STAGING_ROWS,
            max_running=self.max_running,
            chunk_tokens=self.chunk,
            write_back=self.write_back,
            kv_dtype=self.kv_dtype,
            copy_delay=self.copy_delay,
            seed=self.copy_delay,
            parallel=self.parallel,
            offload=self.offload,
            keep_logits=True,
            debug=True,
        )


def slab_bytes(loaded: LoadedModel, block_size: int, spare_blocks: int, kv_dtype: KVDtype = "auto") -> int:
    """A slab of the fewest blocks that run one request, and `spare_blocks` more."""
    least = 1 + TAIL_PAGES + ceil_div(HOT_ROWS, block_size) + ceil_div(STAGING_ROWS, block_size)
    geometry = loaded.geometry_for(kv_dtype)
    page = device_blocks(geometry.row, geometry.num_layers, block_size).payload_bytes
    return (least + spare_blocks) * page


@dataclass(frozen=True)
class Outcome:
    """What an engine run gave."""

    results: list[RequestResult]
    stats: EngineStats

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [result.output_ids for result in self.results]


def run(loaded: LoadedModel, case: Case) -> Outcome:
    """All prompts of a case in one engine, to the end."""
    with Engine(loaded, case.config(loaded)) as engine:
        for ids in case.prompts:
            engine.add_request(ids, replace(case.params, max_tokens=case.max_tokens))
        for _ in engine.run():
            pass
        return Outcome(engine.results(), engine.stats())


@cache
def _stock(name: str) -> object:
    return stock_model(load_model(name))


@cache
def stock(name: str, ids: tuple[int, ...], params: SamplingParams, max_tokens: int) -> StockRun:
    """What stock `generate` gives for one prompt, float32. Runs once per prompt."""
    return stock_generate(_stock(name), ids, params, max_tokens)


def assert_parity(loaded: LoadedModel, case: Case, outcome: Outcome) -> None:
    """Every token is stock's and every logit within the bound; no row was missing."""
    assert outcome.stats.rows.unreachable == 0
    for ids, result in zip(case.prompts, outcome.results, strict=True):
        expected = stock(loaded.name, ids, case.params, case.max_tokens)
        assert result.output_ids == expected.tokens, f"{result.request_id} generates other tokens"
        difference = float((torch.stack(result.logits) - expected.logits).abs().max())
        assert difference <= LOGIT_BOUND, f"logits of {result.request_id} differ by {difference}"
