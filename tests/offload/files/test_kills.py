"""SIGKILL at every step of start, lookup, load, store and eviction; then five restarts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("mode", ["after", "torn"])
def test_a_kill_at_any_call_leaves_whole_blocks_and_nothing_to_sweep_by_hand(mode: str, fast_path: Path) -> None:
    command = [sys.executable, "-m", "tests.offload.files.kill_driver", str(fast_path), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    killed_at = done.stdout.split()
    assert len(killed_at) > 100
    assert {"open", "write", "sync", "close", "rename", "unlink", "lock"} <= set(killed_at)
