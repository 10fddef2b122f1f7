"""A drive that looks over the scheduler's shoulder: nobody is passed but for pages that somebody else computes."""

from typing import Any

from hisparse.engine.request import Request
from hisparse.engine.scheduled_step import ScheduledStep
from tests.engine.paper_worker import BLOCK_SIZE, Drive


def shared_pages(one: Request, other: Request) -> int:
    """Full pages at the beginning that are the same in both, of what comes before each one's last token."""
    num_tokens = min(len(one.tokens), len(other.tokens)) - 1
    alike = (at for at in range(num_tokens) if one.tokens[at] != other.tokens[at])
    return next(alike, num_tokens) // BLOCK_SIZE


class WatchedDrive(Drive):
    """`Drive`, which checks the order in which waiting requests start and counts those that were passed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_passed = 0
        """Requests that were passed, once for every step in which they were."""
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._watch  # type: ignore[method-assign]

    def _watch(self) -> ScheduledStep:
        before = list(self.scheduler.waiting)
        step = self._schedule()
        running = self.scheduler.running.values()
        started = [at for at, request in enumerate(before) if request in running]
        for request in before[: max(started, default=0)]:
            if request in self.scheduler.waiting:
                self.num_passed += 1
                is_computed = any(shared_pages(request, other) > other.num_computed // BLOCK_SIZE for other in running)
                assert is_computed, f"{request.request_id} was passed and nobody computes a page for it"
        return step
