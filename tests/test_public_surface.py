"""Promises about the package as a whole: it documents itself, imports lightly, and names no particular machine."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import hisparse
from hisparse.worker import HiSparseWorker

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "hisparse"
SOURCES = sorted(PACKAGE.rglob("*.py"))
WITHOUT_TORCH = ("errors", "config", "geometry", "protocol", "cache", "residency")


def undocumented(source: str) -> Iterator[str]:
    """Public classes and functions of a module without a docstring, and the module itself."""
    tree = ast.parse(source)
    if tree.body and ast.get_docstring(tree) is None:
        yield "the module"
    for node in tree.body:
        is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef)
        if is_definition and not node.name.startswith("_") and ast.get_docstring(node) is None:
            yield node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_public_class_and_function_is_documented(path: Path) -> None:
    assert list(undocumented(path.read_text(encoding="utf-8"))) == []


def test_a_missing_docstring_would_be_found() -> None:
    assert list(undocumented("def f(): ...\ndef _g(): ...\nclass C:\n    pass\n")) == ["the module", "f", "C"]


def test_the_scheduler_side_imports_no_torch() -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in WITHOUT_TORCH
    ]
    assert len(modules) > len(WITHOUT_TORCH)
    program = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_package_has_its_place_in_the_import_order() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    placed = {name for layer in contract["layers"] for name in re.findall(r"\w+", layer)}
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__"} <= placed


def test_no_file_names_a_registry_or_an_absolute_path_of_a_machine() -> None:
    forbidden = re.compile(r"(?:/root/|/home/\w|/tmp/\w|/work/\w|pypi\.org|download\.pytorch\.org)")
    folders = ("src", "tests", "tools", "benchmarks", "examples", "docs", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    texts = {
        path
        for path in files
        if path.suffix in {"", ".py", ".md", ".toml", ".txt", ".yaml", ".json", ".svg", ".cuh", ".cu"}
    }
    assert {ROOT / "Makefile", ROOT / "constraints.txt", ROOT / "pyproject.toml"} <= texts
    named = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in sorted(texts - {Path(__file__)})
        for match in forbidden.finditer(path.read_text(encoding="utf-8"))
    ]
    assert named == []


def test_type_information_is_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()


PUBLIC_NAMES = """
    BackendError CacheConfig CachePlan CapacityError Engine EngineConfig HiSparseCacheHandle HiSparseConnector
    HiSparseCoordinator HiSparseError HiSparseWorker InputError InvariantError KVCacheManager LoadedModel ModelGeometry
    ProtocolError RowFormat SamplingParams Selection TableLog WriteBack __version__ latent_row load_model plan_cache
"""


def test_the_public_names_are_these_and_each_can_be_had() -> None:
    assert sorted(hisparse.__all__) == PUBLIC_NAMES.split() == dir(hisparse)
    assert {name for name in PUBLIC_NAMES.split() if getattr(hisparse, name, None) is None} == set()
    assert hisparse.HiSparseWorker is HiSparseWorker


def test_what_type_checkers_see_is_what_is_loaded() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {name.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == hisparse._HOME_OF
    assert {*seen, "__version__"} == set(PUBLIC_NAMES.split())


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Resolver'"):
        hisparse.Resolver  # noqa: B018


def test_importing_the_package_loads_none_of_it() -> None:
    program = "import sys, hisparse\nprint([name for name in sys.modules if name.startswith(('hisparse.', 'torch'))])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_the_one_in_pyproject() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert hisparse.__version__ == settings["project"]["version"]
