"""The kernels compile for every architecture without a GPU, and the cache never serves anything but their bytes."""

import logging
import multiprocessing
from pathlib import Path

import pytest

from hisparse.errors import BackendError
from hisparse.kernels.cuda import arguments, compiler
from hisparse.kernels.cuda.parameters import (
    DeviceLimits,
    ResolveShape,
    Specialization,
    plan_look_up,
    plan_resolve,
    with_mover,
)

SHARED_KIB = {8: 163, 9: 227, 10: 227, 12: 99}
RESET = Specialization("reset_slots")
LOOK_UP = plan_look_up(ResolveShape(1, 2048, 4096, 32768, 656), DeviceLimits((9, 0), 132, 227 << 10)).specialization
ELF = b"\x7fELF"


def limits(arch: tuple[int, int]) -> DeviceLimits:
    return DeviceLimits(arch, 132, SHARED_KIB[arch[0]] * 1024)


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES, ids=str)
@pytest.mark.parametrize("row_bytes", [656, 4096])
def test_every_kernel_compiles_for_every_architecture(arch: tuple[int, int], row_bytes: int, tmp_path: Path) -> None:
    shape = ResolveShape(num_rows=1, topk=2048, hot_rows=4096, max_tokens=32768, row_bytes=row_bytes)
    move = with_mover(Specialization("move_rows", row_bytes=row_bytes), limits(arch), 64 * 1024)
    for specialization in (plan_resolve(shape, limits(arch)).specialization, LOOK_UP, move, RESET):
        assert compiler.compile_kernel(specialization, arch, tmp_path).startswith(ELF)


def test_resolve_compiles_with_no_room_for_the_replacement_state(tmp_path: Path) -> None:
    for keep in (True, False):
        variant = Specialization("resolve", 1024, 656, 2, use_bulk=False, keep_positions=keep, keep_stamps=False)
        assert compiler.compile_kernel(variant, (9, 0), tmp_path).startswith(ELF)


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_clusters_of_every_size_compile(cluster: int, tmp_path: Path) -> None:
    variant = Specialization("resolve_cluster", 256, 656, 2, use_bulk=True, cluster=cluster, selections=4)
    assert compiler.compile_kernel(variant, (9, 0), tmp_path).startswith(ELF)


def test_a_cluster_that_is_no_power_of_two_does_not_compile(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="a portable power of two"):
        compiler.compile_kernel(Specialization("resolve_cluster", 256, 656, cluster=3), (9, 0), tmp_path)


def test_a_struct_that_differs_between_host_and_kernel_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = tuple((name, str(int(size) + 8)) for name, size in arguments.size_macros())
    monkeypatch.setattr(compiler, "size_macros", lambda: sizes)
    with pytest.raises(BackendError, match=r"ResolveArgs differs from arguments\.py"):
        compiler.compile_kernel(RESET, (9, 0), tmp_path)


def test_a_kernel_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.compile_kernel(RESET, (9, 0), tmp_path)
    monkeypatch.setattr(compiler, "_compile", _never)
    assert compiler.compile_kernel(RESET, (9, 0), tmp_path) == first
    with pytest.raises(AssertionError):
        compiler.compile_kernel(RESET, (8, 0), tmp_path)


def test_a_damaged_cache_entry_is_compiled_again(tmp_path: Path) -> None:
    first = compiler.compile_kernel(RESET, (9, 0), tmp_path)
    (entry,) = (tmp_path / "cubin").iterdir()
    whole = entry.read_bytes()
    for damaged in (whole[:-1], whole + b"\0", whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        entry.write_bytes(damaged)
        assert compiler.compile_kernel(RESET, (9, 0), tmp_path) == first
        assert entry.read_bytes() == whole


def test_the_cache_key_changes_with_everything_that_decides_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        compiler.cache_key(RESET, (9, 0)),
        compiler.cache_key(RESET, (8, 0)),
        compiler.cache_key(Specialization("move_rows"), (9, 0)),
        compiler.cache_key(Specialization("reset_slots", row_bytes=32), (9, 0)),
    ]
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 0))
    keys.append(compiler.cache_key(RESET, (9, 0)))
    monkeypatch.setattr(compiler, "_sources", lambda: ("base.cuh", "// changed"))
    keys.append(compiler.cache_key(RESET, (9, 0)))
    assert len(set(keys)) == len(keys)


def test_many_processes_may_fill_one_cache_at_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        cubins = pool.starmap(compiler.compile_kernel, [(RESET, (9, 0), tmp_path)] * 6)
    assert len(set(cubins)) == 1
    assert [path.suffix for path in (tmp_path / "cubin").iterdir()] == [".cubin"]


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    with caplog.at_level(logging.WARNING):
        assert compiler.compile_kernel(RESET, (9, 0), blocker).startswith(ELF)
    assert "not cached" in caplog.text


def test_the_cache_directory_follows_the_environment() -> None:
    assert compiler.cache_directory({"HISPARSE_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert compiler.cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/hisparse")
    assert compiler.cache_directory({}) == Path.home() / ".cache" / "hisparse"


def test_an_old_architecture_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"compute capability 7\.5 is not supported.*8\.0 or newer"):
        compiler.compile_kernel(RESET, (7, 5), tmp_path)


def test_an_architecture_that_the_compiler_does_not_know_names_the_compiler(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"NVRTC \d+\.\d+ could not compile reset_slots for compute capability 9\.7"):
        compiler.compile_kernel(RESET, (9, 7), tmp_path)


@pytest.mark.parametrize("failure", [ImportError("no module"), RuntimeError("libnvrtc.so not found")])
def test_a_missing_compiler_names_what_to_install(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise failure

    monkeypatch.setattr(compiler.importlib, "import_module", fail)
    compiler.nvrtc_version.cache_clear()
    with pytest.raises(BackendError, match=r"pip install 'hisparse\[cuda\]'"):
        compiler.nvrtc_version()


def _never(specialization: Specialization, arch: tuple[int, int]) -> bytes:
    raise AssertionError(f"compiled {specialization} for {arch}")
