"""How many selected rows per second the reference resolver serves, plan and copies included.

    python benchmarks/reference.py [--batches 1 8 32 128] [--miss-rates 0 0.05 1] [--steps 8] [--threads 1] [--json]

Decode: one query row per request, every page on host, hot leases warm. A step keeps the last step's selection but for
`miss rate` of it, which it has not selected for longer than the hot lease remembers, so each step misses exactly that.
A rate of 1 is the step after admission: nothing is hot. One leader layer; misses and unreachable rows are checked.

One thread by default: a step is many short operators with a barrier after each, and where other processes want the
same cores, waiting there makes two threads many times slower than one.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from _record import record

from hisparse.geometry import PagedLayout, RowFormat, device_blocks, host_blocks
from hisparse.kernels.contract import BlockTables, HotState, MissPlan, ResolverCounters, Selection
from hisparse.kernels.reference import ReferenceResolver


@dataclass(frozen=True, slots=True)
class Rows:
    """One layer's rows in an allocation."""

    storage: torch.Tensor
    layout: PagedLayout


class Decode:
    """A batch of requests whose KV is on host, and the steps that they take."""

    def __init__(self, batch: int, args: argparse.Namespace) -> None:
        self.batch, self.topk = batch, args.topk
        block_size = args.block_size
        pages, hot_blocks = -(-args.context // block_size), -(-args.hot_rows // block_size)
        row = RowFormat("bytes", args.row_bytes)
        # All requests read the same host pages: a host pool of 128 contexts would measure the machine's memory size.
        self.source = self._allocate(host_blocks(row, 1, block_size), 1 + pages)
        self.destination = self._allocate(device_blocks(row, 1, block_size), 1 + batch * hot_blocks)
        host = 1 + torch.randperm(pages, dtype=torch.int32).expand(batch, pages)
        hot = 1 + torch.randperm(batch * hot_blocks, dtype=torch.int32).reshape(batch, hot_blocks)
        self.tables = BlockTables(torch.zeros(batch, pages, dtype=torch.int32), host.contiguous(), hot)
        self.state = HotState.allocate(batch, args.hot_rows, args.context, "cpu")
        self.plan = MissPlan.allocate(batch, args.hot_rows, "cpu")
        self.counters = ResolverCounters.allocate("cpu")
        self.order = torch.stack([torch.randperm(args.context, dtype=torch.int32) for _ in range(batch)])

    def _allocate(self, geometry: Any, num_blocks: int) -> Rows:
        storage = torch.randint(0, 256, (num_blocks * geometry.block_stride,), dtype=torch.uint8)
        return Rows(storage, geometry.layer(0, num_blocks))

    def selections(self, num_new: int) -> Iterator[Selection]:
        """A window that slides over a random order of the context, so that what enters was never in it lately."""
        row_slot = torch.arange(self.batch, dtype=torch.int32)
        step = 0
        while True:
            columns = (step * num_new + torch.arange(self.topk)) % self.order.shape[1]
            yield Selection(self.order[:, columns].contiguous(), row_slot)
            step += 1

    def resolve(self, selection: Selection) -> float:
        """One timed call, in seconds."""
        start = time.perf_counter()
        ReferenceResolver().resolve(
            selection, self.tables, self.state, self.source, self.destination, self.plan, self.counters
        )
        return time.perf_counter() - start


def measure(batch: int, miss_rate: float, args: argparse.Namespace) -> dict[str, float]:
    """Median step of one batch at one miss rate."""
    decode = Decode(batch, args)
    num_new = round(miss_rate * args.topk)
    selections = decode.selections(num_new)
    for _ in range(2):
        decode.resolve(next(selections))
    before = decode.counters.read()
    seconds = [decode.resolve(next(selections)) for _ in range(args.steps)]
    added = {name: total - before[name] for name, total in decode.counters.read().items()}
    expected = args.steps * batch * num_new
    if added["miss"] != expected or added["unreachable"]:
        raise SystemExit(f"the trace is wrong: {added} where {expected} misses were meant")
    median = statistics.median(seconds)
    return {
        "batch": batch,
        "miss_rate": miss_rate,
        "misses_per_step": expected // args.steps,
        "step_ms": 1e3 * median,
        "fastest_step_ms": 1e3 * min(seconds),
        "rows_per_s": batch * args.topk / median,
        "copied_gb_per_s": batch * num_new * args.row_bytes / median / 1e9,
    }


def main() -> None:
    """Parse the options, measure, print a table and write it down if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--miss-rates", type=float, nargs="+", default=[0.0, 0.05, 1.0])
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--hot-rows", type=int, default=4096)
    parser.add_argument("--row-bytes", type=int, default=656)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="cores that torch may use")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/reference.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    print(f"{'batch':>6} {'miss rate':>10} {'misses':>8} {'ms/step':>9} {'rows/s':>12} {'GB/s copied':>12}")
    rows = []
    for batch in args.batches:
        for miss_rate in args.miss_rates:
            row = measure(batch, miss_rate, args)
            rows.append(row)
            print(
                f"{batch:>6} {miss_rate:>10.2f} {row['misses_per_step']:>8} {row['step_ms']:>9.2f} "
                f"{row['rows_per_s']:>12,.0f} {row['copied_gb_per_s']:>12.2f}",
                flush=True,
            )
    if args.json:
        record("reference", rows, args)


if __name__ == "__main__":
    main()
