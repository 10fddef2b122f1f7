"""Finished runs as `benchmarks/results` keeps them, and the card of the checkpoint that ships, which names them."""

import hashlib
import json
from pathlib import Path
from typing import Any

from hisparse.engine.builtin import FINDER_FOLDER
from tools.finder.export import WEIGHTS
from tools.finder.report import card
from tools.finder.schedule import PRESETS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CARD = FINDER_FOLDER / "README.md"


def keep(folder: Path) -> Path:
    """Keep the `eval.json` of a finished run's folder, with a checksum of its weights, as `finder_seed<seed>.json`."""
    run = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    run["weights_sha256"] = _checksum(folder)
    path = RESULTS / f"finder_seed{run['seed']}.json"
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return path


def kept() -> dict[str, dict[str, Any]]:
    """The runs that are kept, by the file that holds each as it is called from the repository's root; by seed.

    The run that gave the shipped weights comes first. Raises `LookupError` if none did.
    """
    shipped = _checksum(FINDER_FOLDER)
    found = [
        (f"benchmarks/results/{path.name}", json.loads(path.read_text(encoding="utf-8")))
        for path in RESULTS.glob("finder_seed*.json")
    ]
    found.sort(key=lambda pair: (pair[1]["weights_sha256"] != shipped, pair[1]["seed"]))
    if not found or found[0][1]["weights_sha256"] != shipped:
        raise LookupError(f"no finder_seed*.json in {RESULTS} is of the weights in {FINDER_FOLDER}")
    return dict(found)


def shipped_card() -> str:
    """The card of the shipped checkpoint, made from all runs that are kept. Raises as `kept` does."""
    runs = kept()
    own, *_ = runs.values()
    return card(PRESETS[own["preset"]], runs)


def _checksum(folder: Path) -> str:
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
