"""What every benchmark writes down beside its numbers: where, with what, and by which command they were made."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parents[1]


def record(name: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Write `results/<name>.json` and return its text: the rows, the options, and what they were measured on.

    A field that this machine cannot tell (a driver, a commit) is null. `uncommitted_changes` warns that the measured
    sources are not those of the commit. Where there is no repository, the environment may name the commit that the
    sources were taken from, in `HISPARSE_COMMIT`; a `+` at its end says that they were changed since.
    """
    result = {
        "benchmark": name,
        **provenance([_relative(sys.argv[0]), *sys.argv[1:]]),
        "device": device(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {"python": platform.python_version()}
        | {m: _version(m) for m in ("torch", "transformers", "numpy")},
        "options": {key: value for key, value in vars(args).items() if key != "json"},
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return text


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """When a result is made, by which Python `command`, and from which sources, as `record` describes them."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *command]),
        **_commit(os.environ.get("HISPARSE_COMMIT", "")),
    }


def _commit(named: str) -> dict[str, Any]:
    if named:
        return {"commit": named.rstrip("+"), "uncommitted_changes": named.endswith("+")}
    commit = _first_line("git", "-C", str(ROOT), "rev-parse", "--quiet", "--verify", "HEAD")
    changes = _first_line("git", "-C", str(ROOT), "status", "--porcelain", "--", "src", "tools")
    return {"commit": commit, "uncommitted_changes": changes is not None}


def device() -> dict[str, Any]:
    """The processor, its cores, how many threads torch uses, how busy it is with all that runs, and torch's GPU."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "gpu": gpu,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _relative(script: str) -> str:
    path = Path(script).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
