"""The manager over a real region and real files, with their own threads, from one process's life into the next."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hisparse.offload.config import OffloadConfig
from hisparse.offload.files import FileTier
from hisparse.offload.files.block_file import HEADER_BYTES
from hisparse.offload.manager import OffloadManager
from hisparse.offload.messages import Lookup, LookupStatus, OffloadReport, RegionTransfer
from hisparse.offload.region import SharedRegion, new_region_name
from hisparse.offload.tier import Below
from tests.offload.files.world import IDENTITY, ROW_BYTES, key_of, row_of

KEYS = [key_of(number) for number in range(12)]
WAIT_S = 20.0


class Node:
    """One worker's region and its manager; the worker's copies are plain ones."""

    def __init__(self, region: SharedRegion, manager: OffloadManager) -> None:
        self.region = region
        self.manager = manager

    def done(self, transfer: RegionTransfer) -> None:
        ids = (transfer.transfer_id,)
        self.manager.report(OffloadReport(0, enqueued=ids, completed=ids))
        self.manager.assert_invariants()

    def store(self, request: str, keys: list[bytes]) -> int:
        plan = self.manager.prepare_store(request, keys)
        if plan.transfer is not None:
            for position, block in plan.transfer.chunks:
                self.region.row(block)[:] = np.frombuffer(row_of(keys[position]), np.uint8)
            self.done(plan.transfer)
        return plan.num_accepted

    def lookup(self, request: str, keys: list[bytes]) -> Lookup:
        return until(lambda: self.manager.lookup(request, keys), lambda lookup: lookup.status.value in ("hit", "miss"))

    def load(self, request: str, keys: list[bytes]) -> list[bytes]:
        transfer = self.manager.prepare_load(request, len(keys))
        assert transfer is not None
        rows = [self.region.row(block).tobytes() for _, block in transfer.chunks]
        self.done(transfer)
        return rows


def until(ask: Callable[[], Lookup], is_it: Callable[[Lookup], bool]) -> Lookup:
    deadline = time.monotonic() + WAIT_S
    while not is_it(answer := ask()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.001)
    return answer


@contextmanager
def node(folder: Path, num_blocks: int, capacity: int | str = "8MiB") -> Iterator[Node]:
    config = OffloadConfig.parse(
        {
            "cpu_bytes": num_blocks * ROW_BYTES,
            "lookup_deadline_s": WAIT_S,
            "files": {"directories": [str(folder / "a"), str(folder / "b")], "capacity_bytes": capacity},
        }
    )
    assert config.files is not None
    for directory in config.files.directories:
        directory.mkdir(exist_ok=True)
    region = SharedRegion.create(new_region_name("node"), num_blocks, ROW_BYTES)
    with ThreadPoolExecutor(1) as executor:
        below = Below(FileTier(config.files, IDENTITY), region.row, executor)
        manager = OffloadManager(config, num_blocks, 1, below)
        yield Node(region, manager)
        assert manager.close(WAIT_S) == 0
        manager.assert_invariants()
    assert region.close() == ()


def test_chunks_of_one_life_are_loaded_in_the_next_as_many_as_fit(tmp_path: Path) -> None:
    with node(tmp_path, num_blocks=4) as first:
        done = 0
        deadline = time.monotonic() + WAIT_S
        while done < len(KEYS):
            assert time.monotonic() < deadline
            done += first.store("request", KEYS[done : done + 2])
        assert first.lookup("other", KEYS[:3]) == Lookup(LookupStatus.HIT, 3)
    with node(tmp_path, num_blocks=5) as second:
        assert second.lookup("request", KEYS) == Lookup(LookupStatus.HIT, 5)
        assert second.load("request", KEYS[:5]) == [row_of(key) for key in KEYS[:5]]


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_damaged_file_ends_the_hit_before_it(tmp_path: Path, damage: str) -> None:
    with node(tmp_path, num_blocks=4) as first:
        assert first.store("request", KEYS[:4]) == 4
    (path,) = [path for path in tmp_path.rglob("*") if KEYS[2].hex() in path.name.replace("/", "")] or [None]
    assert path is not None
    if damage == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content if damage == "flipped" else content[:-1])
    with node(tmp_path, num_blocks=4) as second:
        assert second.lookup("request", KEYS[:4]) == Lookup(LookupStatus.HIT, 2)
        assert second.load("request", KEYS[:2]) == [row_of(key) for key in KEYS[:2]]
        # What was computed again is stored again.
        assert second.store("request", KEYS[:4]) == 4
    with node(tmp_path, num_blocks=4) as third:
        assert third.lookup("request", KEYS[:4]) == Lookup(LookupStatus.HIT, 4)
        assert third.load("request", KEYS[:4]) == [row_of(key) for key in KEYS[:4]]


def test_a_prefix_that_memory_serves_is_the_last_that_files_give_up(tmp_path: Path) -> None:
    popular, others = [key_of(number) for number in range(100, 104)], [key_of(number) for number in range(200, 240)]
    with node(tmp_path, num_blocks=64, capacity=2 * 12 * (HEADER_BYTES + ROW_BYTES)) as first:
        for request, other in enumerate(others):
            assert first.store(f"{request}", popular) == 4
            first.manager.finish(f"{request}")
            if request:
                assert first.lookup(f"r{request}", popular) == Lookup(LookupStatus.HIT, 4)
                first.load(f"r{request}", popular)
            assert first.store(f"r{request}", [other]) == 1
            first.manager.finish(f"r{request}")
            settle(first)
    with node(tmp_path, num_blocks=64) as second:
        assert second.lookup("request", popular) == Lookup(LookupStatus.HIT, 4)
        # Control: the files had no room for all, and what was used once has left.
        assert second.lookup("other", others[:1]) == Lookup(LookupStatus.MISS, 0)


def settle(node: Node) -> None:
    """Have everything written that waits for it."""
    deadline = time.monotonic() + WAIT_S
    while any(entry.references or not entry.is_below for entry in node.manager.cpu.entries()):
        assert time.monotonic() < deadline
        node.manager.take_events()
        time.sleep(0.001)
