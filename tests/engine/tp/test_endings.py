"""However awkward the moment, ranks end, what was wrong is what is told, and nobody else can reach them."""

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hisparse.engine import Engine, EngineConfig, LoadedModel, load_model, offload
from hisparse.engine.models import describe_model
from hisparse.engine.tp import ProcessExecutor, TensorParallel
from hisparse.engine.tp.exchange import decode_handles, encode_handles
from hisparse.engine.tp.failures import RankFault
from hisparse.engine.tp.sending import SMALL_BYTES
from hisparse.errors import BackendError, RankError
from hisparse.offload.config import OffloadConfig
from hisparse.offload.region import new_region_name
from hisparse.worker.cuda.shared_pool import EventHandles
from tests.engine.parity import Case, prompt, run
from tests.engine.tp.faults import At, FailsWhereItSpills, hang, refuse, stop, warn
from tests.engine.tp.leftovers import SHARED_MEMORY, is_alive, nothing_is_left

NAME = "builtin:tiny-v32"
SPILLING = Case((prompt(1, 300), prompt(2, 200)), max_tokens=30)
SHORT = Case((prompt(1, 40),), max_tokens=2)
SOON = TensorParallel(2, start_s=60, step_s=60, close_s=10)
LONG_S = 600.0
"""Longer than any test may take: whoever waits for it is found out."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return describe_model(NAME)


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_is_left(monkeypatch):
        yield


@pytest.fixture
def _interruptible() -> Iterator[None]:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


def press_in(seconds: float) -> None:
    """Ctrl-C."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def hold(pid: int) -> None:
    """Stop a process, and return when it stands still."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


def wait_until(holds: Callable[[], object]) -> bool:
    """Whether it holds within a minute."""
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(holds())


def executor(loaded: LoadedModel, parallel: TensorParallel = SOON) -> ProcessExecutor:
    return ProcessExecutor(loaded, EngineConfig(max_tokens=64, block_size=16), parallel)


# What is told.


def test_a_peer_that_fails_while_rank_0_waits_for_it_is_the_one_named(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessExecutor, "prepare", FailsWhereItSpills())
    with pytest.raises(RankFault, match=r"^rank 1 .* failed") as caught:
        run(loaded, replace(SPILLING, parallel=replace(SOON, step_s=LONG_S)))
    assert "MemoryError: no room for the batch" in str(caught.value)


def test_what_a_driver_refuses_is_told_as_it_said_it(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessExecutor, "prepare", At(refuse, 1, "prefills"))
    with pytest.raises(BackendError, match=r"^rank 1: copying pages failed: out of memory \(CUDA driver error 2\)$"):
        run(loaded, replace(SHORT, parallel=SOON))


def test_a_fault_of_the_library_is_none_of_the_machine() -> None:
    """Commands show it with its traceback."""
    assert not issubclass(RankFault, BackendError)


def test_what_ranks_warn_of_and_the_size_of_their_pool_are_in_the_parent_s_log(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ProcessExecutor, "prepare", At(warn, 1, "prefills"))
    with caplog.at_level(logging.INFO, logger="hisparse"):
        outcome = run(loaded, replace(SHORT, parallel=SOON))
    told = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert ("hisparse.worker", "WARNING", "rank 1: the disk is slow") in told
    physical = outcome.stats.kv.host_physical_bytes
    assert [text for _, _, text in told if text.endswith(f"{physical} bytes of memory")]


# Ctrl-C.


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_while_ranks_end_ends_them_at_once(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessExecutor, "prepare", At(hang, 1, "shuts down"))
    ranks = executor(loaded, replace(SOON, close_s=LONG_S))
    press_in(0.5)
    with pytest.raises(KeyboardInterrupt):
        ranks.close()


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_while_ranks_are_killed_comes_when_they_are(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks with pinned memory, one of which is stopped, and so cannot give it back in the time it has."""
    monkeypatch.setattr("hisparse.engine.tp.processes.UNPIN_SECONDS", 2.0)
    ranks = executor(loaded)
    pids = ranks.pids
    for rank in ranks._processes.ranks:
        rank.spec = replace(rank.spec, device="cuda")
    hold(pids[1])
    press_in(0.5)
    with pytest.raises(KeyboardInterrupt):
        ranks._kill()
    assert not any(map(is_alive, pids))


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_while_ranks_load_ends_them_at_once(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessExecutor, "prepare", At(hang, 1, "loads the model"))
    press_in(3.0)
    with pytest.raises(KeyboardInterrupt):
        executor(loaded, replace(SOON, start_s=LONG_S, close_s=LONG_S))


def test_a_request_larger_than_a_channel_holds_does_not_wait_for_ranks_that_stand_still(loaded: LoadedModel) -> None:
    ranks = executor(loaded)
    for pid in ranks.pids:
        hold(pid)
    with pytest.raises(RankError, match=r"^rank 0, rank 1 did not answer in 1 s"):
        ranks._processes.ask(bytes(64 * SMALL_BYTES), 1.0)
    ranks.close()


# The process that started them.


def _have_ranks(told: Connection, in_thread: bool) -> None:
    """Start ranks, and then a child that outlives this process and has all that it had open."""
    ProcessExecutor.start_method = "spawn"
    ranks: list[ProcessExecutor] = []

    def start() -> None:
        ranks.append(executor(load_model(NAME)))

    if in_thread:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    else:
        start()
    child = os.fork()
    if not child:
        time.sleep(LONG_S)
        os._exit(0)
    told.send((child, *ranks[0].pids))
    hang()


@pytest.mark.parametrize("in_thread", [False, True])
def test_ranks_end_when_the_process_that_started_them_is_killed_whatever_else_it_started(in_thread: bool) -> None:
    """Rank 0 notices it. Rank 1 is stopped and can do nothing about it, so the system does, or its stop ends."""
    hear, told = multiprocessing.Pipe(duplex=False)
    parent = multiprocessing.get_context("forkserver").Process(target=_have_ranks, args=(told, in_thread))
    parent.start()
    assert hear.poll(60), "the ranks did not start"
    child, *pids = hear.recv()
    hold(pids[1])
    parent.kill()
    parent.join()
    if in_thread:
        os.kill(pids[1], signal.SIGCONT)
    assert wait_until(lambda: not any(map(is_alive, pids)))
    assert is_alive(child)
    os.kill(child, signal.SIGKILL)


@dataclass(frozen=True)
class TellAndHang:
    """As a rank whose host pool takes long. It says first which regions it has mapped by then."""

    file: Path
    __name__ = "hang"

    def __call__(self) -> None:
        mapped = {line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "hisparse" in line}
        self.file.with_suffix(".part").write_text(json.dumps(sorted(mapped)))
        self.file.with_suffix(".part").rename(self.file)
        hang()


def _keep_kv(name: str, file: Path) -> None:
    """With a CPU tier, in regions of that name, and in a rank that never has its memory."""
    offload.new_region_name = lambda label: f"{name}-{label}"
    ProcessExecutor.start_method = "spawn"
    ProcessExecutor.prepare = At(TellAndHang(file), 1, "takes its memory")
    tier = OffloadConfig(cpu_bytes=4 << 20)
    Engine(load_model(NAME), EngineConfig(max_tokens=64, block_size=16, parallel=SOON, offload=tier))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_tier_when_its_process_ends_while_ranks_take_their_memory(
    number: int, tmp_path: Path
) -> None:
    name, file = new_region_name("test"), tmp_path / "mapped"

    def regions() -> list[str]:
        return [region for region in os.listdir(SHARED_MEMORY) if name in region]

    parent = multiprocessing.get_context("forkserver").Process(target=_keep_kv, args=(name, file))
    parent.start()
    assert wait_until(file.exists), "rank 1 did not come so far"
    assert len([region for region in json.loads(file.read_text()) if name in region]) == 2
    assert wait_until(lambda: not regions()), "rank 0 did not map them"
    os.kill(parent.pid or 0, number)
    parent.join()
    assert regions() == []


# Nobody else.


def listening(pid: int) -> set[str]:
    """Hexadecimal addresses on which a process listens."""
    links = (Path(f"/proc/{pid}/fd") / name for name in os.listdir(f"/proc/{pid}/fd"))
    inodes = {os.readlink(link).removeprefix("socket:[").rstrip("]") for link in links if link.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes}


def test_ranks_meet_where_this_machine_alone_can_come(loaded: LoadedModel) -> None:
    before = listening(os.getpid())
    ranks = executor(loaded)
    found = [listening(pid) for pid in (os.getpid(), *ranks.pids)]
    ranks.close()
    assert found[0] - before == {"0100007F"}
    assert set().union(*found[1:]) <= {"0100007F", "00000000000000000000000001000000"}
    assert listening(os.getpid()) == before


def test_events_cross_as_plain_bytes() -> None:
    handles = EventHandles(3, tuple(bytes([index]) * 64 for index in range(5)))
    assert decode_handles(encode_handles(handles)) == handles
    for wrong in (b"", b"1", encode_handles(handles)[:-1], encode_handles(EventHandles(0, ()))):
        with pytest.raises(BackendError, match="cannot be right"):
            decode_handles(wrong)


def test_a_rank_that_stands_still_while_ranks_load_is_named(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessExecutor, "prepare", At(stop, 0, "meets the other ranks"))
    with pytest.raises(RankError, match=r"rank 0 \(process \d+\) meets the other ranks"):
        executor(loaded, replace(SOON, start_s=8, close_s=LONG_S))
