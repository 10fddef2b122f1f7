"""From the sources beside this file to machine code, through NVRTC, with a cache on disk.

Nothing here needs a GPU. A cached object is named by everything that decides its content and is published by a
rename, so any number of processes may start at once: at worst each compiles, and all write the same bytes.
"""

import hashlib
import importlib
import logging
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hisparse.errors import BackendError
from hisparse.kernels.cuda.arguments import size_macros
from hisparse.kernels.cuda.parameters import Specialization

ARCHITECTURES = ((8, 0), (9, 0), (10, 0), (12, 0))
"""Compute capabilities that are compiled in CI. Others from 8.0 on are compiled for when they are met."""

MINIMUM_ARCHITECTURE = (8, 0)
SOURCE_DIRECTORY = Path(__file__).parent / "source"

_DIGEST_BYTES = 32
_INSTALL = "install it with: pip install 'hisparse[cuda]'"
_log = logging.getLogger(__name__)


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where compiled kernels are kept: `HISPARSE_CACHE_DIR`, else `hisparse` in the user's cache directory."""
    if chosen := environment.get("HISPARSE_CACHE_DIR"):
        return Path(chosen)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hisparse"


def compile_kernel(specialization: Specialization, arch: tuple[int, int], directory: Path | None = None) -> bytes:
    """The cubin of one kernel for compute capability `arch`, from the cache in `directory` or newly compiled.

    Raises `BackendError` when NVRTC is missing, does not know the architecture, or rejects the source.
    """
    if arch < MINIMUM_ARCHITECTURE:
        raise BackendError(
            f"compute capability {arch[0]}.{arch[1]} is not supported: the kernels need "
            f"{MINIMUM_ARCHITECTURE[0]}.{MINIMUM_ARCHITECTURE[1]} or newer (A100, RTX 30 series and later)"
        )
    path = (directory or cache_directory()) / "cubin" / f"{cache_key(specialization, arch)}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin = _compile(specialization, arch)
        _publish(path, cubin)
    return cubin


def cache_key(specialization: Specialization, arch: tuple[int, int]) -> str:
    """Names everything that decides a cubin: kernel, sources and headers, macros, architecture, compiler version."""
    digest = hashlib.sha256()
    macros = specialization.macros() + size_macros()
    for part in (specialization.kernel, repr(macros), repr(arch), repr(nvrtc_version()), *_sources()):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return f"{specialization.kernel}-sm{arch[0]}{arch[1]}-{digest.hexdigest()[:32]}"


@cache
def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC that is installed. Raises `BackendError` when none is."""
    try:
        status, major, minor = _import("cuda.bindings.nvrtc").nvrtcVersion()
    except (OSError, RuntimeError) as error:
        raise BackendError(f"NVRTC, the run-time compiler for CUDA, was not found ({error}): {_INSTALL}") from error
    if int(status) != 0:
        raise BackendError(f"NVRTC does not answer (status {int(status)}): {_INSTALL}")
    return int(major), int(minor)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = ".".join(name.split(".")[:2]).replace(".", "-")
        raise BackendError(f"the package {package} was not found: {_INSTALL}") from error


@cache
def _sources() -> tuple[str, ...]:
    """Names and texts of all sources: any kernel may include any header."""
    files = sorted(path for path in SOURCE_DIRECTORY.iterdir() if path.suffix in (".cu", ".cuh"))
    return tuple(text for path in files for text in (path.name, path.read_text(encoding="utf-8")))


def _compile(specialization: Specialization, arch: tuple[int, int]) -> bytes:
    version = nvrtc_version()
    core = _import("cuda.core")
    if not hasattr(core, "Program"):
        core = _import("cuda.core.experimental")
    source = (SOURCE_DIRECTORY / f"{specialization.kernel}.cu").read_text(encoding="utf-8")
    options = core.ProgramOptions(
        name=f"{specialization.kernel}.cu",
        arch=f"sm_{arch[0]}{arch[1]}",
        std="c++17",
        include_path=[str(SOURCE_DIRECTORY)],
        define_macro=list(specialization.macros() + size_macros()),
        lineinfo=True,
    )
    try:
        return bytes(core.Program(source, "c++", options).compile("cubin").code)
    except Exception as error:  # cuda.core's own errors have no public root
        said = " ".join(str(error).split())
        raise BackendError(
            f"NVRTC {version[0]}.{version[1]} could not compile {specialization.kernel} for compute capability "
            f"{arch[0]}.{arch[1]}; a newer nvidia-cuda-nvrtc may know it. It said: {said}"
        ) from error


def _read(path: Path) -> bytes | None:
    """A cached object, or None when it is absent or not what was written."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _publish(path: Path, cubin: bytes) -> None:
    """Write to a temporary file of this process, then rename. A cache that cannot be written only costs time."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(temporary, path)
    except OSError as error:
        _log.warning("compiled kernels are not cached in %s: %s", path.parent, error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
