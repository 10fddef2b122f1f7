"""What Prometheus reads is what the engine did; asking costs a step nothing until somebody asks."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from hisparse.engine import Engine, EngineConfig, LoadedModel
from hisparse.metrics import EngineMetrics
from hisparse.offload.config import FileOptions, OffloadConfig
from hisparse.worker import HiSparseWorker
from tests.engine.parity import GREEDY, Case, prompt
from tests.metrics.scraped import Scrape, scrape

FOREVER_S = 3600.0
LENGTH = 120
SQUEEZED = Case(tuple(prompt(seed, LENGTH) for seed in range(3)), max_tokens=8, spare_blocks=6, copy_delay=2)
"""Three prompts in a slab that holds less than two of them."""


def config(loaded: LoadedModel) -> EngineConfig:
    """What the engines here run with. Invariants are other tests' subject."""
    return replace(SQUEEZED.config(loaded), debug=False)


def add_all(engine: Engine, case: Case) -> None:
    for ids in case.prompts:
        engine.add_request(ids, replace(GREEDY, max_tokens=case.max_tokens))


def run(loaded: LoadedModel, case: Case, metrics: EngineMetrics, options: EngineConfig | None = None) -> Engine:
    """An engine, still open, in which all requests of a case have ended."""
    engine = Engine(loaded, options or config(loaded), meter=metrics)
    add_all(engine, case)
    for _ in engine.run():
        pass
    return engine


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every time that an engine waits for the device to read its counters."""
    reads: list[int] = []
    read = HiSparseWorker.counters

    def counting(worker: HiSparseWorker) -> dict[str, int]:
        reads.append(1)
        return read(worker)

    monkeypatch.setattr(HiSparseWorker, "counters", counting)
    return reads


def test_a_scrape_says_what_the_engine_counted(tiny: LoadedModel) -> None:
    metrics = EngineMetrics()
    with run(tiny, SQUEEZED, metrics) as engine:
        seen, stats, results = scrape(metrics.registry), engine.stats(), engine.results()
        totals = engine.scheduler.coordinator.totals
    rows = seen["hisparse_selected_rows_total"]
    assert rows == {
        ("resident",): stats.rows.resident,
        ("hot",): stats.rows.hot,
        ("miss",): stats.rows.miss,
        ("unreachable",): 0,
    }
    assert rows["miss",] > 0
    spills = seen["hisparse_page_spills_total"]
    assert spills == {("copied",): totals.spills - totals.shared_spills, ("shared",): totals.shared_spills}
    assert sum(spills.values()) == stats.spills > 0
    assert seen.one("hisparse_page_restores_total") == stats.restores
    assert seen.one("hisparse_preemptions_total") == stats.preemptions
    assert seen["hisparse_moved_bytes_total"] == {
        ("host_to_device",): stats.moved.host_to_device_bytes,
        ("device_to_host",): stats.moved.device_to_host_bytes,
    }
    assert seen.one("hisparse_generated_tokens_total") == sum(len(result.output_ids) for result in results)
    assert seen["hisparse_requests_total"] == {("stop",): 0, ("length",): 3, ("abort",): 0}
    assert (seen.one("hisparse_running_requests"), seen.one("hisparse_waiting_requests")) == (0, 0)
    assert {(name,): float(value) for name, value in stats.reused.as_dict().items()} == seen[
        "hisparse_prompt_tokens_total"
    ]


def test_latencies_are_those_of_the_results(tiny: LoadedModel) -> None:
    metrics = EngineMetrics()
    num_steps = 0
    with Engine(tiny, config(tiny), meter=metrics) as engine:
        add_all(engine, SQUEEZED)
        for _ in engine.run():
            num_steps += 1
        seen, results = scrape(metrics.registry), engine.results()
    for name, latencies in (
        ("hisparse_time_to_first_token_seconds", [result.ttft_s for result in results]),
        ("hisparse_time_per_output_token_seconds", [result.tpot_s for result in results]),
    ):
        assert seen.one(f"{name}_count") == len(latencies)
        assert seen.one(f"{name}_sum") == pytest.approx(sum(latency or 0.0 for latency in latencies))
        buckets = {float(bound): count for (bound,), count in seen[f"{name}_bucket"].items()}
        assert buckets == {bound: sum((s or 0.0) <= bound for s in latencies) for bound in buckets}
    assert seen.one("hisparse_queue_time_seconds_count") == len(results)
    assert 0 < seen.one("hisparse_queue_time_seconds_sum") < seen.one("hisparse_time_to_first_token_seconds_sum")
    steps = seen["hisparse_step_time_seconds_count"]
    assert sum(steps.values()) == num_steps
    assert min(steps["prefill",], steps["decode",]) > 0


def test_the_uses_of_each_pool_add_up_to_its_size_in_every_scrape(tiny: LoadedModel) -> None:
    metrics = EngineMetrics(patience_s=0)
    with Engine(tiny, config(tiny), meter=metrics) as engine:
        add_all(engine, SQUEEZED)
        plan = engine.plan
        sizes = {
            "hisparse_slab_bytes": (plan.num_device_blocks - 1) * plan.device.payload_bytes,
            "hisparse_indexer_pool_bytes": (plan.num_indexer_blocks - 1) * plan.indexer.payload_bytes,
            "hisparse_host_pool_bytes": (plan.num_host_blocks - 1) * plan.host.payload_bytes,
        }
        leases: set[str] = set()
        for _ in engine.run():
            seen = scrape(metrics.registry)
            if "hisparse_slab_bytes" not in seen:
                continue  # the first scrape asks, and the step after it answers
            assert {name: sum(seen[name].values()) for name in sizes} == sizes
            assert min(seen["hisparse_slab_bytes"].values()) >= 0
            leases |= {lease for (lease,), num_bytes in seen["hisparse_slab_bytes"].items() if num_bytes}
    assert leases >= {"resident", "hot", "staging", "free"}


def test_while_nobody_asks_no_step_reads_the_device(tiny: LoadedModel, counted: list[int]) -> None:
    metrics = EngineMetrics()
    with Engine(tiny, config(tiny), meter=metrics) as engine:
        add_all(engine, SQUEEZED)
        reads_after = [len(counted) for _ in engine.run()]
    assert set(reads_after[:-1]) == {0}
    assert reads_after[-1] == 1, "once all requests ended, the counters are read"


def test_who_asks_is_answered_by_the_next_step_with_one_read(tiny: LoadedModel, counted: list[int]) -> None:
    metrics = EngineMetrics(patience_s=0)
    with Engine(tiny, config(tiny), meter=metrics) as engine:
        add_all(engine, SQUEEZED)
        engine.step()
        before = scrape(metrics.registry)
        assert "hisparse_slab_bytes" not in before
        assert before.one("hisparse_time_to_first_token_seconds_count") == 0
        engine.step()
        assert len(counted) == 1
        engine.step()
        assert len(counted) == 1
        assert scrape(metrics.registry).one("hisparse_running_requests") > 0


def test_an_engine_without_work_answers_at_once(tiny: LoadedModel, counted: list[int]) -> None:
    metrics = EngineMetrics(patience_s=FOREVER_S)
    assert "hisparse_slab_bytes" not in scrape(metrics.registry)
    with run(tiny, SQUEEZED, metrics):
        num_reads = len(counted)
        scrape(metrics.registry)
        scrape(metrics.registry)
        assert len(counted) == num_reads
    assert scrape(metrics.registry)["hisparse_slab_bytes"], "the last values stay after the engine was closed"


def test_a_scrape_from_another_thread_waits_for_the_step_at_hand(tiny: LoadedModel) -> None:
    metrics = EngineMetrics(patience_s=FOREVER_S)
    scrapes: list[Scrape] = []
    is_over = threading.Event()
    with Engine(tiny, config(tiny), meter=metrics) as engine:

        def ask() -> None:
            while not is_over.is_set():
                scrapes.append(scrape(metrics.registry))

        add_all(engine, SQUEEZED)
        asking = threading.Thread(target=ask)
        asking.start()
        for _ in engine.run():
            pass
        is_over.set()
        asking.join()
        scrapes.append(scrape(metrics.registry))
        stats = engine.stats()
    assert len(scrapes) > 2
    for name in ("hisparse_page_spills_total", "hisparse_selected_rows_total", "hisparse_step_time_seconds_count"):
        totals = [sum(seen[name].values()) for seen in scrapes]
        assert totals == sorted(totals)
    assert scrapes[-1]["hisparse_selected_rows_total"]["miss",] == stats.rows.miss


def test_an_aborted_request_counts_once_and_leaves_no_gauge_behind(tiny: LoadedModel) -> None:
    metrics = EngineMetrics(patience_s=FOREVER_S)
    with Engine(tiny, config(tiny), meter=metrics) as engine:
        request_id = engine.add_request(prompt(0, 40), GREEDY)
        engine.step()
        engine.abort(request_id)
        engine.abort(request_id)
        seen = scrape(metrics.registry)
    assert seen["hisparse_requests_total"]["abort",] == 1
    assert seen.one("hisparse_running_requests") == 0
    assert seen["hisparse_slab_bytes"]["resident",] == 0


def test_tokens_of_prompts_count_by_the_tier_that_had_their_kv(tiny: LoadedModel, tmp_path: Path) -> None:
    """The first engine fills the CPU tier and files; the second finds files only, because its memory is new."""
    files = FileOptions((tmp_path,), capacity_bytes=16 << 20, direct_io=False)
    tiers = OffloadConfig(cpu_bytes=16 << 20, lookup_deadline_s=FOREVER_S, files=files)
    # A host pool of few pages, and a slab of little more than a request: what was computed first is found below only.
    options = replace(config(tiny), offload=tiers, max_running=1, host_pool_bytes=200 << 10)
    sources = []
    for _ in range(2):
        metrics = EngineMetrics()
        with run(tiny, replace(SQUEEZED, prompts=SQUEEZED.prompts * 2), metrics, options) as engine:
            seen, stats = scrape(metrics.registry), engine.stats()
        sources.append({source: tokens for (source,), tokens in seen["hisparse_prompt_tokens_total"].items()})
        assert sources[-1] == stats.reused.as_dict()
        assert sum(sources[-1].values()) == 6 * LENGTH
        chunks, used = seen["hisparse_tier_chunks_total"], seen["hisparse_cpu_tier_bytes"]
        assert len(stats.tiers) == 2
        for tier in stats.tiers:
            assert chunks["store", tier.group] == tier.traffic.stores
            assert chunks["load", tier.group] == tier.traffic.loads
            assert chunks["write", tier.group] == tier.traffic.tier_writes
            assert chunks["read", tier.group] == tier.traffic.promotions
            assert used[tier.group, "used"] == tier.used_bytes > 0
    first, second = sources
    assert (first["cpu_tier"] > 0, first["files"]) == (True, 0)
    assert second["files"] > 0
    assert second["computed"] < first["computed"]


def test_two_engines_of_a_process_have_metrics_of_their_own(tiny: LoadedModel) -> None:
    one, other = EngineMetrics(), EngineMetrics()
    run(tiny, replace(SQUEEZED, prompts=SQUEEZED.prompts[:1]), one).close()
    run(tiny, SQUEEZED, other).close()
    asked = [scrape(metrics.registry)["hisparse_requests_total"]["length",] for metrics in (one, other)]
    assert asked == [1, 3]
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("hisparse")]


def test_the_environment_cannot_turn_metrics_into_files(tmp_path: Path) -> None:
    program = (
        "from hisparse.engine import Engine, EngineConfig, SamplingParams, load_model\n"
        "from hisparse.metrics import EngineMetrics\n"
        "metrics = EngineMetrics()\n"
        "with Engine(load_model('builtin:tiny-v32'), EngineConfig(max_tokens=64), meter=metrics) as engine:\n"
        "    engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))\n"
        "    print(sum(len(step.tokens) for step in engine.run()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "2\n"
    assert list(tmp_path.iterdir()) == []


def test_an_engine_without_a_meter_loads_no_prometheus() -> None:
    program = "import sys, hisparse.engine\nprint('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
