"""The list of metrics: named by convention, all of them in the README, and no count of the tiers forgotten."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from hisparse.cache.groups import GroupKind
from hisparse.engine.stats import BytesMoved, EngineStats, KVUse, RowUse, TierUse
from hisparse.metrics import EngineMetrics, catalogue
from hisparse.metrics.snapshot import Snapshot
from hisparse.offload.stats import OffloadStats

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
METRICS = [
    *(latency.metric for latency in catalogue.LATENCIES),
    *catalogue.COUNTED,
    *(read.metric for read in catalogue.READ),
]
ROW = re.compile(r"^\| `(hisparse_\w+)` \| ([^|]*) \|", re.MULTILINE)


def exported() -> dict[str, str]:
    """Names as they appear in a scrape, histograms without their suffixes, and their types."""
    suffix = {"counter": "_total"}
    return {family.name + suffix.get(family.type, ""): family.type for family in EngineMetrics().describe()}


def test_the_readme_lists_exactly_what_is_exported_with_its_labels() -> None:
    listed = {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels in ROW.findall(README)}
    assert list(listed) == list(exported())
    assert listed == {metric.name: metric.labels for metric in METRICS}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_name_follows_the_conventions(metric: catalogue.Metric) -> None:
    kind = exported()[metric.name]
    assert re.fullmatch(r"hisparse(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (kind == "counter")
    assert metric.name.endswith("_seconds") == (kind == "histogram")
    assert metric.help.endswith(".")
    assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)


@pytest.mark.parametrize("latency", catalogue.LATENCIES, ids=lambda latency: latency.metric.name)
def test_bounds_of_buckets_ascend(latency: catalogue.LatencyMetric) -> None:
    assert list(latency.bounds) == sorted(set(latency.bounds))
    assert all(len(labels) == len(latency.metric.labels) for labels in latency.labels)


def snapshot(*tiers: TierUse) -> Snapshot:
    """A snapshot of nothing but tiers."""
    stats = EngineStats(KVUse(*[0] * 8), RowUse(0, 0, 0, 0), BytesMoved(0, 0), 0, 0, 0)
    return Snapshot(replace(stats, tiers=tiers), 0, 0, 0, {}, {}, {}, 0, 0)


def test_every_count_of_the_tiers_is_exported_once_for_each_group() -> None:
    """Every field has a number of its own, which has to come out under one metric and one set of labels."""
    counts = [field.name for field in fields(OffloadStats) if field.type in (int, "int")]
    tiers = []
    for base, group in ((100, GroupKind.RESIDENT), (200, GroupKind.INDEXER)):
        traffic = OffloadStats(**{name: base + number for number, name in enumerate(counts)})
        tiers.append(TierUse(group.value, traffic, used_bytes=base + 50, free_bytes=base + 51, num_evicted=base + 52))
    values = [
        (labels[0], value)
        for read in catalogue.READ
        if read.metric.labels[:1] == ("group",)
        for labels, value in read.read(snapshot(*tiers)).items()
    ]
    expected = [
        (group.value, base + number)
        for base, group in ((100, GroupKind.RESIDENT), (200, GroupKind.INDEXER))
        for number in (*range(len(counts)), 50, 51, 52)
    ]
    assert sorted(values) == sorted(expected)


def test_an_engine_without_tiers_has_no_series_of_them() -> None:
    assert all(not read.read(snapshot()) for read in catalogue.READ if read.metric.labels[:1] == ("group",))
