"""Page residency: the state machine, its transactions, and who gives pages up first. No torch."""

from hisparse.residency.admission import Demand, Supply, can_ever_run, may_start
from hisparse.residency.coordinator import HiSparseCoordinator, ResidencyTotals
from hisparse.residency.page_states import PageState, RequestPages
from hisparse.residency.prefix_hits import PrefixHit

__all__ = [
    "Demand",
    "HiSparseCoordinator",
    "PageState",
    "PrefixHit",
    "RequestPages",
    "ResidencyTotals",
    "Supply",
    "can_ever_run",
    "may_start",
]
