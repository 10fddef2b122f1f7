"""What the canonical layout costs: descriptors written per second, and bytes copied against each rank's own layout.

    python benchmarks/canonical.py [--tp 1 2 4 8] [--pages 32 256] [--heads 8] [--device cpu|cuda] [--json]

"plan" rows: `ns` per fragment to write a transfer's descriptors, and the most bytes that a call holds at one time;
beside it the same by numpy's broadcasting (`broadcast_*`), and a page of the direct layout, which is one fragment.
First 1, 16 and 512 fragments a page, then every family and tp. "layers" rows: one plan for all layers of a model.

"copy" rows: the worker's own copies of one rank's pages into canonical pages and back, against the same pages copied
whole (`direct`), alternating in one process: medians, and the best of the rounds. With `--device cuda`, "fragments"
rows too: GB/s by fragment size for both copy methods, both ways. Descriptors and bytes are checked.
"""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from _rates import seconds_of
from _record import record

from hisparse.errors import BackendError
from hisparse.offload import copy_kernel
from hisparse.offload.copy_choice import CopyMethod
from hisparse.offload.copy_plan import CopyPlan, Descriptors, Direction, Placement
from hisparse.offload.page_copies import CopyDevice, CpuCopies
from hisparse.offload.sharding import Family, KVGeometry, LayerMapping, Run, Topology, contiguous_view, derive_mapping

NUM_FRAGMENTS = (1, 16, 512)
FRAGMENT_BYTES = (256, 512, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20)


class Broadcast:
    """What a plan does, as one would write it first: through temporaries. Its runs are expanded once as well."""

    def __init__(self, plan: CopyPlan) -> None:
        descriptors, nowhere = Descriptors(plan.num_fragments), np.zeros(1, dtype=np.uint64)
        plan.fill(descriptors, 0, nowhere, nowhere)
        self.offsets = (descriptors.sources, descriptors.destinations, descriptors.sizes)

    def fill(self, to: tuple[np.ndarray, ...], sources: np.ndarray, destinations: np.ndarray) -> None:
        """`to`: sources, destinations and sizes, uint64, as long as there are copies."""
        to[0][:] = (sources[:, None] + self.offsets[0][None, :]).ravel()
        to[1][:] = (destinations[:, None] + self.offsets[1][None, :]).ravel()
        to[2][:] = np.tile(self.offsets[2], len(sources))


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One line of the first table. Nanoseconds per fragment, bytes per call."""

    run: str
    form: str
    tp: int
    pages: int
    fragments: int
    ns: float
    transient_bytes: int
    broadcast_ns: float
    broadcast_transient_bytes: int
    direct_page_ns: float


def measure_plan(run: str, form: str, tp: int, plan: CopyPlan, num_pages: int) -> PlanRow:
    """Fill descriptors for `num_pages` pages in the three ways, in turns."""
    descriptors = Descriptors(num_pages * plan.num_fragments)
    whole = CopyPlan(LayerMapping(0, plan.total_bytes, plan.total_bytes, (Run(0, 0, plan.total_bytes, 1, 0, 0),), 1, 0))
    generator = np.random.default_rng(0)
    sources, destinations = generator.permutation(2 * num_pages).reshape(2, -1).astype(np.uint64) << np.uint64(24)
    broadcast, written = Broadcast(plan), tuple(np.zeros((3, descriptors.capacity), dtype=np.uint64))
    plan.fill(descriptors, 0, sources, destinations)
    broadcast.fill(written, sources, destinations)
    check_same((descriptors.sources, descriptors.destinations, descriptors.sizes), written)
    direct = Descriptors(num_pages)
    ways = (
        lambda: plan.fill(descriptors, 0, sources, destinations),
        lambda: broadcast.fill(written, sources, destinations),
        lambda: whole.fill(direct, 0, sources, destinations),
    )
    seconds = in_turns(ways)
    count = num_pages * plan.num_fragments
    return PlanRow(
        run=run,
        form=form,
        tp=tp,
        pages=num_pages,
        fragments=plan.num_fragments,
        ns=1e9 * seconds[0] / count,
        transient_bytes=transient_bytes(ways[0]),
        broadcast_ns=1e9 * seconds[1] / count,
        broadcast_transient_bytes=transient_bytes(ways[1]),
        direct_page_ns=1e9 * seconds[2] / num_pages,
    )


def check_same(descriptors: tuple[np.ndarray, ...], others: tuple[np.ndarray, ...]) -> None:
    """Both describe the same copies, in whatever order. Raises `SystemExit` otherwise."""
    first, second = (
        sorted(zip(*(array.tolist() for array in arrays), strict=True)) for arrays in (descriptors, others)
    )
    if first != second:
        raise SystemExit(f"a plan describes {len(first)} copies other than those of its runs")


def in_turns(ways: tuple[Callable[[], object], ...], rounds: int = 15, round_s: float = 2e-3) -> list[float]:
    """Least seconds a call of each, in turns of `round_s` or more: what others do on this core only adds."""
    calls = []
    for way in ways:
        way()
        begun = time.perf_counter()
        way()
        calls.append(max(1, int(round_s / (time.perf_counter() - begun))))
    best = [float("inf")] * len(ways)
    for _ in range(rounds):
        for index, way in enumerate(ways):
            begun = time.perf_counter()
            for _ in range(calls[index]):
                way()
            best[index] = min(best[index], (time.perf_counter() - begun) / calls[index])
    return best


def transient_bytes(call: Callable[[], object]) -> int:
    """The most that one call has allocated at one time, numpy's own buffers and Python's objects included."""
    tracemalloc.start()
    try:
        call()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def forms(args: argparse.Namespace) -> Iterator[tuple[str, int, LayerMapping]]:
    """Every family at every tp: rank 0's mapping."""
    for family in Family:
        latent = family is Family.LATENT
        geometry = KVGeometry(family, 1 if latent else args.heads, 656 if latent else args.head_bytes, args.block_size)
        for tp in args.tp:
            topology = Topology(tp)
            yield family.value, tp, derive_mapping(contiguous_view(geometry, topology, 1, 2), geometry, topology)


def plan_rows(args: argparse.Namespace) -> Iterator[PlanRow]:
    """1, 16 and 512 fragments a page; every form; every form with all layers in one plan."""
    for num_pages in args.pages:
        for count in NUM_FRAGMENTS:
            strided = LayerMapping(0, 256 * count, 512 * count, (Run(0, 0, 256, count, 256, 512),), 1, 0)
            yield measure_plan("plan", "strided", 2, CopyPlan(strided), num_pages)
        for form, tp, mapping in forms(args):
            yield measure_plan("plan", form, tp, CopyPlan(mapping), num_pages)
        for form, tp, mapping in forms(args):
            at = [
                Placement(layer * mapping.local_page_bytes, layer * mapping.canonical_page_bytes)
                for layer in range(args.layers)
            ]
            plan = CopyPlan.of_layers([mapping] * args.layers, at, Direction.STORE)
            yield measure_plan("layers", form, tp, plan, num_pages)


@dataclass(frozen=True, slots=True)
class CopyRow:
    """One line of the second table. GB/s of one rank's bytes."""

    run: str
    form: str
    tp: int
    fragment_bytes: int
    method: str
    direction: str
    bytes: int
    gb_per_s: float
    direct_gb_per_s: float
    of_direct: float
    best_gb_per_s: float


class Pages:
    """Pages of one rank, and canonical pages in (pinned) memory of the host, in no order."""

    def __init__(self, mapping: LayerMapping, num_bytes: int, device: torch.device) -> None:
        count = max(2, num_bytes // mapping.local_page_bytes)
        self.num_bytes = count * mapping.local_page_bytes
        pinned = device.type == "cuda"
        self.local = torch.randint(0, 256, (count, mapping.local_page_bytes), dtype=torch.uint8).to(device)
        self.canonical = torch.zeros((count, mapping.canonical_page_bytes), dtype=torch.uint8, pin_memory=pinned)
        self.at_worker, self.in_region = (
            _addresses(pages, seed) for seed, pages in enumerate((self.local, self.canonical))
        )

    def bind(self, copies: CopyDevice, mapping: LayerMapping) -> Callable[[bool], None]:
        """What copies all pages, towards the region or back, and waits."""
        copier = copies.bind(mapping, 16)

        def copy(to_region: bool) -> None:
            copies.begin()
            copier.copy(self.at_worker.copy(), self.in_region.copy(), to_region)
            copies.end().wait()

        return copy

    def check(self, copy: Callable[[bool], None]) -> None:
        """What was stored comes back. Raises `SystemExit` otherwise."""
        before = self.local.clone()
        self.canonical.fill_(0)
        copy(True)
        self.local.fill_(0)
        copy(False)
        if not torch.equal(self.local, before):
            raise SystemExit("pages came back with other bytes than were stored")


def _addresses(pages: torch.Tensor, seed: int) -> np.ndarray:
    order = np.random.default_rng(seed).permutation(len(pages)).astype(np.uint64)
    return order * np.uint64(pages.stride(0)) + np.uint64(pages.data_ptr())


def measure_copy(run: str, form: str, tp: int, mapping: LayerMapping, args: argparse.Namespace) -> list[CopyRow]:
    """Canonical and direct, both ways."""
    device = torch.device(args.device)
    copies = copy_device(device)
    pages = Pages(mapping, args.copy_bytes, device)
    size = mapping.local_page_bytes
    whole = LayerMapping(0, size, mapping.canonical_page_bytes, (Run(0, 0, size, 1, 0, 0),), 1, 0)
    ways = {"canonical": pages.bind(copies, mapping), "direct": pages.bind(copies, whole)}
    for way in ways.values():
        pages.check(way)
    rows = []
    for to_region in (True, False):
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                seconds = seconds_of(lambda w=way, d=to_region: w(d), device, repeats=1)  # type: ignore[misc]
                rates[name].append(pages.num_bytes / seconds / 1e9)
        canonical, direct = (statistics.median(rates[name]) for name in ways)
        rows.append(
            CopyRow(
                run=run,
                form=form,
                tp=tp,
                fragment_bytes=int(mapping.pieces().sizes.min()),
                method="chosen",
                direction="store" if to_region else "load",
                bytes=pages.num_bytes,
                gb_per_s=canonical,
                direct_gb_per_s=direct,
                of_direct=canonical / direct,
                best_gb_per_s=max(rates["canonical"]),
            )
        )
    return rows


def copy_device(device: torch.device) -> CopyDevice:
    """Where the pages are. Raises `BackendError` when a GPU's part is missing."""
    if device.type == "cpu":
        return CpuCopies()
    from hisparse.offload.cuda_copies import CudaCopies

    return CudaCopies(device)


def copy_rows(args: argparse.Namespace) -> Iterator[CopyRow]:
    """Every form and tp; on a GPU every fragment size by both methods as well."""
    for form, tp, mapping in forms(args):
        yield from measure_copy("copy", form, tp, mapping, args)
    if args.device != "cuda":
        return
    for size in FRAGMENT_BYTES:
        count = max(1, (1 << 20) // size)
        mapping = LayerMapping(0, size * count, 2 * size * count, (Run(0, 0, size, count, size, 2 * size),), 1, 0)
        yield from measure_copy("fragments", "strided", 2, mapping, args)
        for method in CopyMethod:
            with mock.patch.object(copy_kernel, "choose_method", return_value=method):
                for row in measure_copy("fragments", "strided", 2, mapping, args):
                    yield replace(row, method=method.value)


def show_plan(row: PlanRow) -> None:
    print(
        f"{row.run:<8}{row.form:<12}{row.tp:>3}{row.pages:>6}{row.fragments:>7}{row.ns:>9.2f}{row.transient_bytes:>8}"
        f"{row.broadcast_ns:>12.2f}{row.broadcast_transient_bytes:>10}{row.direct_page_ns:>12.1f}",
        flush=True,
    )


def show_copy(row: CopyRow) -> None:
    print(
        f"{row.run:<10}{row.form:<12}{row.tp:>3}{row.fragment_bytes:>9}  {row.method:<7}{row.direction:<6}"
        f"{row.gb_per_s:>8.2f}{row.direct_gb_per_s:>8.2f}{row.of_direct:>10.1%}{row.best_gb_per_s:>7.2f}",
        flush=True,
    )


def main() -> int:
    """Parse the options, measure, print both tables and write them down if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--pages", type=int, nargs="+", default=[32, 256], help="pages of one transfer")
    parser.add_argument("--heads", type=int, default=8, help="KV heads of all ranks together")
    parser.add_argument("--head-bytes", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32, help="layers of a plan of several")
    parser.add_argument("--copy-bytes", type=int, help="of one rank, in each copy (32 MiB, or 256 MiB on a GPU)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--copies-only", action="store_true", help="leave out the plans, which need no device")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/canonical(_cuda).json")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/canonical.py --device cuda needs a CUDA device")
        return 2
    args.copy_bytes = args.copy_bytes or (256 << 20 if args.device == "cuda" else 32 << 20)
    torch.manual_seed(0)
    rows: list[Any] = []
    print("run     form         tp pages  frags       ns  bytes  broadcast     bytes direct/page")
    for plan_row in () if args.copies_only else plan_rows(args):
        show_plan(plan_row)
        rows.append(asdict(plan_row))
    print("\nrun       form         tp fragment  method way       GB/s  direct of direct   best")
    try:
        for copy_row in copy_rows(args):
            show_copy(copy_row)
            rows.append(asdict(copy_row))
    except BackendError as error:
        print(f"benchmarks/canonical.py: {error}")
        return 2
    if args.json:
        record("canonical" if args.device == "cpu" else "canonical_cuda", rows, args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
