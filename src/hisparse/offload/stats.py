"""What the offload manager counts. Chunks everywhere, unless the name says otherwise."""

from dataclasses import dataclass


@dataclass(slots=True)
class OffloadStats:
    """Counters since the manager was made. Only the manager and its parts add to them.

    Of the chunks offered for storing, some were there already, some were begun (`stores`) and some dropped
    (`dropped_stores`); of those begun some failed. `loads` went to devices. `promotions` were begun from the tier
    below into the CPU tier, `tier_writes` the other way. `overdue_transfers` and `late_lookups` were given up for time.
    """

    stores: int = 0
    failed_stores: int = 0
    dropped_stores: int = 0
    loads: int = 0
    failed_loads: int = 0
    promotions: int = 0
    failed_promotions: int = 0
    tier_writes: int = 0
    failed_tier_writes: int = 0
    dropped_tier_writes: int = 0
    failed_probes: int = 0
    overdue_transfers: int = 0
    late_lookups: int = 0
    last_tier_error: str = ""
    """What the tier below last raised, for the log."""
