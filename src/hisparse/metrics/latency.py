"""Latencies counted in buckets."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class LatencyBuckets:
    """How many latencies were at most as long as each of `bounds` (seconds, ascending), and their sum.

    Not thread-safe. The buckets of prometheus_client's own `Histogram` would do, but an environment variable turns them
    into files that all engines of a process share.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bound of each bucket, as text, and the latencies up to it; the last bound is +Inf."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
