"""How fast the file tier writes and reads blocks, checksums and all, beside a bare loop and `dd` in the same run.

    python benchmarks/file_tier.py [--dir DIR] [--files 512] [--mib 2] [--rounds 5] [--threads 4] [--json]

Three phases. `write`: past the page cache, into new files. `cold`: read back past the page cache. `warm`: read through
the page cache, which holds the files. The tier stores and loads whole blocks, by temporary, header, checksum and
rename, and checks every byte on the way back. The bare loop opens, writes or reads and closes files of the same size in
as many threads, and checks nothing. `dd` moves one file of all the bytes in pieces of that size. Every contender runs
in every phase of every round, in an order that rotates, because disks have moods. There is one buffer per thread.
"""

import argparse
import os
import queue
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any

import xxhash
from _record import record

from hisparse.offload.files import FileTier, FileTierConfig, Identity

PHASES = ("write", "cold", "warm")
STAMP_BYTES = 8


def buffers(count: int, num_bytes: int) -> list[mmap]:
    """Random bytes on page boundaries."""
    made = []
    for _ in range(count):
        buffer = mmap(-1, num_bytes)
        buffer[:] = os.urandom(num_bytes)
        made.append(buffer)
    return made


def stamp(buffer: mmap, number: int) -> None:
    """Make the buffer one that only file `number` has."""
    buffer[:STAMP_BYTES] = number.to_bytes(STAMP_BYTES, "little")


def check_stamp(buffer: mmap, number: int) -> None:
    """Stop if the buffer is not that of file `number`."""
    if buffer[:STAMP_BYTES] != number.to_bytes(STAMP_BYTES, "little"):
        raise SystemExit(f"file {number} came back with other bytes")


class Tier:
    """The product: a chain of transfers per buffer, each begun when the one before it is done."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder / "tier", args
        self.row_bytes = args.mib << 20
        self.buffers = buffers(args.threads, self.row_bytes)
        self.keys = [xxhash.xxh3_128_digest(number.to_bytes(8, "little")) for number in range(args.files)]

    def run(self, phase: str) -> float:
        """Seconds that one phase takes, with the tier opened and closed outside of it."""
        identity = Identity(
            *("benchmark", "0", "0" * 32, "0", "packed-nhd", "bfloat16"),
            num_kv_heads=8,
            head_bytes=256,
            page_tokens=self.row_bytes // 4096,
            page_bytes=(self.row_bytes,),
            row_bytes=self.row_bytes,
        )
        capacity = 2 * self.args.files * self.row_bytes
        options = FileTierConfig((self.folder,), capacity, threads=self.args.threads, direct_io=phase != "warm")
        tier = FileTier(options, identity)
        seconds = self._chains(tier, is_store=phase == "write")
        tier.close()
        return seconds

    def _chains(self, tier: FileTier, *, is_store: bool) -> float:
        numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(self.args.files):
            numbers.put(number)
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def begin(buffer: mmap) -> None:
            try:
                number = numbers.get_nowait()
            except queue.Empty:
                ended.put(None)
                return
            if is_store:
                stamp(buffer, number)
            transfer = (tier.store if is_store else tier.load)(self.keys[number], buffer)
            transfer.add_done_callback(lambda done: end(buffer, number, done.result()))

        def end(buffer: mmap, number: int, is_done: bool) -> None:
            try:
                if not is_done:
                    raise SystemExit(f"the tier did not {'store' if is_store else 'load'} block {number}")
                if not is_store:
                    check_stamp(buffer, number)
            except SystemExit as error:
                ended.put(error)
                return
            begin(buffer)

        start = time.perf_counter()
        for buffer in self.buffers:
            begin(buffer)
        failures = [failure for failure in (ended.get() for _ in self.buffers) if failure is not None]
        seconds = time.perf_counter() - start
        if failures:
            raise failures[0]
        return seconds


class Bare:
    """What the calls themselves cost: open, transfer, close, in threads that share a list of files."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder / "bare", args
        self.buffers = buffers(args.threads, args.mib << 20)

    def run(self, phase: str) -> float:
        """Seconds that one phase takes."""
        self.folder.mkdir(exist_ok=True)
        numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(self.args.files):
            numbers.put(number)
        work = self._write if phase == "write" else self._read
        flags = 0 if phase == "warm" else os.O_DIRECT
        threads = [threading.Thread(target=work, args=(numbers, buffer, flags)) for buffer in self.buffers]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def _write(self, numbers: "queue.SimpleQueue[int]", buffer: mmap, flags: int) -> None:
        while (number := next_number(numbers)) is not None:
            stamp(buffer, number)
            descriptor = os.open(self.folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
            os.pwritev(descriptor, [buffer], 0)
            os.close(descriptor)

    def _read(self, numbers: "queue.SimpleQueue[int]", buffer: mmap, flags: int) -> None:
        while (number := next_number(numbers)) is not None:
            descriptor = os.open(self.folder / str(number), os.O_RDONLY | flags)
            os.preadv(descriptor, [buffer], 0)
            os.close(descriptor)


def next_number(numbers: "queue.SimpleQueue[int]") -> int | None:
    """The next file, or None when all are taken."""
    try:
        return numbers.get_nowait()
    except queue.Empty:
        return None


class Dd:
    """One file of all the bytes, by the seconds that `dd` itself reports."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder / "dd", args

    def run(self, phase: str) -> float:
        """Seconds that one phase takes."""
        self.folder.mkdir(exist_ok=True)
        file = self.folder / "all"
        options = {
            "write": ["if=/dev/zero", f"of={file}", "oflag=direct"],
            "cold": [f"if={file}", "of=/dev/null", "iflag=direct"],
            "warm": [f"if={file}", "of=/dev/null"],
        }[phase]
        command = ["dd", f"bs={self.args.mib}M", f"count={self.args.files}", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"LC_ALL": "C"})
        found = re.search(r"copied, ([\d.e+-]+) s", done.stderr)
        if found is None:
            raise SystemExit(f"dd said something else: {done.stderr}")
        return float(found.group(1))


def measure(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """GB/s of every contender in every phase: the median of the rounds, and all of them."""
    contenders = {"tier": Tier(folder, args), "bare": Bare(folder, args), "dd": Dd(folder, args)}
    rates: dict[str, dict[str, list[float]]] = {phase: {name: [] for name in contenders} for phase in PHASES}
    num_bytes = args.files * args.mib << 20
    for number in range(args.rounds):
        order = [*contenders][number % 3 :] + [*contenders][: number % 3]
        for phase in PHASES:
            for name in order:
                run: Callable[[str], float] = contenders[name].run
                if phase == "warm":
                    run("warm")
                rates[phase][name].append(num_bytes / run(phase) / 1e9)
        for contender in contenders.values():
            shutil.rmtree(contender.folder)
        print(f"round {number + 1} of {args.rounds}", flush=True)
    return [_row(phase, rates[phase]) for phase in PHASES]


def _row(phase: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "phase": phase,
        **{f"{name}_gb_per_s": value for name, value in median.items()},
        "of_best": median["tier"] / max(median["bare"], median["dd"]),
        "rounds": rates,
    }


def main() -> None:
    """Parse the options, measure, print a table and write it down if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the files go, on the disk to measure")
    parser.add_argument("--files", type=int, default=512)
    parser.add_argument("--mib", type=int, default=2, help="payload of a file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4, help="of the tier, and of the bare loop")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/file_tier.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hisparse-file-tier-", dir=args.dir) as folder:
        rows = measure(Path(folder), args)
    print(f"{'phase':>6} {'tier GB/s':>10} {'bare GB/s':>10} {'dd GB/s':>10} {'of best':>8}")
    for row in rows:
        print(
            f"{row['phase']:>6} {row['tier_gb_per_s']:>10.2f} {row['bare_gb_per_s']:>10.2f} "
            f"{row['dd_gb_per_s']:>10.2f} {row['of_best']:>8.2f}"
        )
    if args.json:
        args.dir = str(args.dir)
        record("file_tier", rows, args)


if __name__ == "__main__":
    main()
