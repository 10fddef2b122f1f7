"""How ranks hand each other a few bytes while they start."""

import pickle
from typing import Any

from hisparse.worker.cuda.shared_pool import EventHandles, Exchange

_KEY = "hisparse-host-events"


def exchange_events(store: Any) -> Exchange:
    """Rank 0's events for all, through the store in which the ranks met."""

    def exchange(own: EventHandles | None) -> EventHandles:
        if own is not None:
            store.set(_KEY, pickle.dumps(own))
            return own
        handles: EventHandles = pickle.loads(store.get(_KEY))
        return handles

    return exchange
