"""Every metric that an engine has: name, meaning, labels, and where its value stands."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hisparse.metrics.snapshot import Snapshot

if TYPE_CHECKING:
    from hisparse.engine.stats import TierUse

Values = Mapping[tuple[str, ...], float]
"""A metric's values by those of its labels, in their order. Without labels there is one, under `()`."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as it is exported. A counter's name ends in `_total`."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


@dataclass(frozen=True, slots=True)
class ReadMetric:
    """A counter or gauge that is read from a snapshot."""

    metric: Metric
    read: Callable[[Snapshot], Values]


@dataclass(frozen=True, slots=True)
class LatencyMetric:
    """A histogram of latencies: upper bounds of its buckets in seconds, and the labels that there can be."""

    metric: Metric
    bounds: tuple[float, ...]
    labels: tuple[tuple[str, ...], ...] = ((),)


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
FINE_SECONDS = (0.0005, *SECONDS)

FIRST_TOKEN = LatencyMetric(
    Metric("hisparse_time_to_first_token_seconds", "From a request's arrival to its first token."), SECONDS
)
PER_TOKEN = LatencyMetric(
    Metric("hisparse_time_per_output_token_seconds", "Mean time per token after a request's first, once it ended."),
    FINE_SECONDS,
)
QUEUE = LatencyMetric(
    Metric("hisparse_queue_time_seconds", "From a request's arrival to its first being admitted."), SECONDS
)
STEP = LatencyMetric(
    Metric(
        "hisparse_step_time_seconds",
        "One step of the engine: prefill if it read prompt tokens, decode if it only generated, wait if neither.",
        ("kind",),
    ),
    FINE_SECONDS,
    (("prefill",), ("decode",), ("wait",)),
)
LATENCIES = (FIRST_TOKEN, PER_TOKEN, QUEUE, STEP)

ENDED = Metric("hisparse_requests_total", "Requests that ended, by why: stop, length or abort.", ("reason",))
GENERATED = Metric("hisparse_generated_tokens_total", "Tokens generated.")
COUNTED = (ENDED, GENERATED)
"""Counters that are kept while an engine runs, and not read from a snapshot."""


def _by(values: Mapping[str, float]) -> Values:
    return {(name,): value for name, value in values.items()}


def _by_group(
    counts: "Callable[[TierUse], Mapping[str, float]]",
) -> Callable[[Snapshot], Values]:
    """Values by group of KV and one label more."""
    return lambda at: {(tier.group, name): value for tier in at.stats.tiers for name, value in counts(tier).items()}


ENGINE = (
    ReadMetric(
        Metric(
            "hisparse_prompt_tokens_total",
            "Tokens of prompts by where their KV came from: device, host, cpu_tier, files, or computed.",
            ("source",),
        ),
        lambda at: _by(at.stats.reused.as_dict()),
    ),
    ReadMetric(Metric("hisparse_running_requests", "Requests that hold a slot."), lambda at: {(): at.num_running}),
    ReadMetric(Metric("hisparse_waiting_requests", "Requests that wait for one."), lambda at: {(): at.num_waiting}),
    ReadMetric(
        Metric("hisparse_preemptions_total", "Requests that were sent back to wait."),
        lambda at: {(): at.stats.preemptions},
    ),
)
RESIDENCY = (
    ReadMetric(
        Metric(
            "hisparse_page_spills_total",
            "Pages that left the device: copied to the host, or shared with a copy that was there.",
            ("way",),
        ),
        lambda at: _by({"copied": at.stats.spills - at.shared_spills, "shared": at.shared_spills}),
    ),
    ReadMetric(
        Metric("hisparse_page_restores_total", "Pages that came back from the host whole."),
        lambda at: {(): at.stats.restores},
    ),
    ReadMetric(
        Metric(
            "hisparse_moved_bytes_total", "Payload between device and host, rows and pages together.", ("direction",)
        ),
        lambda at: _by(
            {
                "host_to_device": at.stats.moved.host_to_device_bytes,
                "device_to_host": at.stats.moved.device_to_host_bytes,
            }
        ),
    ),
    ReadMetric(
        Metric(
            "hisparse_selected_rows_total",
            "KV rows that indexers selected, by where they were found: resident, hot, miss (loaded from the host), or "
            "unreachable.",
            ("found",),
        ),
        lambda at: _by(
            {
                "resident": at.stats.rows.resident,
                "hot": at.stats.rows.hot,
                "miss": at.stats.rows.miss,
                "unreachable": at.stats.rows.unreachable,
            }
        ),
    ),
    ReadMetric(
        Metric("hisparse_page_copies_in_flight", "Transfers of pages between device and host whose end was not seen."),
        lambda at: {(): at.page_copies},
    ),
)
POOLS = (
    ReadMetric(
        Metric(
            "hisparse_slab_bytes",
            "Device memory for KV rows by lease: resident, hot, staging, copying (only a copy needs it still) or free.",
            ("lease",),
        ),
        lambda at: _by(at.slab),
    ),
    ReadMetric(
        Metric("hisparse_indexer_pool_bytes", "Device memory for index keys, leased or free.", ("state",)),
        lambda at: _by(at.indexer),
    ),
    ReadMetric(
        Metric("hisparse_host_pool_bytes", "Host memory for KV rows, leased or free.", ("state",)),
        lambda at: _by(at.host),
    ),
    ReadMetric(
        Metric("hisparse_cpu_tier_bytes", "The CPU tier by group of KV, used or free.", ("group", "state")),
        _by_group(lambda tier: {"used": tier.used_bytes, "free": tier.free_bytes}),
    ),
)
TIERS = (
    ReadMetric(
        Metric(
            "hisparse_tier_chunks_total",
            "Chunks begun to be copied: store (device to CPU tier), load (back), write (CPU tier to files), read.",
            ("group", "copy"),
        ),
        _by_group(
            lambda tier: {
                "store": tier.traffic.stores,
                "load": tier.traffic.loads,
                "write": tier.traffic.tier_writes,
                "read": tier.traffic.promotions,
            }
        ),
    ),
    ReadMetric(
        Metric(
            "hisparse_tier_failures_total",
            "Of those chunks, the ones whose copy failed; and failed look-ups in files (probe).",
            ("group", "copy"),
        ),
        _by_group(
            lambda tier: {
                "store": tier.traffic.failed_stores,
                "load": tier.traffic.failed_loads,
                "write": tier.traffic.failed_tier_writes,
                "read": tier.traffic.failed_promotions,
                "probe": tier.traffic.failed_probes,
            }
        ),
    ),
    ReadMetric(
        Metric(
            "hisparse_tier_dropped_total",
            "Chunks that were not kept because there was no room or too much under way.",
            ("group", "copy"),
        ),
        _by_group(lambda tier: {"store": tier.traffic.dropped_stores, "write": tier.traffic.dropped_tier_writes}),
    ),
    ReadMetric(
        Metric(
            "hisparse_tier_overdue_total",
            "What was given up because it took too long: transfer (a load or store), lookup.",
            ("group", "wait"),
        ),
        _by_group(lambda tier: {"transfer": tier.traffic.overdue_transfers, "lookup": tier.traffic.late_lookups}),
    ),
    ReadMetric(
        Metric("hisparse_tier_evictions_total", "Chunks that left the CPU tier for others.", ("group",)),
        lambda at: {(tier.group,): tier.num_evicted for tier in at.stats.tiers},
    ),
    ReadMetric(
        Metric("hisparse_tier_copies_in_flight", "Loads and stores of the tiers whose end was not seen."),
        lambda at: {(): at.tier_copies},
    ),
)
READ = (*ENGINE, *RESIDENCY, *POOLS, *TIERS)
