"""Decode attention over resolved rows, by kernel, format and number of queries, beside what the GPU cannot beat.

    python benchmarks/attention.py [--queries 1 8 64] [--formats bfloat16 fp8_ds_mla] [--variants] [--json]

Rows are random ones of a slab that is far larger than the GPU's cache, and every launch of a series reads others. A
series is one CUDA graph; a launch's time is the graph's, divided by their number. `GB/s` counts each selected row once,
`TFLOP/s` the two products; `of floor` is how close the time comes to the larger of the two times that the GPU cannot
beat. `error` is the norm of the difference from float64 over the norm of the result. `--variants` adds other launch
parameters of the Triton kernel; libraries are timed where they are installed and serve the GPU.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from _record import record

from hisparse.geometry import device_blocks, latent_row
from hisparse.kernels import fp8_rows
from hisparse.kernels.attention_libraries import AttentionNeed, FlashMla, flashmla_misfit, flashmla_missing
from hisparse.kernels.row_elements import RowElements
from hisparse.worker.views import PagedCacheView

LORA, ROPE = 512, 64
LAYERS = 4
BLOCK_SIZE = 64
SERIES_BYTES = 400 << 20
"""What the launches of a series read at least: several times the cache of an H200 (50 MB)."""

MEMORY_BYTES_PER_S = 4.8e12
MATRIX_FLOPS = 790e12
"""Of an H200: what its memory and (dense bfloat16, as measured) its matrix units do in a second."""

SCALING = 0.1
Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    kernel: str
    format: str
    queries: int
    us: float
    gb_per_s: float
    tflops: float
    of_floor: float
    floor: str
    error: float
    same_bits_alone: bool


class Bench:
    """A slab of random rows of one format, and selections of them."""

    def __init__(self, format_: str, args: argparse.Namespace) -> None:
        row = latent_row(format_, LORA, ROPE)
        geometry = device_blocks(row, LAYERS, BLOCK_SIZE)
        self.format = format_
        self.args = args
        self.num_blocks = args.slab_bytes // geometry.block_stride
        storage = torch.zeros(self.num_blocks * geometry.block_stride, dtype=torch.uint8, device=args.device)
        self.view = PagedCacheView.over(storage, geometry.layer(1, self.num_blocks))
        dtype = torch.uint8 if format_ == "fp8_ds_mla" else torch.bfloat16
        self.elements = RowElements(dtype, LORA, ROPE)
        target = self.view.rows(dtype)
        for start in range(0, self.num_blocks, 1024):
            part = target[start : start + 1024]
            values = torch.randn(part.shape[0] * BLOCK_SIZE, LORA + ROPE, device=args.device)
            part.copy_((fp8_rows.pack_rows(values) if dtype is torch.uint8 else values.to(dtype)).view(part.shape))

    def select(self, num_queries: int) -> torch.Tensor:
        """Random rows beyond the null block, int32 `[num_queries, topk]`; the first query has a tenth less."""
        shape = (num_queries, self.args.topk)
        rows = torch.randint(BLOCK_SIZE, self.num_blocks * BLOCK_SIZE, shape, device=self.args.device).int()
        rows[0, self.args.topk * 9 // 10 :] = -1
        return rows

    def expected(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Attention in float64, `[t, H, LORA]`."""
        stored = self.view.read(rows, self.elements.dtype)
        values = fp8_rows.unpack_rows(stored.flatten(0, 1)).view(*rows.shape, -1) if self.elements.is_packed else stored
        values = values.double().masked_fill_((rows < 0).unsqueeze(-1), 0.0)
        scores = torch.bmm(query.double(), values.transpose(1, 2)) * SCALING
        weights = scores.masked_fill((rows < 0).unsqueeze(1), -torch.inf).softmax(-1)
        return torch.bmm(weights, values[..., :LORA])

    def measure(self, name: str, attend: Attend, num_queries: int) -> Result:
        shape = (num_queries, self.args.heads, LORA + ROPE)
        query = torch.randn(shape, device=self.args.device).bfloat16()
        read_bytes = num_queries * self.args.topk * self.view.layout.row_bytes
        series = [self.select(num_queries) for _ in range(max(2, min(128, SERIES_BYTES // read_bytes)))]
        checked = min(num_queries, 4)
        found = attend(query, series[0])
        expected = self.expected(query[:checked], series[0][:checked])
        error = float((found[:checked].double() - expected).norm() / expected.norm())
        alone = attend(query[:1], series[0][:1])
        seconds = self._time(lambda rows: attend(query, rows), series)
        flops = 2.0 * num_queries * self.args.heads * self.args.topk * (2 * LORA + ROPE)
        floors = {"memory": read_bytes / MEMORY_BYTES_PER_S, "matrix": flops / MATRIX_FLOPS}
        floor = max(floors, key=floors.__getitem__)
        return Result(
            kernel=name,
            format=self.format,
            queries=num_queries,
            us=1e6 * seconds,
            gb_per_s=read_bytes / seconds / 1e9,
            tflops=flops / seconds / 1e12,
            of_floor=floors[floor] / seconds,
            floor=floor,
            error=error,
            same_bits_alone=torch.equal(alone, found[:1]),
        )

    def _time(self, launch: Callable[[torch.Tensor], torch.Tensor], series: list[torch.Tensor]) -> float:
        """Median seconds of one launch of the series."""
        launch(series[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for rows in series:
                launch(rows)
        graph.replay()
        times = []
        for _ in range(self.args.repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / len(series))
        return statistics.median(times)


def kernels(bench: Bench, args: argparse.Namespace) -> Iterator[tuple[str, Attend]]:
    """What is timed: the Triton kernel, other parameters of it, and libraries."""
    from hisparse.kernels.triton_ops.attention import attend_rows
    from hisparse.kernels.triton_ops.attention_launch import Launch

    def triton_kernel(launch: "Launch | None") -> Attend:
        return lambda query, rows: attend_rows(query, rows, bench.view, bench.elements, SCALING, launch)

    yield "triton", triton_kernel(None)
    if args.variants:
        for launch in (
            Launch(64, 32, 256, 8, 5),
            Launch(64, 32, 512, 8, 5),
            Launch(64, 64, 1024, 8, 2),
        ):
            parts = f"h{launch.heads} tile{launch.tile} chunk{launch.chunk_rows} w{launch.warps} s{launch.stages}"
            yield f"triton {parts}", triton_kernel(launch)
    capability = torch.cuda.get_device_capability()
    need = AttentionNeed(bench.elements, bench.view.layout, args.heads, args.topk, capability, max(args.queries))
    obstacle = flashmla_misfit(need) or flashmla_missing()
    if obstacle is None:
        yield "flashmla", FlashMla(bench.view, bench.elements, SCALING)
    else:
        print(f"FlashMLA is left out: {obstacle}")


def show(result: Result) -> None:
    print(
        f"{result.kernel:<34}{result.format:<12}{result.queries:>7}{result.us:>9.1f}{result.gb_per_s:>8.0f}"
        f"{result.tflops:>9.1f}{result.of_floor:>9.1%} {result.floor:<8}{result.error:>9.1e}"
        f"  {'yes' if result.same_bits_alone else 'no'}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "fp8_ds_mla"], choices=["bfloat16", "fp8_ds_mla"])
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--slab-bytes", type=int, default=8 << 30)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variants", action="store_true", help="also time other parameters of the Triton kernel")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/attention.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/attention.py needs a CUDA device")
        return 2
    print(
        f"{'kernel':<34}{'format':<12}{'queries':>7}{'us':>9}{'GB/s':>8}{'TFLOP/s':>9}{'of floor':>9} {'floor':<8}"
        f"{'error':>9}  same bits alone"
    )
    results = []
    for format_ in args.formats:
        bench = Bench(format_, args)
        for name, attend in kernels(bench, args):
            for num_queries in args.queries:
                try:
                    results.append(bench.measure(name, attend, num_queries))
                except Exception as error:  # what does not fit this GPU is a line of the table, not the end of it
                    print(f"{name:<34}{format_:<12}{num_queries:>7}  {type(error).__name__}: {str(error)[:120]}")
                    continue
                show(results[-1])
    if args.json:
        record("attention", [asdict(result) for result in results], args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
