"""One engine's totals and pools at one moment, as values that another thread may read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hisparse.geometry import BlockGeometry

if TYPE_CHECKING:
    from hisparse.cache.block_pool import BlockPool
    from hisparse.engine import Engine, EngineStats


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`slab`, `host`, `indexer`: bytes of payload by use; those of one pool add up to its size, null block aside.

    `shared_spills`: of `stats.spills`, the pages whose bytes the host had already. `page_copies`: transfers between
    device and host, `tier_copies`: loads and stores of the tiers below, whose end has not been seen yet.
    """

    stats: "EngineStats"
    shared_spills: int
    num_running: int
    num_waiting: int
    slab: dict[str, int]
    host: dict[str, int]
    indexer: dict[str, int]
    page_copies: int
    tier_copies: int


def take_snapshot(engine: "Engine") -> Snapshot:
    """Read an engine that is between two steps, in the thread that steps it. Waits for the device."""
    scheduler, plan = engine.scheduler, engine.plan
    kv, coordinator = scheduler.kv, scheduler.coordinator
    return Snapshot(
        stats=engine.stats(),
        shared_spills=coordinator.totals.shared_spills,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        slab=_slab(engine),
        host=_halves(coordinator.host_pool, plan.host),
        indexer=_halves(kv.index_pool, plan.indexer),
        page_copies=coordinator.num_in_flight,
        tier_copies=scheduler.num_open,
    )


def _slab(engine: "Engine") -> dict[str, int]:
    """A block that several uses share counts once; one that only a copy in flight still needs is `copying`."""
    kv = engine.scheduler.kv
    use = kv.use()
    blocks = {"resident": use.resident, "hot": use.hot, "staging": use.staging}
    blocks["copying"] = kv.slab.num_leased - sum(blocks.values())
    blocks["free"] = kv.slab.num_free
    return {name: num_blocks * engine.plan.device.payload_bytes for name, num_blocks in blocks.items()}


def _halves(pool: "BlockPool[Any]", block: BlockGeometry) -> dict[str, int]:
    return {"leased": pool.num_leased * block.payload_bytes, "free": pool.num_free * block.payload_bytes}
