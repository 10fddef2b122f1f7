"""Page residency: the state machine, its transactions, and who gives pages up first. No torch."""

from hisparse.residency.admission import Demand, Supply, can_ever_run, may_start
from hisparse.residency.arrivals import Arrival, Arrivals, Pin
from hisparse.residency.coordinator import HiSparseCoordinator
from hisparse.residency.page_moves import ResidencyTotals
from hisparse.residency.page_states import PageState, RequestPages
from hisparse.residency.prefix_hits import PrefixHit

__all__ = [
    "Arrival",
    "Arrivals",
    "Demand",
    "HiSparseCoordinator",
    "PageState",
    "Pin",
    "PrefixHit",
    "RequestPages",
    "ResidencyTotals",
    "Supply",
    "can_ever_run",
    "may_start",
]
