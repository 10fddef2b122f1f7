"""What the finder's card says is what its records hold, and the records are of the checkpoint in the package."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hisparse.engine.builtin import FINDER_FOLDER
from tools import record_finder, train_finder
from tools.finder import record
from tools.finder.export import MAX_BYTES, WEIGHTS
from tools.finder.schedule import FULL

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def own() -> dict[str, Any]:
    """The record of the shipped checkpoint."""
    return next(iter(record.kept().values()))


def finished(folder: Path, run: dict[str, Any]) -> Path:
    """What a training left in `folder`, with weights of its own."""
    folder.mkdir()
    (folder / "eval.json").write_text(json.dumps(run), encoding="utf-8")
    (folder / WEIGHTS).write_text(f"weights of seed {run['seed']}")
    return folder


def test_the_shipped_card_is_made_from_the_records() -> None:
    assert record.CARD.read_text(encoding="utf-8") == record.shipped_card()


def test_every_recorded_training_reached_the_goals() -> None:
    for run in record.kept().values():
        reached = {(goal["context"], goal["keys"]) for goal in run["goals"] if goal["accuracy"] >= goal["goal"]}
        assert reached == {(cell.context, cell.keys) for cell in FULL.goals}
        assert all(cell["prompts"] >= 60 for cell in run["goals"])


def test_the_records_say_what_trained_and_nothing_of_the_machines_folders() -> None:
    for run in record.kept().values():
        assert len(run["commit"]) >= 7
        assert run["command"].startswith("python tools/train_finder.py ")
        assert not any(word.startswith("/") for word in run["command"].split())


def test_a_package_has_the_checkpoint_and_its_card(own: dict[str, Any]) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    globs = settings["tool"]["setuptools"]["package-data"]["hisparse"]
    packed = {path for glob in globs for path in (ROOT / "src" / "hisparse").glob(glob)}
    assert {path.name for path in packed if path.parent == FINDER_FOLDER} >= NEEDED | {"README.md"}
    assert 2 * own["parameters"] < (FINDER_FOLDER / WEIGHTS).stat().st_size <= MAX_BYTES


def test_a_further_training_follows_in_the_card(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shipped one comes first whatever its seed is.
    shipped, other = (finished(tmp_path / f"{seed}", own | {"seed": seed}) for seed in (7, 3))
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "FINDER_FOLDER", shipped)
    monkeypatch.setattr(record, "CARD", shipped / "README.md")
    assert record_finder.main([str(other), str(shipped)]) == 0
    text = (shipped / "README.md").read_text(encoding="utf-8")
    order = [text.index(f"`benchmarks/results/finder_seed{seed}.json`") for seed in (7, 3)]
    assert order == sorted(order)
    assert "This checkpoint: seed 7" in text
    assert "Trained again, not shipped: seed 3" in text


def test_records_of_other_weights_alone_give_no_card(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    record.keep(finished(tmp_path / "other", own))
    with pytest.raises(LookupError, match="is of the weights in"):
        record.shipped_card()


@pytest.mark.parametrize(
    ("word", "shown"),
    [("/a/b/finder", "finder"), ("--out=/a/b", "--out=b"), ("/finder", "finder"), ("out/f", "out/f"), ("1", "1")],
)
def test_a_record_shows_of_an_absolute_path_the_last_part(word: str, shown: str) -> None:
    assert train_finder.shown([word])[1:] == (shown,)
