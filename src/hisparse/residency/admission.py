"""May a request start? Pure arithmetic over what is free, what reclaiming would free, and what is promised.

Every running request is promised its *footprint*: the device blocks it cannot do without once all else is on the
host. As long as the footprints fit the slab, the oldest request can always go on by spilling, or by preempting
younger ones, so nothing deadlocks.
"""

from dataclasses import dataclass

from hisparse.cache.admission import GRANTED, Admission, Verdict
from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.config import TAIL_PAGES, CachePlan, WriteBack
from hisparse.residency.coordinator import HiSparseCoordinator
from hisparse.residency.prefix_hits import PrefixHit


@dataclass(frozen=True, slots=True)
class Demand:
    """A request in pages. `total`: at its longest. `prompt`: to compute its prompt. `hit`: found by a prefix hit;
    `claimed` of those are free slab blocks that adopting would take, `index_claimed` free indexer blocks, and
    `on_host` is whether some are on the host or may be adopted there later, so that decoding will take a hot lease."""

    total: int
    prompt: int
    hit: int = 0
    claimed: int = 0
    index_claimed: int = 0
    on_host: bool = False

    @classmethod
    def of(cls, plan: CachePlan, num_prompt: int, num_total: int, hit: PrefixHit | None = None) -> "Demand":
        """The demand of a prompt of `num_prompt` tokens that may grow to `num_total`."""
        prompt, total = plan.device.pages(num_prompt), plan.device.pages(num_total)
        if hit is None:
            return cls(total, prompt)
        on_host = any(hit.host) or any(hit.host_beyond)
        return cls(total, prompt, hit.num_pages, hit.num_free_adopted, hit.num_free_indexer_adopted, on_host)

    def footprint(self, plan: CachePlan) -> int:
        """Device blocks that the request needs at least to go on."""
        return plan.host_backed_blocks if self.may_spill(plan) else self.total

    def may_spill(self, plan: CachePlan) -> bool:
        """Whether its pages may leave the device: not if a hot lease would take more than they do."""
        if plan.config.write_back is WriteBack.NEVER:
            return False
        return self.on_host or self.total > plan.host_backed_blocks


@dataclass(frozen=True, slots=True)
class Supply:
    """The pools in blocks. `promised` are the footprints of the running requests."""

    promised: int
    slab_free: int
    reclaimable: int
    host_free: int
    indexer_free: int

    @classmethod
    def of(cls, kv: KVCacheManager, coordinator: HiSparseCoordinator, promised: int) -> "Supply":
        """What the pools have now, reclaimable pages included."""
        return cls(
            promised=promised,
            slab_free=kv.slab.num_free,
            reclaimable=coordinator.num_reclaimable(),
            host_free=coordinator.host_pool.num_free,
            indexer_free=kv.index_pool.num_free,
        )

    def rooms(self) -> tuple[int, ...]:
        """The numbers that `may_start` compares, larger is better: a refusal stands until one of them has grown."""
        return (
            -self.promised,
            self.slab_free + self.reclaimable,
            self.slab_free + self.host_free,
            self.indexer_free,
        )


def can_ever_run(plan: CachePlan, demand: Demand) -> Admission:
    """Whether the request would fit with all pools to itself. NEVER carries the sizes that would do."""
    indexer_usable = plan.num_indexer_blocks - 1
    if demand.total > indexer_usable:
        short = demand.total - indexer_usable
        reason = f"its index keys need {demand.total} blocks, the indexer pool has {indexer_usable}"
        return Admission(Verdict.NEVER, indexer_short=short, reason=reason)
    if demand.total <= plan.usable_device_blocks:
        return GRANTED
    if plan.config.write_back is WriteBack.NEVER:
        short = demand.total - plan.usable_device_blocks
        needed = (plan.num_device_blocks + short) * plan.device.payload_bytes
        reason = f"{demand.total} pages that never leave the device need a device budget of {needed} bytes"
        return Admission(Verdict.NEVER, slab_short=short, reason=reason)
    beside_hot = plan.usable_device_blocks - plan.hot_blocks
    host_usable = plan.num_host_blocks - 1
    short = demand.total - beside_hot - host_usable
    if short <= 0:
        return GRANTED
    needed = (plan.num_host_blocks + short) * plan.host.payload_bytes
    reason = (
        f"{demand.total} pages need a host pool of {needed} bytes beside this device budget; "
        f"it has {plan.num_host_blocks * plan.host.payload_bytes}"
    )
    return Admission(Verdict.NEVER, host_short=short, reason=reason)


def may_start(plan: CachePlan, demand: Demand, supply: Supply) -> Admission:
    """Whether the request may start now. Blocks that reclaiming frees count as free."""
    over = supply.promised + demand.footprint(plan) - plan.usable_device_blocks
    if over > 0:
        return Admission(Verdict.WAIT, slab_short=over, reason="the running requests' footprints fill the slab")
    more = demand.prompt - demand.hit
    index_short = demand.index_claimed + more - supply.indexer_free
    if index_short > 0:
        return Admission(Verdict.WAIT, indexer_short=index_short, reason="the indexer pool is full")
    first = demand.claimed + min(more, TAIL_PAGES)
    slab_short = first - supply.slab_free - supply.reclaimable
    if slab_short > 0:
        return Admission(Verdict.WAIT, slab_short=slab_short, reason="the slab is full and nothing can leave it")
    host_short = demand.claimed + more - supply.slab_free - supply.host_free
    if host_short > 0:
        return Admission(Verdict.WAIT, host_short=host_short, reason="slab and host pool together have no room")
    return GRANTED
