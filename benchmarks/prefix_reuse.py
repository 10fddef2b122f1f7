"""Time to the first token of a prompt whose KV is kept somewhere, against computing it.

    python benchmarks/prefix_reuse.py [--context 16384] [--layers 12] [--rounds 3] [--device cuda|cpu] [--json]

One prompt is asked for again and again, each time with its KV in one place only:

computed   a prompt that nobody has asked for before
device     its pages still lie on the device
host       two other prompts took its device blocks; its pages are in the host pool
cpu_tier   the pools were told to forget; the CPU tier below them has it
files      a new engine on the same directory

The model has random weights and the cache geometry of a real one (`_synthetic_model.py`); prefill is the engine's own.
Where tokens came from is the engine's own count, and a turn whose count is not what was meant ends the run. Every turn
must give the same token. Files are read past the page cache, unless `--buffered` says otherwise.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _record import record
from _synthetic_model import ModelShape, plain_model

from hisparse.config import WriteBack
from hisparse.engine import Engine, EngineConfig, LoadedModel, SamplingParams
from hisparse.engine.reuse import ReusedTokens
from hisparse.errors import HiSparseError
from hisparse.geometry import ceil_div
from hisparse.offload.config import FileOptions, OffloadConfig

SOURCES = ("device", "host", "cpu_tier", "files")


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt's way to its first token. `seconds` from the request to the token."""

    seconds: float
    token: int
    reused: ReusedTokens


class Bench:
    """Engines over one model, sized so that a second prompt takes the first one's device blocks."""

    def __init__(self, loaded: LoadedModel, args: argparse.Namespace, folder: Path) -> None:
        self._loaded = loaded
        self._context = args.context
        self._random = random.Random(0)
        self.config = self._sized(args, folder)
        self.engine = Engine(loaded, self.config)
        self.page_tokens = self.config.block_size

    def _sized(self, args: argparse.Namespace, folder: Path) -> EngineConfig:
        topk = self._loaded.geometry.index_topk
        pages = ceil_div(args.context + 1, args.block_size)
        leases = ceil_div(2 * topk, args.block_size) + ceil_div(4 * topk, args.block_size)
        config = EngineConfig(
            max_tokens=args.context + 8,
            block_size=args.block_size,
            max_running=2,
            chunk_tokens=args.chunk,
            write_back=WriteBack.EAGER,
            indexer_tokens=6 * pages * args.block_size,
        )
        plan = config.plan(self._loaded.geometry)
        page_bytes = plan.device.payload_bytes + plan.indexer.payload_bytes
        files = FileOptions((folder,), capacity_bytes=16 * pages * page_bytes, direct_io=not args.buffered)
        return replace(
            config,
            slab_bytes=(pages + leases + 8) * plan.device.payload_bytes,
            host_pool_bytes=8 * pages * plan.host.payload_bytes,
            offload=OffloadConfig(
                cpu_bytes=4 * pages * page_bytes,
                max_stores=4 * pages,
                max_tier_writes=4 * pages,
                lookup_deadline_s=60.0,
                files=files,
            ),
        )

    def prompt(self) -> list[int]:
        """One that nobody has asked for."""
        vocab = self._loaded.vocab_size
        return [self._random.randrange(vocab) for _ in range(self._context)]

    def ask(self, prompt: list[int]) -> Turn:
        """Ask for one token, and let everything that the request set in motion come to rest."""
        request = self.engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        begun = time.perf_counter()
        for _ in self.engine.run():
            pass
        seconds = time.perf_counter() - begun
        self.engine.settle()
        result = self.engine.take_result(request)
        return Turn(seconds, result.output_ids[0], result.reused)

    def reopen(self) -> None:
        """A new engine that has nothing but the files."""
        self.engine.close()
        self.engine = Engine(self._loaded, self.config)

    def turns(self) -> Iterator[tuple[str, Turn]]:
        """One prompt from all places, slowest last."""
        prompt = self.prompt()
        yield "computed", self.ask(prompt)
        yield "device", self.ask(prompt)
        for _ in range(2):  # the second takes what the first had no need of
            self.ask(self.prompt())
        yield "host", self.ask(prompt)
        self.engine.reset_prefix_cache()
        yield "cpu_tier", self.ask(prompt)
        self.reopen()
        yield "files", self.ask(prompt)


def check(source: str, turn: Turn, first: Turn, page_tokens: int) -> None:
    """Nearly all of the prompt came from `source`, and gave the same token. Raises `SystemExit` otherwise."""
    counts = turn.reused.as_dict()
    if turn.token != first.token:
        raise SystemExit(
            f"a prompt whose KV came from {source} continues with {turn.token}, computed with {first.token}"
        )
    if turn.reused.total - counts[source] > 2 * page_tokens:
        raise SystemExit(f"a prompt that was meant to come from {source} came from {counts}")


def measure(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """Every source `rounds` times; the first round warms up."""
    seconds: dict[str, list[float]] = {source: [] for source in ("computed", *SOURCES)}
    for number in range(rounds + 1):
        first = None
        for source, turn in bench.turns():
            first = first or turn
            check(source, turn, first, bench.page_tokens)
            print(f"round {number}: {source:<9} {1e3 * turn.seconds:10.1f} ms", flush=True)
            if number:
                seconds[source].append(turn.seconds)
    computed = statistics.median(seconds["computed"])
    rows = []
    for source, times in seconds.items():
        median = statistics.median(times)
        rows.append(
            {"source": source, "ttft_ms": 1e3 * median, "best_ms": 1e3 * min(times), "speedup": computed / median}
        )
    return rows


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=16384, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--index-heads", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--buffered", action="store_true", help="read and write files through the page cache")
    parser.add_argument("--directory", type=Path, help="where files go (default: a temporary folder)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/prefix_reuse.json")
    return parser


def main() -> int:
    args = options().parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/prefix_reuse.py needs a CUDA device; --device cpu runs small sizes")
        return 2
    shape = ModelShape(args.layers, args.context, args.topk, args.hidden, args.heads, args.index_heads, 0, 0)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        try:
            bench = Bench(plain_model(shape, torch.device(args.device)), args, Path(folder))
            try:
                rows = measure(bench, args.rounds)
            finally:
                bench.engine.close()
        except HiSparseError as error:
            print(f"benchmarks/prefix_reuse.py: {error}")
            return 2
    print(f"\n{'source':<10}{'first token, ms':>16}{'best':>10}{'times computed':>16}")
    for row in rows:
        print(f"{row['source']:<10}{row['ttft_ms']:>16.1f}{row['best_ms']:>10.1f}{row['speedup']:>15.1f}x")
    if args.json:
        record("prefix_reuse", rows, argparse.Namespace(**vars(args) | {"directory": bool(args.directory)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
