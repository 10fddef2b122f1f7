"""Decode throughput of one GPU at long contexts: HiSparse against everything resident and requests queueing.

    python benchmarks/serve.py [--concurrency 1 2 4 8 16 32 64] [--context 32768] [--layers 12] [--steps 64] [--json]

The model, and why its selections are as local as a trained one's, is told in `_synthetic_model.py`: latents of 1152
bytes, top-k 2048, one leader in four layers. Prompts are filled in without forward passes (`_server.py`); decode steps
are the engine's own, sampling and scheduling included. Four runs:

1. HiSparse in the slab of `--device-kv`.
2. All resident in the same slab: a request starts once it fits whole; the others queue.
3. All resident in a slab that holds every request which run 1 had running: the step rate that no offload can beat.
4. HiSparse in a slab that holds everything, against all resident, in turn: what it costs where it does nothing.

All resident resolves by a bare look-up in the block table (`_table_lookup.py`). The bound of a concurrency is the least
of three rates: requests that fit at the step rate of run 3; the link's rate over the bytes that misses move per token;
the memory's rate over the bytes that a step cannot but read (weights, index keys, selected rows).
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from _rates import link_rates, memory_rate
from _record import record
from _server import SETTLING_STEPS, Decoding, Server, Stages
from _synthetic_model import ModelShape, synthetic_model
from _table_lookup import look_up_only

from hisparse.config import WriteBack, parse_size
from hisparse.engine import EngineConfig, LoadedModel
from hisparse.errors import BackendError, CapacityError, InputError
from hisparse.geometry import ceil_div

FITS_UP_TO = 8
GOAL_SPEEDUP, GOAL_OF_BOUND, GOAL_OVERHEAD = 3.0, 0.85, 0.01


class Clock:
    """Progress lines, and how much of the time that was allowed is left."""

    def __init__(self, seconds: float) -> None:
        self._start = time.monotonic()
        self._end = self._start + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Floors:
    """Bytes per second that the machine moves at best, and what a step of the model reads at least."""

    link: float
    memory: float
    weight_bytes: int
    request_bytes: int

    def bound(self, decoding: Decoding, resident_step_s: float | None) -> dict[str, float | None]:
        """The three rates in tokens per second for a batch; None where there is none."""
        running, link_bytes = decoding.running, decoding.link_bytes_per_token
        return {
            "step": running / resident_step_s if resident_step_s else None,
            "link": self.link / link_bytes if link_bytes else None,
            "memory": self.memory * running / (self.weight_bytes + running * self.request_bytes),
        }


class Benchmark:
    """The options, and the runs that they ask for. A run that the time does not allow is left out, and said to be."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.clock = Clock(args.seconds)
        self.device = torch.device(args.device)
        self.counts: list[int] = sorted(set(args.concurrency))
        self.shape = ModelShape(
            layers=args.layers,
            context=args.context,
            topk=args.topk,
            hidden=args.hidden,
            heads=args.heads,
            index_heads=args.index_heads,
            max_rows=self.counts[-1],
            trace_steps=2 * (args.warmup + args.steps) + SETTLING_STEPS,
        )
        self.config = EngineConfig(
            max_tokens=args.context,
            slab_bytes=parse_size(args.device_kv, "device KV budget"),
            block_size=args.block_size,
            hot_rows=args.hot_rows,
            max_running=self.counts[-1],
            chunk_tokens=args.chunk,
            write_back=WriteBack.PRESSURE,
        )

    def model(self) -> LoadedModel:
        """A model of its own for every engine: two at once cannot share one. The same weights and trace each time."""
        return synthetic_model(self.shape, self.device)

    @contextmanager
    def server(self, config: EngineConfig, stages: int) -> Iterator[Server]:
        server = Server(self.model(), config, Stages(stages, self.args.warmup, self.args.steps))
        if config.write_back is WriteBack.NEVER:
            look_up_only(server.engine.worker)
        try:
            yield server
        finally:
            server.close()
            del server
            # The next run may need the memory of this one's model, graphs and slab.
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def sweep(self, name: str, config: EngineConfig, counts: Sequence[int]) -> dict[int, Decoding]:
        """Decoding at each of `counts` outstanding requests, ascending, in one engine."""
        found: dict[int, Decoding] = {}
        with self.server(config, len(counts)) as server:
            self.clock.say(f"{name}: slab of {server.engine.plan.num_device_blocks} blocks")
            for count in counts:
                if self.clock.is_over:
                    self.clock.say(f"{name}: no time for {count} requests and more (--seconds)")
                    break
                server.grow_to(count)
                found[count] = decoding = server.measure()
                self.clock.say(
                    f"{name}: {count} requests, {decoding.running} run, {decoding.step_ms:.2f} ms a step, "
                    f"{decoding.tokens_per_s:,.0f} tokens/s, {decoding.miss_rate:.1%} missed"
                )
        return found

    def hisparse(self, loaded: LoadedModel) -> dict[int, Decoding]:
        """HiSparse, with a host pool for as many requests as can run at once on their hot leases alone."""
        plan = self.config.plan(loaded.geometry)
        fitting = min(self.counts[-1], plan.usable_device_blocks // plan.host_backed_blocks)
        # One request more than run at once: whoever comes next is admitted against what the host has free.
        pages = (fitting + 1) * ceil_div(self.args.context, self.args.block_size) + 2
        return self.sweep(
            "hisparse", replace(self.config, host_pool_bytes=pages * plan.host.payload_bytes), self.counts
        )

    def resident(self) -> dict[int, Decoding]:
        """All resident in the same slab; nothing where that does not hold even one request."""
        return self._where_it_fits("all resident", replace(self.config, write_back=WriteBack.NEVER), self.counts)

    def unbounded(self, counts: Sequence[int]) -> dict[int, Decoding]:
        """All resident in as much memory as it takes; nothing where the device has not so much."""
        config = replace(self.config, write_back=WriteBack.NEVER, slab_bytes=None)
        return self._where_it_fits("all resident, room for all", config, counts)

    def _where_it_fits(self, name: str, config: EngineConfig, counts: Sequence[int]) -> dict[int, Decoding]:
        try:
            return self.sweep(name, config, counts)
        except (CapacityError, BackendError, torch.OutOfMemoryError) as error:
            self.clock.say(f"{name}: left out: {error}")
            return {}

    def overheads(self) -> list[dict[str, Any]]:
        """Run 4, one row per count: median step of both and how much longer HiSparse's is."""
        counts = [count for count in self.counts if count <= FITS_UP_TO]
        if not counts:
            return []
        spilling = replace(self.config, slab_bytes=None, max_running=counts[-1])
        rows: list[dict[str, Any]] = []
        stages = self.args.rounds * len(counts)
        resident = replace(spilling, write_back=WriteBack.NEVER)
        with self.server(spilling, stages) as ours, self.server(resident, stages) as theirs:
            for count in counts:
                if self.clock.is_over:
                    self.clock.say(f"everything fits: no time for {count} requests and more (--seconds)")
                    break
                ours.grow_to(count)
                theirs.grow_to(count)
                # In turn, so that what else the machine does falls on both alike.
                pairs = [(ours.measure(), theirs.measure()) for _ in range(self.args.rounds)]
                mine = statistics.median(pair[0].step_ms for pair in pairs)
                other = statistics.median(pair[1].step_ms for pair in pairs)
                more = mine / other - 1
                rows.append({"run": "fits", "concurrency": count, "ms": mine, "resident_ms": other, "overhead": more})
                self.clock.say(f"everything fits: {count} requests, {mine:.3f} ms against {other:.3f} ({more:+.2%})")
        return rows

    def floors(self, loaded: LoadedModel) -> Floors:
        num_bytes = parse_size(self.args.copy_bytes, "copy size")
        model = loaded.geometry
        keys = len(model.leaders) * self.args.context * model.index_row_bytes
        rows = model.num_layers * min(self.args.topk, self.args.context) * model.row.row_bytes
        weights = sum(weight.numel() * weight.element_size() for weight in loaded.model.parameters())
        return Floors(
            link=link_rates(self.device, num_bytes)[0],
            memory=memory_rate(self.device, num_bytes),
            weight_bytes=weights,
            request_bytes=keys + rows,
        )


def decoding_json(decoding: Decoding) -> dict[str, Any]:
    names = ("running", "waiting", "tokens_per_s", "step_ms", "step_ms_worst", "miss_rate", "link_bytes_per_token")
    more = ("device_to_host_bytes", "preemptions", "pages_host")
    return {name: getattr(decoding, name) for name in (*names, *more)}


def compare(
    ours: dict[int, Decoding], theirs: dict[int, Decoding], unbounded: dict[int, Decoding], floors: Floors
) -> list[dict[str, Any]]:
    """One row per concurrency that was measured: both sides, the bound and its three terms."""
    rows = []
    for count, decoding in ours.items():
        step_of = unbounded.get(decoding.running)
        bound = floors.bound(decoding, step_of.seconds * decoding.running / step_of.tokens if step_of else None)
        rates = [rate for rate in bound.values() if rate is not None]
        resident = theirs.get(count)
        rows.append(
            {
                "run": "serve",
                "concurrency": count,
                "hisparse": decoding_json(decoding),
                "all_resident": decoding_json(resident) if resident else None,
                "speedup": decoding.tokens_per_s / resident.tokens_per_s if resident else None,
                "bound_tokens_per_s": bound,
                "of_bound": decoding.tokens_per_s / min(rates),
            }
        )
    return rows


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def print_table(rows: Sequence[dict[str, Any]], overheads: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'':>11} {'HiSparse':^38} {'all resident':^25} {'':>7} {'bound, tokens/s':^30} {'of':>7}")
    print(
        f"{'concurrency':>11} {'running':>8} {'ms/token':>9} {'tokens/s':>10} {'missed':>8} {'running':>7} "
        f"{'ms/token':>9} {'tokens/s':>8} {'ratio':>6} {'step':>9} {'link':>10} {'memory':>9} {'bound':>7}"
    )
    for row in rows:
        mine, other, bound = row["hisparse"], row["all_resident"] or {}, row["bound_tokens_per_s"]
        print(
            f"{row['concurrency']:>11} {mine['running']:>8} {mine['step_ms']:>9.3f} {mine['tokens_per_s']:>10,.0f} "
            f"{mine['miss_rate']:>8.1%} {_cell(other.get('running'), 'd'):>7} {_cell(other.get('step_ms'), '.3f'):>9} "
            f"{_cell(other.get('tokens_per_s'), ',.0f'):>8} {_cell(row['speedup'], '.2f'):>6} "
            f"{_cell(bound['step'], ',.0f'):>9} {_cell(bound['link'], ',.0f'):>10} {_cell(bound['memory'], ',.0f'):>9} "
            f"{row['of_bound']:>7.1%}"
        )
    for row in overheads:
        print(
            f"everything fits, {row['concurrency']} requests: {row['ms']:.3f} ms a token, all resident "
            f"{row['resident_ms']:.3f}: {row['overhead']:+.2%} (goal at most {GOAL_OVERHEAD:+.0%})"
        )
    if rows:
        last = rows[-1]
        print(
            f"at {last['concurrency']} requests: {_cell(last['speedup'], '.2f')} times all resident (goal "
            f"{GOAL_SPEEDUP:g}), {last['of_bound']:.1%} of the bound (goal {GOAL_OF_BOUND:.0%})"
        )


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=32768, help="tokens of every request, prompt and output")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--index-heads", type=int, default=32)
    parser.add_argument("--device-kv", default="2GiB", help="the slab of resident, hot and staging rows")
    parser.add_argument("--hot-rows", type=int, default=None, help="of each request (default 2 x top-k)")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=8192, help="prompt tokens that are filled in at once")
    parser.add_argument("--warmup", type=int, default=24, help="decode steps before the measured ones")
    parser.add_argument("--steps", type=int, default=64, help="measured decode steps")
    parser.add_argument("--rounds", type=int, default=5, help="turns of the comparison where everything fits")
    parser.add_argument("--copy-bytes", default="1GiB", help="size of the copies that find the machine's rates")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=150, help="start nothing new after so long")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/serve.json")
    return parser


def main() -> int:
    args = options().parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/serve.py needs a CUDA device; --device cpu runs small sizes")
        return 2
    try:
        benchmark = Benchmark(args)
        loaded = benchmark.model()
        floors = benchmark.floors(loaded)
        benchmark.clock.say(f"link {floors.link / 1e9:.1f} GB/s, memory {floors.memory / 1e9:,.0f} GB/s")
        ours = benchmark.hisparse(loaded)
    except (InputError, BackendError) as error:
        print(f"benchmarks/serve.py: {error}")
        return 2
    theirs = benchmark.resident()
    unbounded = benchmark.unbounded(sorted({decoding.running for decoding in ours.values()}))
    rows = compare(ours, theirs, unbounded, floors)
    overheads = benchmark.overheads()
    print_table(rows, overheads)
    if args.json:
        first = {
            "run": "floors",
            "link_gb_per_s": floors.link / 1e9,
            "memory_gb_per_s": floors.memory / 1e9,
            "weight_bytes": floors.weight_bytes,
            "request_bytes": floors.request_bytes,
        }
        record("serve", [first, *rows, *overheads], args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
