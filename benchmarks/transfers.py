"""Page transfers between slab and host pool, by pages per step and layers, against one pinned copy in the same process.

    python benchmarks/transfers.py [--pages 1 4 16 64 256] [--layers 1 12 61] [--formats bfloat16 fp8_ds_mla] [--json]

The worker's own path: a command with one transfer is started, its copies go out on the copy stream, and the next step
waits for them on the device. `GB/s` counts payload, from event to event with the queue kept full; `of engine` is its
share of what one large contiguous copy moves the same way. `enqueue` is what the transfer costs the host in the step
that carries it. bfloat16 rows lie alike at both ends and go as contiguous blocks; fp8_ds_mla rows start on lines of 128
bytes on the host and go as strided copies. The bytes that arrive are checked.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from _rates import QUEUE_CYCLES, link_rates
from _record import record

from hisparse.config import CacheConfig, ModelGeometry, plan_cache
from hisparse.errors import BackendError
from hisparse.geometry import BlockGeometry, device_blocks, latent_row
from hisparse.protocol import (
    DeviceBlockId,
    Direction,
    HostBlockId,
    PageCopy,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    TransferId,
)
from hisparse.worker import Backend, CpuBackend, HiSparseWorker

TOPK = 64
"""As small as can be: a hot lease and a staging lease are no part of this, and only take blocks."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    format: str
    layers: int
    pages: int
    direction: str
    bytes: int
    device_us: float
    enqueue_us: float
    gb_per_s: float
    of_engine: float


class Bench:
    """A worker with blocks enough for the largest batch, and copies between random blocks of both ends."""

    def __init__(self, geometry: BlockGeometry, worker: HiSparseWorker) -> None:
        self.geometry = geometry
        self.worker = worker
        self.device = worker.tables.device
        self._ids = itertools.count(1)
        self._steps = itertools.count(1)
        self._random = random.Random(0)

    def pairs(self, num_pages: int) -> tuple[PageCopy, ...]:
        """Distinct blocks of either end, in no order."""
        plan = self.worker.plan
        device = self._random.sample(range(1, plan.num_device_blocks), num_pages)
        host = self._random.sample(range(1, plan.num_host_blocks), num_pages)
        return tuple(PageCopy(DeviceBlockId(d), HostBlockId(h)) for d, h in zip(device, host, strict=True))

    def move(self, direction: Direction, copies: tuple[PageCopy, ...]) -> tuple[float, float]:
        """One transfer in a step, and the step behind it. Returns seconds on the device, and of the host to enqueue."""
        transfer = SparseKVPageTransfer(TransferId(next(self._ids)), direction, copies)
        is_gpu = self.device.type == "cuda"
        if is_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(QUEUE_CYCLES)
            start.record()
        begun = time.perf_counter()
        self.worker.start_step(SparseKVOffloadCommand(next(self._steps), (transfer,)))
        enqueued = time.perf_counter()
        completed = self.worker.finish_step().completed
        self.worker.start_step(SparseKVOffloadCommand(next(self._steps)))
        if is_gpu:
            end.record()
            torch.cuda.synchronize()
        ended = time.perf_counter()
        completed += self.worker.finish_step().completed
        if completed != (transfer.transfer_id,):
            raise SystemExit(f"transfer {transfer.transfer_id} was not seen to complete, but {completed}")
        seconds = start.elapsed_time(end) / 1e3 if is_gpu else ended - begun
        return seconds, enqueued - begun

    def scramble(self) -> None:
        """Other bytes in the slab: what is on the host by then, only a copy can bring back."""
        self.worker.slab.storage.random_(0, 256)

    def check(self, copies: tuple[PageCopy, ...]) -> None:
        """Both ends hold the same bytes. Raises `SystemExit` otherwise."""
        slab = self.worker.slab.pages().rows(torch.uint8)
        host = self.worker.host_pool.pages().rows(torch.uint8)
        for copy in copies:
            on_device, on_host = slab[copy.device_block].cpu(), host[copy.host_block]
            if not torch.equal(on_device, on_host):
                raise SystemExit(f"device block {copy.device_block} and host block {copy.host_block} differ")


@contextmanager
def bench(format_: str, layers: int, max_pages: int, args: argparse.Namespace) -> Iterator[Bench]:
    """A worker that holds the largest batch at both ends. Raises `BackendError` when memory or device is missing."""
    row = latent_row(format_, 512, 64)
    geometry = device_blocks(row, layers, args.block_size)
    leases = 2 * -(-TOPK // args.block_size) + 3
    config = CacheConfig(
        block_size=args.block_size,
        slab_bytes=(max_pages + leases + 1) * geometry.payload_bytes,
        host_pool_bytes=(max_pages + 1) * geometry.payload_bytes,
        hot_rows=TOPK,
        staging_rows=TOPK,
        max_running=1,
        max_tokens=args.block_size,
        indexer_tokens=args.block_size,
    )
    plan = plan_cache(config, ModelGeometry(row, (0,) * layers, TOPK, index_row_bytes=256))
    staging = tuple(DeviceBlockId(1 + block) for block in range(plan.staging_blocks))
    with HiSparseWorker(plan, staging, backend=backend(args.device)) as worker:
        yield Bench(geometry, worker)


def backend(device: str) -> Backend:
    if device == "cpu":
        return CpuBackend()
    from hisparse.worker.cuda import CudaBackend

    return CudaBackend(device)


def measure(format_: str, layers: int, args: argparse.Namespace, engine: dict[Direction, float]) -> list[Result]:
    """All batch sizes of one geometry, both ways: out to the host first, so that what comes back can be checked."""
    counts = [count for count in args.pages if count * layers <= args.max_layer_pages]
    results = []
    if not counts:
        return results
    with bench(format_, layers, max(counts), args) as on_worker:
        for pages in counts:
            copies = on_worker.pairs(pages)
            for direction in (Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE):
                on_worker.scramble()
                times = [on_worker.move(direction, copies) for _ in range(args.repeats + 1)][1:]
                seconds = statistics.median(time[0] for time in times)
                num_bytes = pages * on_worker.geometry.payload_bytes
                results.append(
                    Result(
                        format=format_,
                        layers=layers,
                        pages=pages,
                        direction=direction.value,
                        bytes=num_bytes,
                        device_us=1e6 * seconds,
                        enqueue_us=1e6 * statistics.median(time[1] for time in times),
                        gb_per_s=num_bytes / seconds / 1e9,
                        of_engine=num_bytes / seconds / engine[direction],
                    )
                )
                show(results[-1])
                on_worker.check(copies)
    return results


def show(result: Result) -> None:
    print(
        f"{result.format:<12}{result.layers:>7}{result.pages:>7}  {result.direction:<16}{result.bytes / 1e6:>10.2f}"
        f"{result.device_us:>11.1f}{result.enqueue_us:>11.1f}{result.gb_per_s:>9.2f}{result.of_engine:>11.1%}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 12, 61])
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "fp8_ds_mla"])
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--copy-bytes", type=int, default=1 << 30, help="size of the contiguous copy")
    parser.add_argument("--max-layer-pages", type=int, default=16384, help="leave out larger pages x layers")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/transfers.json")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/transfers.py needs a CUDA device; --device cpu runs small sizes")
        return 2
    to_device, to_host = link_rates(torch.device(args.device), args.copy_bytes)
    engine = {Direction.HOST_TO_DEVICE: to_device, Direction.DEVICE_TO_HOST: to_host}
    print(f"one copy of {args.copy_bytes:,} bytes: {to_device / 1e9:.1f} GB/s to the device, {to_host / 1e9:.1f} back")
    print(
        f"{'format':<12}{'layers':>7}{'pages':>7}  {'direction':<16}{'MB':>10}{'device us':>11}{'enqueue us':>11}"
        f"{'GB/s':>9}{'of engine':>11}"
    )
    results: list[Result] = []
    try:
        for format_, layers in itertools.product(args.formats, args.layers):
            results += measure(format_, layers, args, engine)
    except BackendError as error:
        print(f"benchmarks/transfers.py: {error}")
        return 2
    if args.json:
        rates = {"to_device_gb_per_s": to_device / 1e9, "to_host_gb_per_s": to_host / 1e9}
        record("transfers", [{"run": "copy engine", **rates}, *(asdict(result) for result in results)], args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
