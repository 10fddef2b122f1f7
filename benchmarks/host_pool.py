"""Random rows of one layer out of pinned host pools of several sizes, and what the order of a pool's layers does to it.

    python benchmarks/host_pool.py [--gib 1 8 32] [--layers 12] [--rows 8704] [--json]

Needs a CUDA device, and as much memory that can be pinned as the largest pool. `blocks`: a block holds all layers, as
the product's pool has it, so the rows of one layer lie all over the pool. `layers`: each layer's rows lie together, in
a part of the pool as large as the pool divided by its layers. `gather` is the copy kernel with the device for itself,
`replay` the one that runs beside a forward pass. Both in GB/s of payload, beside the copy engine's rate.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from _record import record
from resolver import BLOCK, Rows, copy_engine_rate, time_us

from hisparse.geometry import PagedLayout, align_up
from hisparse.kernels.contract import MissPlan, ResolverCounters
from hisparse.kernels.cuda.resolver import CudaResolver
from hisparse.worker.cuda.host_memory import PinnedMapping, PinRequest

REPEATS = 12


@dataclass(frozen=True)
class Result:
    """One pool, row size and order of layers. Rates in GB/s."""

    gib: int
    row_bytes: int
    order: str
    gather: float
    replay: float
    of_engine: float


def layers_of(host: torch.Tensor, order: str, row_bytes: int, num_layers: int) -> list[Rows]:
    """The rows of each layer in `host`."""
    stride = align_up(row_bytes, 128)
    page = BLOCK * stride
    blocks = host.numel() // (num_layers * page)
    if order == "blocks":
        return [
            Rows(host, PagedLayout(layer * page, num_layers * page, stride, row_bytes, BLOCK, blocks))
            for layer in range(num_layers)
        ]
    parts = host[: blocks * num_layers * page].split(blocks * page)
    return [Rows(part, PagedLayout(0, page, stride, row_bytes, BLOCK, blocks)) for part in parts]


def measure(host: torch.Tensor, order: str, row_bytes: int, args: argparse.Namespace) -> tuple[float, float]:
    """GB/s of `gather` and `replay`. Every launch reads other rows of another layer."""
    resolver, counters = CudaResolver(), ResolverCounters.allocate("cuda")
    layers = layers_of(host, order, row_bytes, args.layers)
    slab = torch.empty(align_up(args.rows, BLOCK) * row_bytes, dtype=torch.uint8, device="cuda")
    blocks = slab.numel() // (BLOCK * row_bytes)
    destination = Rows(slab, PagedLayout(0, BLOCK * row_bytes, row_bytes, row_bytes, BLOCK, blocks))
    plans = []
    for _ in range(REPEATS):
        plan = MissPlan.allocate(1, args.rows, "cuda")
        plan.count.fill_(args.rows)
        plan.host_row.random_(0, layers[0].layout.num_rows)
        plan.slab_row.copy_(torch.arange(args.rows))
        plans.append(plan)

    def gather(index: int) -> None:
        plan = plans[index]
        resolver.gather_rows(plan.host_row[0], plan.slab_row[0], layers[index % args.layers], destination)

    def replay(index: int) -> None:
        resolver.replay_plan(plans[index], [layers[index % args.layers]], [destination], counters)

    def rate(launch: Callable[[int], None]) -> float:
        launch(0)
        return args.rows * row_bytes / time_us(launch, REPEATS) / 1e3

    return rate(gather), rate(replay)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, nargs="+", default=[1, 8, 32], help="sizes of the pools")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=8704, help="rows of one launch")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/host_pool.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/host_pool.py needs a CUDA device", file=sys.stderr)
        return 2
    engine = copy_engine_rate()
    print(f"copy engine: {engine:.1f} GB/s")
    print(f"{'GiB':>4}{'row bytes':>11}{'order':>8}{'gather':>9}{'replay':>9}{'of engine':>11}")
    results = []
    for gib in args.gib:
        mapping = PinnedMapping(PinRequest(gib << 30, torch.cuda.current_device()))
        for row_bytes in (656, 1152):
            for order in ("blocks", "layers"):
                gather, replay = measure(mapping.storage, order, row_bytes, args)
                results.append(Result(gib, row_bytes, order, gather, replay, gather / engine))
                print(
                    f"{gib:>4}{row_bytes:>11}{order:>8}{gather:>9.1f}{replay:>9.1f}{gather / engine:>11.1%}", flush=True
                )
        mapping.release()
    if args.json:
        record("host_pool", [{"copy_engine_gb_per_s": engine}, *map(asdict, results)], args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
