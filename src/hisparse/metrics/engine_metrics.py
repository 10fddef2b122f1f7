"""Metrics of one engine: told by the engine in its thread, read by Prometheus in another.

What the host counts costs the engine a lock and an addition per step. What only the device knows (rows that resolvers
found, bytes they moved) is read at two kinds of moments, both between steps and in the engine's own thread: at the end
of the first step after somebody asked, and when the last request ended. So a step waits for the device only when
metrics were asked for while it ran, and nobody reads the device while a step is captured or replayed.
"""

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from hisparse.metrics import catalogue
from hisparse.metrics.catalogue import LatencyMetric, Metric, Values
from hisparse.metrics.latency import LatencyBuckets
from hisparse.metrics.snapshot import Snapshot, take_snapshot

if TYPE_CHECKING:
    from hisparse.engine import Engine, StepOutput
    from hisparse.engine.request import Request

ABORTED = "abort"
PATIENCE_S = 1.0
"""How long whoever asks waits for the step at hand to end. Then it gets what was last read."""

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class EngineMetrics(Collector):
    """An `EngineMeter` for one engine, and a Prometheus collector, in a registry of its own (`registry`).

    Pass it as `Engine(meter=…)`. `collect` may be called from any thread, the calls of a meter come from the engine's.
    Counters and gauges are as of the end of one step: they agree with each other.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        """Over everything below."""
        self._latencies: dict[str, dict[tuple[str, ...], LatencyBuckets]] = {
            latency.metric.name: {labels: LatencyBuckets(latency.bounds) for labels in latency.labels}
            for latency in catalogue.LATENCIES
        }
        self._num_ended = dict.fromkeys(("stop", "length", ABORTED), 0)
        self._num_generated = 0
        self._snapshot: Snapshot | None = None
        self._num_taken = 0
        self._is_current = True
        """Whether no step ended since the last snapshot."""
        self._is_wanted = False
        self.registry = CollectorRegistry()
        self.registry.register(self)

    # The engine's side: `EngineMeter`.

    def see_first_token(self, request: "Request") -> None:
        """Count how long the request waited for its turn, and for its first token."""
        with self._changed:
            if request.first_token is not None:
                self._observe(catalogue.FIRST_TOKEN, request.first_token - request.arrival)
            if request.admitted is not None:
                self._observe(catalogue.QUEUE, request.admitted - request.arrival)

    def see_end(self, engine: "Engine", request: "Request") -> None:
        """Count the request, and what its tokens took."""
        with self._changed:
            self._num_ended[request.finish_reason.value if request.finish_reason else ABORTED] += 1
            if request.num_output > 1 and request.first_token is not None and request.last_token is not None:
                seconds = (request.last_token - request.first_token) / (request.num_output - 1)
                self._observe(catalogue.PER_TOKEN, seconds)
        if request.finish_reason is None and not engine.scheduler.has_work:
            # An aborted request ends between steps, and perhaps no step comes any more.
            self._take(engine)

    def see_step(self, engine: "Engine", output: "StepOutput", seconds: float) -> None:
        """Count the step, and read the engine if somebody asked or no work is left."""
        kind = "prefill" if output.prefill_tokens else "decode" if output.decode_tokens else "wait"
        with self._changed:
            self._observe(catalogue.STEP, seconds, (kind,))
            self._num_generated += len(output.tokens)
            self._is_current = False
            is_wanted = self._is_wanted
        if is_wanted or not engine.scheduler.has_work:
            self._take(engine)

    def _take(self, engine: "Engine") -> None:
        snapshot = take_snapshot(engine)
        with self._changed:
            self._snapshot = snapshot
            self._num_taken += 1
            self._is_current, self._is_wanted = True, False
            self._changed.notify_all()

    def _observe(self, latency: LatencyMetric, seconds: float, labels: tuple[str, ...] = ()) -> None:
        self._latencies[latency.metric.name][labels].observe(seconds)

    # The reader's side: `Collector`.

    def describe(self) -> Iterator[Family]:
        """Every metric without values."""
        for latency in catalogue.LATENCIES:
            yield HistogramMetricFamily(latency.metric.name, latency.metric.help, labels=latency.metric.labels)
        yield from (_family(metric, {}) for metric in catalogue.COUNTED)
        yield from (_family(read.metric, {}) for read in catalogue.READ)

    def collect(self) -> Iterator[Family]:
        """Every metric with its values. Waits for the end of the step at hand, for a bounded time.

        Before the first step has ended there are no values of what is read from the engine.
        """
        with self._changed:
            snapshot = self._fresh_snapshot()
            families: list[Family] = [self._latency_family(latency) for latency in catalogue.LATENCIES]
            ended: Values = {(reason,): count for reason, count in self._num_ended.items()}
            families.append(_family(catalogue.ENDED, ended))
            families.append(_family(catalogue.GENERATED, {(): self._num_generated}))
        families += [_family(read.metric, read.read(snapshot) if snapshot else {}) for read in catalogue.READ]
        yield from families

    def _fresh_snapshot(self) -> Snapshot | None:
        if not self._is_current:
            num_taken = self._num_taken
            self._is_wanted = True
            self._changed.wait_for(lambda: self._num_taken > num_taken, self._patience_s)
        return self._snapshot

    def _latency_family(self, latency: LatencyMetric) -> HistogramMetricFamily:
        family = HistogramMetricFamily(latency.metric.name, latency.metric.help, labels=latency.metric.labels)
        for labels, buckets in self._latencies[latency.metric.name].items():
            family.add_metric(labels, buckets.cumulative(), buckets.sum_s)
        return family


def _family(metric: Metric, values: Values) -> CounterMetricFamily | GaugeMetricFamily:
    make = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
