"""Times the CUDA resolver: µs per leader layer for fixed numbers of misses, and the rate of its copies.

    python benchmarks/resolver.py [--json] [--only TEXT] [--vllm-lib PATH]

Needs a CUDA device. Times are medians from event to event around one launch, with the queue kept full, so they hold
one launch and nothing of the host. The copies' rate stands beside that of the copy engine in the same process. A
synthetic trace follows at several sizes of the hot lease, with the miss rate of exact LRU. `--vllm-lib` adds the times
of vLLM's operators on the same inputs.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from _record import RESULTS, record
from _trace import selections
from _vllm_ops import VllmResolver

from hisparse.geometry import PagedLayout, RowFormat, align_up, ceil_div, device_blocks, host_blocks
from hisparse.kernels.contract import BlockTables, HotState, MissPlan, ResolverCounters, Selection
from hisparse.kernels.cuda.resolver import CudaResolver

CONTEXT = 32768
BLOCK = 64
TOPK = 2048
WARM_STEPS = 8
TIMED_STEPS = 40
DISTINCT_CONTEXTS = 24
"""Requests beyond these share host pages: the rows that a step reads are scattered all the same."""
TRACE_WARM_STEPS = 60
TRACE_LEASES = (1, 2, 4)
"""Hot rows, in units of the selection."""

QUEUE_CYCLES = 40_000_000
"""How long a busy kernel holds the stream while the host fills the queue, in clock cycles."""


@dataclass(frozen=True)
class Scenario:
    """One line of the table. `goal_us`: what the design asks on an H200."""

    requests: int
    misses: int
    goal_us: float
    resident: float = 0.0
    rows: int = 1
    hot_rows: int = 4096

    @property
    def name(self) -> str:
        what = f"{self.requests} x {self.misses}"
        if self.resident == 1.0:
            what = f"all resident, {self.requests}"
        elif self.resident:
            what += f", {self.resident:.0%} resident"
        return what + (f", union of {self.rows}" if self.rows > 1 else "")


SCENARIOS = (
    *(Scenario(requests, 0, 4, resident=1.0) for requests in (1, 8, 32, 128)),
    *(
        Scenario(requests, misses, goal)
        for requests, misses, goal in (
            (1, 0, 6),
            (1, 32, 11),
            (1, 128, 13),
            (1, 512, 22),
            (8, 128, 24),
            (32, 128, 62),
            (128, 128, 232),
            (128, 512, 890),
        )
    ),
    Scenario(1, 38, 12, resident=0.5),
    Scenario(32, 32, 26, resident=0.5),
    *(Scenario(requests, 600, goal, rows=4, hot_rows=10240) for requests, goal in ((1, 32), (8, 82), (32, 285))),
)


@dataclass(frozen=True)
class Rows:
    """`kernels.contract.PagedRows`."""

    storage: torch.Tensor
    layout: PagedLayout


class Bench:
    """One scenario's tensors, and a selection for every step."""

    def __init__(self, scenario: Scenario, row_bytes: int) -> None:
        self.scenario = scenario
        generator = torch.Generator().manual_seed(0)
        row = RowFormat("row", row_bytes)
        pages, hot_blocks = CONTEXT // BLOCK, ceil_div(scenario.hot_rows, BLOCK)
        slots = scenario.requests
        contexts = min(slots, DISTINCT_CONTEXTS)
        host_blocks_total = 1 + contexts * pages
        host = host_blocks(row, 1, BLOCK)
        self.source = Rows(
            torch.zeros(host.block_stride * host_blocks_total, dtype=torch.uint8, pin_memory=True),
            host.layer(0, host_blocks_total),
        )
        # Every host row begins with its own number, so that copies are told apart.
        words = self.source.storage.view(torch.int64).view(-1, self.source.layout.row_stride // 8)
        words[:, 0] = torch.arange(words.shape[0])
        resident_pages = round(pages * scenario.resident)
        slab_total = 1 + slots * (hot_blocks + resident_pages)
        slab = device_blocks(row, 1, BLOCK)
        storage = torch.empty(slab.block_stride * slab_total, dtype=torch.uint8, device="cuda")
        self.destination = Rows(storage, slab.layer(0, slab_total))
        slab_ids = 1 + torch.randperm(slab_total - 1, generator=generator, dtype=torch.int32)
        host_ids = 1 + torch.randperm(host_blocks_total - 1, generator=generator, dtype=torch.int32)
        resident = torch.zeros(slots, pages, dtype=torch.int32)
        resident[:, :resident_pages] = slab_ids[slots * hot_blocks :].view(slots, resident_pages)
        context = torch.arange(slots) % contexts
        self.tables = BlockTables(
            resident.cuda(),
            host_ids.view(contexts, pages)[context].cuda(),
            slab_ids[: slots * hot_blocks].view(slots, -1).cuda(),
        )
        if scenario.resident == 1.0:
            self.tables.hot.zero_()  # a request leases hot rows only once it has rows on host
        self.state = HotState.allocate(slots, scenario.hot_rows, CONTEXT, "cuda")
        self.plan = MissPlan.allocate(slots * scenario.rows, scenario.hot_rows, "cuda")
        self.counters = ResolverCounters.allocate("cuda")
        self.row_slot = torch.arange(slots, dtype=torch.int32).repeat_interleave(scenario.rows).cuda()
        first_host = resident_pages * BLOCK
        self.steps = self._selections(generator, first_host)
        self.positions = torch.empty_like(self.steps[0])

    def _selections(self, generator: torch.Generator, first_host: int) -> list[torch.Tensor]:
        """Positions of each step: a fixed part, and misses that walk through the rest so that none is still hot."""
        scenario = self.scenario
        union = TOPK if scenario.rows == 1 else 2 * TOPK
        num_resident = round(union * scenario.resident)
        steps: list[list[torch.Tensor]] = [[] for _ in range(WARM_STEPS + TIMED_STEPS)]
        for _ in range(scenario.requests):
            resident = torch.randperm(max(first_host, 1), generator=generator)[:num_resident]
            host = first_host + torch.randperm(CONTEXT - first_host, generator=generator)
            kept = union - num_resident - scenario.misses
            fixed, pool = torch.cat([resident, host[:kept]]), host[kept:]
            for index, rows in enumerate(steps):
                at = (torch.arange(scenario.misses) + index * scenario.misses) % max(1, pool.numel())
                chosen = torch.cat([fixed, pool[at]]) if scenario.misses else fixed
                chosen = chosen[torch.randperm(union, generator=generator)]
                for row in range(scenario.rows):
                    first = row * (union - TOPK) // max(1, scenario.rows - 1)
                    rows.append(chosen[first : first + TOPK].sort().values.int())
        return [torch.stack(rows).cuda() for rows in steps]

    def select(self, step: int) -> None:
        """Put the step's selection where an indexer would just have written it."""
        self.positions.copy_(self.steps[step])

    def run(self, resolver: CudaResolver) -> torch.Tensor:
        """One call of `resolve`."""
        # Who leases hot blocks knows, without asking the device, that there is none.
        selection = Selection(self.positions, self.row_slot, leased=self.scenario.resident < 1.0)
        return resolver.resolve(
            selection, self.tables, self.state, self.source, self.destination, self.plan, self.counters
        )


def time_us(launch: Callable[[int], object], repeats: int, before: Callable[[int], object] = lambda _: None) -> float:
    """Median µs of `launch(i)`, from event to event, with the device kept behind the host. `before(i)` is not timed."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda._sleep(QUEUE_CYCLES)
    for index, (start, end) in enumerate(events):
        before(index)
        start.record()
        launch(index)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def run_scenario(resolver: CudaResolver, scenario: Scenario, row_bytes: int) -> dict[str, object]:
    """Time one line and check that it missed as often as it says. Raises `SystemExit` when it did not."""
    bench = Bench(scenario, row_bytes)
    for step in range(WARM_STEPS):
        bench.select(step)
        bench.run(resolver)
    before = bench.counters.read()
    microseconds = time_us(
        lambda _: bench.run(resolver), TIMED_STEPS, before=lambda index: bench.select(WARM_STEPS + index)
    )
    counted = {name: value - before[name] for name, value in bench.counters.read().items()}
    expected = scenario.misses * scenario.requests * TIMED_STEPS
    if counted["miss"] != expected or counted["unreachable"] or int(bench.counters.status):
        raise SystemExit(f"{scenario.name}: counted {counted}, expected {expected} misses")
    rate = scenario.misses * scenario.requests * row_bytes / microseconds / 1e3
    return {"name": scenario.name, **asdict(scenario), "us": microseconds, "gb_per_s": rate}


def run_trace(resolver: CudaResolver, requests: int, row_bytes: int) -> list[dict[str, object]]:
    """Miss rate and time on the synthetic trace, for each size of the hot lease."""
    steps = list(selections(requests, CONTEXT, TOPK, TRACE_WARM_STEPS + TIMED_STEPS))
    results: list[dict[str, object]] = []
    for lease in TRACE_LEASES:
        bench = Bench(Scenario(requests, 0, 0.0, hot_rows=lease * TOPK), row_bytes)
        bench.steps = steps
        for step in range(TRACE_WARM_STEPS):
            bench.select(step)
            bench.run(resolver)
        before = bench.counters.read()["miss"]
        us = time_us(
            lambda _: bench.run(resolver),  # noqa: B023
            TIMED_STEPS,
            before=lambda index: bench.select(TRACE_WARM_STEPS + index),  # noqa: B023
        )
        missed = (bench.counters.read()["miss"] - before) / (requests * TOPK * TIMED_STEPS)
        name = f"trace, {requests} x {TOPK}, hot {lease}x"
        results.append({"name": name, "requests": requests, "hot_rows": lease * TOPK, "us": us, "miss_rate": missed})
    return results


def run_vllm(path: str, resolver: CudaResolver, scenario: Scenario, row_bytes: int) -> dict[str, object]:
    """Time vLLM's operators on the steps of a scenario. Raises `SystemExit` when the rows differ from ours."""
    bench = Bench(scenario, row_bytes)
    words, stride = row_bytes // 8, bench.source.layout.row_stride // 8
    host = torch.empty(bench.source.layout.num_rows, words, dtype=torch.int64, pin_memory=True)
    host.copy_(bench.source.storage.view(torch.int64).view(-1, stride)[:, :words])
    sizes = (scenario.requests, TOPK, scenario.hot_rows, BLOCK)
    vllm = VllmResolver(path, host.view(torch.uint8), (bench.tables.host, bench.tables.hot), sizes)
    for step in range(WARM_STEPS):
        bench.select(step)
        ours = bench.destination.storage.view(torch.int64).view(-1, words)[bench.run(resolver).long(), 0]
        theirs = vllm.hot.view(torch.int64).view(-1, words)[vllm.run(bench.positions).long(), 0]
        if not torch.equal(ours, theirs):
            raise SystemExit(f"{scenario.name}: vLLM's operators returned other rows than ours in step {step}")
    us = time_us(
        lambda _: vllm.run(bench.positions), TIMED_STEPS, before=lambda index: bench.select(WARM_STEPS + index)
    )
    return {"name": f"vLLM, {scenario.name}", "requests": scenario.requests, "misses": scenario.misses, "us": us}


def copy_engine_rate() -> float:
    """GB/s of one 1 GiB copy from pinned memory."""
    host = torch.zeros(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    return host.numel() / time_us(lambda _: device.copy_(host, non_blocking=True), 5) / 1e3


def gather_rates(resolver: CudaResolver, engine: float) -> list[dict[str, object]]:
    """The copy kernel alone, on random rows."""
    results: list[dict[str, object]] = []
    for row_bytes in (656, 1152):
        stride = align_up(row_bytes, 128)
        total = 1 << 19
        blocks = total // BLOCK
        host = torch.zeros(total * stride, dtype=torch.uint8, pin_memory=True)
        source = Rows(host, PagedLayout(0, BLOCK * stride, stride, row_bytes, BLOCK, blocks))
        slab = torch.empty(65536 * row_bytes, dtype=torch.uint8, device="cuda")
        destination = Rows(slab, PagedLayout(0, BLOCK * row_bytes, row_bytes, row_bytes, BLOCK, 65536 // BLOCK))
        for count in (128, 512, 2048, 4096, 16384, 65536):
            picks = [torch.randperm(total)[:count].cuda() for _ in range(5)]
            target = torch.arange(count, device="cuda")
            resolver.gather_rows(picks[0], target, source, destination)
            us = time_us(lambda i: resolver.gather_rows(picks[i], target, source, destination), 5)  # noqa: B023
            rate = count * row_bytes / us / 1e3
            results.append(
                {"row_bytes": row_bytes, "rows": count, "us": us, "gb_per_s": rate, "of_engine": rate / engine}
            )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name}/resolver.json")
    parser.add_argument("--only", default="", help="run only scenarios whose name contains this")
    parser.add_argument("--row-bytes", type=int, default=656)
    parser.add_argument("--vllm-lib", default="", metavar="PATH", help="shared library of vLLM's operators, to compare")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/resolver.py needs a CUDA device", file=sys.stderr)
        return 2
    resolver = CudaResolver()
    word = torch.zeros(1, device="cuda")
    empty = time_us(lambda _: word.zero_(), 100)
    print(f"{torch.cuda.get_device_name()}; a launch that does nothing: {empty:.1f} us")
    print(f"{'requests x misses':<32}{'us':>9}{'goal':>8}{'GB/s':>8}")
    lines = []
    chosen = [scenario for scenario in SCENARIOS if options.only in scenario.name]
    for scenario in chosen:
        line = run_scenario(resolver, scenario, options.row_bytes)
        lines.append(line)
        print(f"{scenario.name:<32}{line['us']:>9.1f}{scenario.goal_us:>8.0f}{line['gb_per_s']:>8.1f}", flush=True)
    if not options.only:
        for requests in (1, 32):
            for line in run_trace(resolver, requests, options.row_bytes):
                lines.append(line)
                print(f"{line['name']:<32}{line['us']:>9.1f}{'':>8}{line['miss_rate']:>8.1%} missed", flush=True)
    for scenario in chosen if options.vllm_lib else ():
        if scenario.rows == 1 and not scenario.resident:
            line = run_vllm(options.vllm_lib, resolver, scenario, options.row_bytes)
            lines.append(line)
            print(f"{line['name']:<32}{line['us']:>9.1f}", flush=True)
    engine = copy_engine_rate()
    print(f"copy engine: {engine:.1f} GB/s")
    gathers = gather_rates(resolver, engine)
    for line in gathers:
        print(
            "gather {row_bytes} B x {rows}: {us:.1f} us, {gb_per_s:.1f} GB/s, {of_engine:.1%} of the engine".format(
                **line
            )
        )
    if options.json:
        floors = {"name": "floors", "copy_engine_gb_per_s": engine, "empty_launch_us": empty}
        record("resolver", [floors, *lines, *gathers], options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
