"""Several processes live on one directory and are killed at random; no block is ever anything but whole."""

import subprocess
import sys
import time
from pathlib import Path

from hisparse.offload.files import FileTier
from tests.offload.files.rough_life import BLOCKS, KEYS
from tests.offload.files.world import FILE_BYTES, IDENTITY, config, is_whole, key_of, loads, namespace

ROOT = Path(__file__).resolve().parents[3]
LIVES = 2
KILLS = 4


def start(folder: Path, seed: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.offload.files.rough_life", str(folder), str(seed)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: "subprocess.Popen[str]") -> None:
    """Kill it; it must have lived until now."""
    assert process.poll() is None, process.communicate()[1]
    process.kill()
    process.communicate()


def test_lives_that_overlap_and_end_at_random_leave_whole_blocks_only(fast_path: Path) -> None:
    lives = [start(fast_path, seed) for seed in range(LIVES)]
    for seed in range(LIVES, LIVES + KILLS):
        time.sleep(0.15)
        end(lives.pop(0))
        lives.append(start(fast_path, seed))
    for process in lives:
        end(process)
    found = list(namespace(fast_path).glob("??/*.kv"))
    assert found
    assert all(is_whole(path, IDENTITY) for path in found)
    assert len(found) <= BLOCKS + LIVES
    tier = FileTier(config(fast_path, blocks=BLOCKS), IDENTITY)
    assert sum(loads(tier, key_of(number)) for number in range(KEYS)) == len(found)
    assert tier.stats().used_bytes == len(found) * FILE_BYTES
    tier.close()
    assert list((fast_path / ".hisparse").iterdir()) == []
