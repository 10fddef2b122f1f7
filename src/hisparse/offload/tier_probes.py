"""Questions to the tier below: how much of a chain of chunks it has. They are answered in other threads.

A probe looks up one key after the other, a batch at a time: where others wait for a thread it lets them go first. What
it has found by then can be used at once, so that a long chain neither waits for its last key nor holds up short ones.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from hisparse.offload.stats import OffloadStats
from hisparse.offload.tier import Below

MAX_PROBES = 8
"""Probes at once. Who gets no place asks again in its next look-up."""
MAX_AHEAD = 4
"""Probes at once while requests that do not run yet may begin another one."""
BATCH = 64
"""Keys that a probe looks up before it lets others have the thread."""


class Probe:
    """How many of `keys`, from the first on, the tier has: `num_found` so far, and all in all once `is_over`.

    The thread that answers it writes these two and `error`, in this order, and nobody else does while it runs.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = tuple(keys)
        self.num_found = 0
        self.is_over = False
        self.error: Exception | None = None
        self.is_noted = False
        """Whether its error was counted."""
        self._is_cancelled = False
        self._turn: Future[None] | None = None

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._is_cancelled = True
        if self._turn is not None and self._turn.cancel():
            self.is_over = True

    def fail(self, error: Exception) -> None:
        """End it with what was found."""
        self.error = error
        self.is_over = True

    def wait_for_turn(self, turn: "Future[None]") -> None:
        """`turn` is its next batch."""
        self._turn = turn

    def look_up_batch(self, lookup: Callable[[bytes], bool]) -> None:
        """Go on by one batch."""
        try:
            for key in self.keys[self.num_found : self.num_found + BATCH]:
                if self._is_cancelled or not lookup(key):
                    self.is_over = True
                    return
                self.num_found += 1
        except Exception as error:
            self.fail(error)
        if self.num_found == len(self.keys):
            self.is_over = True


class TierProbes:
    """The open probes of one tier. `deadline_s`: when none has found out anything for so long, the tier is stuck."""

    def __init__(self, below: Below, stats: OffloadStats, clock: Callable[[], float], deadline_s: float) -> None:
        self._below = below
        self._stats = stats
        self._clock = clock
        self._deadline_s = deadline_s
        self._open: list[Probe] = []
        self._num_answers = 0
        """Keys that the open probes have found, as of the last look."""
        self._progress_s = clock()

    def begin(self, keys: Sequence[bytes], *, ahead: bool = False) -> Probe | None:
        """Ask about `keys`. None when too many probes are open, too many for one that is `ahead` of its time."""
        self.look()
        if len(self._open) >= (MAX_AHEAD if ahead else MAX_PROBES):
            return None
        if not self._open:
            self._progress_s = self._clock()
        probe = Probe(keys)
        self._open.append(probe)
        self._submit(probe)
        return probe

    def may_begin(self, *, ahead: bool = False) -> bool:
        """Whether `begin` would find a place."""
        return self.look() < (MAX_AHEAD if ahead else MAX_PROBES)

    def look(self) -> int:
        """See what the threads have found out. Returns how many probes are still open."""
        num_open = len(self._open)
        self._open = [probe for probe in self._open if not self._is_over(probe)]
        num_answers = sum(probe.num_found for probe in self._open)
        if num_answers != self._num_answers or len(self._open) != num_open:
            self._progress_s = self._clock()
        self._num_answers = num_answers
        return len(self._open)

    @property
    def progress_s(self) -> float:
        """When a probe was last seen to have found out something."""
        return self._progress_s

    def is_stuck(self) -> bool:
        """Whether probes are open and have got no further for `deadline_s`."""
        return self.look() > 0 and self._clock() >= self._progress_s + self._deadline_s

    def _is_over(self, probe: Probe) -> bool:
        if probe.is_over and probe.error is not None and not probe.is_noted:
            probe.is_noted = True
            self._stats.failed_probes += 1
            self._stats.last_tier_error = f"{type(probe.error).__name__}: {probe.error}"
        return probe.is_over

    def _submit(self, probe: Probe) -> None:
        try:
            probe.wait_for_turn(self._below.executor.submit(self._serve, probe))
        except RuntimeError as error:  # the executor was shut down
            probe.fail(error)

    def _serve(self, probe: Probe) -> None:
        """In a thread of the executor: a batch, and more of them while no other probe waits."""
        while not probe.is_over:
            probe.look_up_batch(self._below.tier.lookup)
            if len(self._open) > 1 and not probe.is_over:
                self._submit(probe)
                return
