"""What the scheduler's side costs per request and step, in steady decode, at two context lengths.

    python benchmarks/scheduler.py [--requests 2048] [--contexts 8192 131072] [--steps 512] [--json]

Measured work: admit the new token, coordinator, connector metadata, worker reports. The worker answers at once:
every transfer is enqueued and completed in the step that carries it. Nothing else is stubbed; requests get to their
context through the same scheduler, most of their pages spilled on the way.

Beside it: the keys of a prompt of the longer context, its longest hit over all groups (half of it on the host), and a
step while a prefix is loaded from below, at both lengths.
"""

import argparse
import gc
import random
import resource
import statistics
import time
from array import array
from pathlib import Path

from _prefix_cost import hash_and_hit, step_while_loading
from _record import record

from hisparse.config import CacheConfig, ModelGeometry, plan_cache
from hisparse.connector import HiSparseWorkerMetadata
from hisparse.engine.request import Request
from hisparse.engine.sampler import SamplingParams
from hisparse.engine.scheduled_step import ScheduledStep
from hisparse.engine.scheduler import Scheduler
from hisparse.geometry import latent_row
from hisparse.protocol import SparseKVWorkerReport

BLOCK_SIZE = 64
HOT_ROWS = 4096
TOPK = 2048
INDEX_ROW_BYTES = 144
"""128 fp8 elements and a scale, on 16-byte words."""
GOAL_US = 3.0
GOAL_RATIO = 1.1
GOAL_HASH_MS = 2.0
GOAL_HIT_MS = 0.6
MODEL = ModelGeometry(latent_row("fp8_ds_mla", 512, 64), (0, 0, 0, 0), TOPK, INDEX_ROW_BYTES)


def make_scheduler(num_requests: int, context: int, steps: int) -> Scheduler:
    """Pools that hold all requests' contexts on host, and on the device little more than what they are promised."""
    longest = context + steps + 1
    pages = -(-longest // BLOCK_SIZE)
    block = MODEL.row.row_bytes * MODEL.num_layers * BLOCK_SIZE
    config = CacheConfig(
        block_size=BLOCK_SIZE,
        slab_bytes=block * (num_requests * (HOT_ROWS // BLOCK_SIZE + 4) + 8192),
        host_pool_bytes=block * num_requests * (pages + 1),
        hot_rows=HOT_ROWS,
        staging_rows=4 * TOPK,
        max_running=num_requests,
        max_tokens=longest,
        indexer_tokens=num_requests * pages * BLOCK_SIZE,
    )
    return Scheduler(plan_cache(config, MODEL), chunk_tokens=262144, root=b"benchmark".ljust(16, b"\0"))


def answer(scheduler: Scheduler, step: ScheduledStep) -> None:
    """Be the worker: report every transfer of the step."""
    ids = tuple(transfer.transfer_id for transfer in step.meta.command.transfers)  # type: ignore[attr-defined]
    scheduler.update(HiSparseWorkerMetadata(SparseKVWorkerReport(0, ids, ids)))


def one_step(scheduler: Scheduler, rng: random.Random) -> tuple[int, float]:
    """One step of the scheduler's side. Returns its decodes and its seconds, token choice left out."""
    start = time.perf_counter()
    step = scheduler.schedule()
    scheduler.complete(step)
    answer(scheduler, step)
    seconds = time.perf_counter() - start
    finished = step.decodes + [r for r, _ in step.prefills if r.num_computed == len(r.tokens)]
    for request in finished:
        request.tokens.append(rng.randrange(1 << 17))
    return len(step.decodes), seconds


class Population:
    """Requests of one context length, all decoding, and the times of their steps."""

    def __init__(self, num_requests: int, context: int, steps: int) -> None:
        """Populate. Requests start at contexts that differ by up to a block, as real ones do."""
        self.context = context
        self.rng = random.Random(context)
        self.samples: list[float] = []
        gc.collect()
        before = resident_bytes()
        self.scheduler = make_scheduler(num_requests, context, steps)
        params = SamplingParams(max_tokens=steps + 1)
        token_bytes = 0
        for number in range(num_requests):
            length = context - self.rng.randrange(BLOCK_SIZE)
            tokens = array("i", self.rng.randbytes(4 * length))
            token_bytes += 4 * length
            self.scheduler.add(Request(f"r{number}", params, tokens, length))
        start = time.perf_counter()
        decodes = 0
        while decodes < num_requests:
            decodes, _ = one_step(self.scheduler, self.rng)
        self.populate_s = time.perf_counter() - start
        self.cache_bytes = resident_bytes() - before - token_bytes

    def decode(self) -> None:
        decodes, seconds = one_step(self.scheduler, self.rng)
        self.samples.append(1e6 * seconds / decodes)

    def row(self) -> dict[str, float]:
        num_blocks = self.scheduler.coordinator.host_pool.num_leased
        if not num_blocks:
            raise SystemExit(
                f"{self.context} tokens a request spilled nothing: take longer --contexts, or more --requests"
            )
        return {
            "context": self.context,
            "us_mean": statistics.fmean(self.samples),
            "us_median": statistics.median(self.samples),
            "us_worst": max(self.samples),
            "populate_s": self.populate_s,
            "host_blocks": num_blocks,
            "bytes_per_host_block": self.cache_bytes / num_blocks,
            "spills": self.scheduler.coordinator.totals.spills,
            "preemptions": self.scheduler.num_preemptions,
        }


def prefix_rows(contexts: list[int], repeats: int) -> list[dict[str, float]]:
    """What prefixes cost; the longest hit is measured at the longer context only."""
    prompts = [array("i", random.Random(context).randbytes(4 * context)) for context in contexts]
    loading = [step_while_loading(MODEL, BLOCK_SIZE, prompt, repeats) for prompt in prompts]
    return [hash_and_hit(MODEL, BLOCK_SIZE, prompts[-1], min(repeats, 64)), *loading]


def resident_bytes() -> int:
    """What the process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--contexts", type=int, nargs=2, default=[8192, 131072])
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/scheduler.json")
    args = parser.parse_args()
    prefixes = prefix_rows(args.contexts, args.steps)
    populations = [Population(args.requests, context, args.steps) for context in args.contexts]
    gc.collect()
    gc.freeze()
    # In turn, so that what else the machine does falls on both alike.
    for _ in range(args.steps // 2):
        for population in populations:
            population.decode()
    rows = [population.row() for population in populations]
    for row in [*rows, *prefixes]:
        print("  ".join(f"{name} {value:,.2f}" for name, value in row.items()))
    ratio = rows[1]["us_mean"] / rows[0]["us_mean"]
    worst = max(row["us_mean"] for row in rows)
    print(f"µs per request and step: {worst:.2f} (goal {GOAL_US}); long over short: {ratio:.3f} (goal {GOAL_RATIO})")
    print(
        f"keys of {prefixes[0]['prefix_tokens']} tokens: {prefixes[0]['hash_ms']:.2f} ms (goal {GOAL_HASH_MS}); "
        f"longest hit: {prefixes[0]['hit_ms']:.2f} ms (goal {GOAL_HIT_MS})"
    )
    if args.json:
        print(record("scheduler", [*rows, {"ratio": ratio}, *prefixes], args))


if __name__ == "__main__":
    main()
