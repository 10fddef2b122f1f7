"""What a prompt's prefix costs the scheduler: its keys, its longest hit, and a step while it is loaded from below."""

import statistics
import time
from array import array
from collections.abc import Callable, Mapping, Sequence

from hisparse.cache.groups import GroupKind
from hisparse.cache.prefix import extend_keys
from hisparse.config import CacheConfig, CachePlan, ModelGeometry, plan_cache
from hisparse.connector import HiSparseWorkerMetadata
from hisparse.connector.prefix_source import GroupPages, Match, StoreTicket, TicketId, TierEvent
from hisparse.engine.request import Request
from hisparse.engine.sampler import SamplingParams
from hisparse.engine.scheduler import Scheduler
from hisparse.protocol import SparseKVWorkerReport

ROOT = b"benchmark".ljust(16, b"\0")
PIECES = 4
"""In so many pieces the prefix is loaded; measured are the steps of the first."""


class PatientSource:
    """Says that it has everything, and never delivers."""

    groups = (GroupKind.RESIDENT, GroupKind.INDEXER)

    def __init__(self) -> None:
        self.num_open = 0

    def match(
        self, request_id: str, keys: Sequence[bytes], have: Mapping[GroupKind, int], *, ahead: bool = False
    ) -> Match:
        return Match(len(keys), False)

    def begin_load(self, request_id: str, keys: Sequence[bytes], pages: Sequence[GroupPages]) -> TicketId:
        self.num_open += 1
        return TicketId(self.num_open)

    def offer(self, request_id: str, keys: Sequence[bytes], pages: Sequence[GroupPages]) -> StoreTicket | None:
        return None

    def take_events(self) -> tuple[TierEvent, ...]:
        return ()

    def forget(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass


def prefix_plan(model: ModelGeometry, block_size: int, num_tokens: int) -> CachePlan:
    """Pools for one prompt of `num_tokens`, half of it on the device."""
    pages = num_tokens // block_size + 4
    page_bytes = model.row.row_bytes * model.num_layers * block_size
    return plan_cache(
        CacheConfig(
            block_size=block_size,
            slab_bytes=page_bytes * (pages + model.index_topk),
            host_pool_bytes=page_bytes * pages,
            hot_rows=2 * model.index_topk,
            staging_rows=model.index_topk,
            max_running=2,
            max_tokens=num_tokens + 2 * block_size,
            indexer_tokens=2 * pages * block_size,
        ),
        model,
    )


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Of `repeats` calls, in milliseconds."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples)


def hash_and_hit(model: ModelGeometry, block_size: int, tokens: "array[int]", repeats: int) -> dict[str, float]:
    """The keys of a prompt, and its longest hit over all groups: the first half on the host, the rest on the device."""
    scheduler = Scheduler(prefix_plan(model, block_size, len(tokens)), len(tokens), ROOT)
    kv, coordinator = scheduler.kv, scheduler.coordinator
    num_pages = len(tokens) // block_size
    kv.add("prompt", 0)
    coordinator.add("prompt", 0, tokens)
    if not kv.grow("prompt", num_pages).granted:
        raise RuntimeError(f"the pools hold fewer than {num_pages} pages")
    coordinator.seal("prompt", len(tokens))
    coordinator.reclaim(num_pages // 2)
    ids = tuple(transfer.transfer_id for transfer in coordinator.take_transfers())
    coordinator.apply(SparseKVWorkerReport(0, ids, ids))
    kv.slab.release(kv.slab.allocate(kv.slab.num_free))

    def make_keys() -> list[bytes]:
        keys: list[bytes] = []
        extend_keys(keys, tokens, block_size, num_pages, ROOT)
        return keys

    hit = coordinator.find_prefix(make_keys())
    # A key's own hash is computed at its first look-up, so every look-up gets new ones.
    unused = [make_keys() for _ in range(repeats)]
    return {
        "prefix_tokens": len(tokens),
        "hit_pages": hit.num_pages,
        "hit_pages_on_host": sum(block != 0 for block in hit.host),
        "hash_ms": median_ms(make_keys, repeats),
        "hit_ms": median_ms(lambda: coordinator.find_prefix(unused.pop(), look_beyond=True), repeats),
    }


def step_while_loading(model: ModelGeometry, block_size: int, tokens: "array[int]", repeats: int) -> dict[str, float]:
    """A step in which the only request waits for a piece of its prefix."""
    plan = prefix_plan(model, block_size, len(tokens))
    scheduler = Scheduler(plan, len(tokens) // PIECES, ROOT, source=PatientSource())
    scheduler.add(Request("loads", SamplingParams(max_tokens=1), tokens, len(tokens)))

    def step() -> None:
        scheduler.complete(scheduler.schedule())
        scheduler.update(HiSparseWorkerMetadata(SparseKVWorkerReport(0)))

    first_ms = median_ms(step, 1)
    if scheduler.num_open != 1:
        raise RuntimeError(f"{scheduler.num_open} loads are open where one should be")
    return {"loading_tokens": len(tokens), "first_step_ms": first_ms, "step_us": 1e3 * median_ms(step, repeats)}
