"""ARCHITECTURE.md keeps its word: every invariant is numbered and names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
PROOF = re.compile(r"`([\w/]+\.py)::(\w+)`")


def invariants() -> list[tuple[int, str]]:
    """Number and proofs of each row of the table."""
    table = TEXT.partition("<!-- invariants -->")[2].partition("<!-- end of invariants -->")[0]
    return [(int(number), proofs) for number, _, proofs in ROW.findall(table)]


def defines_test(path: Path, name: str) -> bool:
    """Whether pytest would collect `name` of that file, or a class that ships the test does."""
    if not path.is_file() or not re.match(r"test_|Test|\w+Machine$", name):
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name for node in ast.walk(tree))


def test_invariants_are_numbered_from_one_without_a_gap() -> None:
    assert [number for number, _ in invariants()] == list(range(1, len(invariants()) + 1))
    assert len(invariants()) > 20


@pytest.mark.parametrize(("number", "proofs"), invariants(), ids=[str(n) for n, _ in invariants()])
def test_every_invariant_names_tests_that_exist(number: int, proofs: str) -> None:
    named = PROOF.findall(proofs)
    assert len(named) == proofs.count("::") > 0
    assert [f"{path}::{name}" for path, name in named if not defines_test(ROOT / path, name)] == []


def test_a_test_that_does_not_exist_would_be_found() -> None:
    here = Path(__file__)
    assert defines_test(here, "test_a_test_that_does_not_exist_would_be_found")
    assert not defines_test(here, "test_that_nobody_wrote")
    assert not defines_test(here, "invariants")
    assert not defines_test(here.with_name("test_nowhere.py"), "test_that_nobody_wrote")


def test_every_folder_of_the_package_stands_in_the_house() -> None:
    package = ROOT / "src" / "hisparse"
    found = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").is_file()}
    house = TEXT.partition("## The house")[2].partition("\n## ")[0]
    assert found <= set(re.findall(r"^\| `(\w+/)` \|", house, re.MULTILINE))
