"""Buckets of latencies count what a naive count does."""

from hypothesis import given
from hypothesis import strategies as st

from hisparse.metrics.latency import LatencyBuckets

BOUNDS = (0.01, 0.1, 1.0)


@given(st.lists(st.sampled_from((0.0, 0.01, 0.05, 0.1, 0.5, 1.0, 1.5, 1e9))))
def test_a_bucket_counts_everything_up_to_its_bound(latencies: list[float]) -> None:
    buckets = LatencyBuckets(BOUNDS)
    for seconds in latencies:
        buckets.observe(seconds)
    expected = [(str(bound), sum(seconds <= bound for seconds in latencies)) for bound in BOUNDS]
    assert buckets.cumulative() == [*expected, ("+Inf", len(latencies))]
    assert buckets.sum_s == sum(latencies)
