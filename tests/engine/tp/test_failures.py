"""Whatever happens to a rank, the run ends soon, says which rank it was, and leaves nothing behind."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from hisparse.engine import Engine, EngineConfig, LoadedModel, SamplingParams, load_model
from hisparse.engine.tp import HostBacking, ProcessExecutor, TensorParallel, processes
from hisparse.engine.tp.failures import RankFault
from hisparse.engine.tp.processes import RankProcesses
from hisparse.errors import BackendError, CapacityError, InputError
from hisparse.offload.config import OffloadConfig
from hisparse.worker.memory_limits import memory_rooms, tightest
from tests.engine.parity import Case, Outcome, assert_parity, prompt
from tests.engine.parity import run as run_case
from tests.engine.tp.faults import PHASES, At, contradict, crash, fail, hang, kill, stop
from tests.engine.tp.leftovers import nothing_is_left, shared_memory_of_this_process

CASE = Case((prompt(1, 150),), max_tokens=4, offload=OffloadConfig(cpu_bytes=4 << 20))
"""With regions of a CPU tier, which are files of shared memory with a name until all ranks have mapped them."""

SOON = TensorParallel(2, start_s=60, step_s=60, close_s=10)
HURRIED = TensorParallel(2, start_s=10, step_s=3, close_s=2)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("builtin:tiny-v32")


@pytest.fixture
def run(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Outcome]]:
    """One run of two ranks, broken by the fault that it is given. Checks that nothing is left of it."""

    def one_run(fault: Callable[[int], None] | None, parallel: TensorParallel = SOON) -> Outcome:
        monkeypatch.setattr(ProcessExecutor, "prepare", fault)
        return run_case(loaded, replace(CASE, parallel=parallel))

    with nothing_is_left(monkeypatch):
        yield one_run


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES[:-1])
def test_a_rank_that_is_killed_is_named(run: Callable[..., Outcome], phase: str, rank: int) -> None:
    with pytest.raises(BackendError, match=rf"^rank {rank} \(process \d+\) was ended by SIGKILL; before, it {phase}"):
        run(At(kill, rank, phase))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_shuts_down_is_logged(
    run: Callable[..., Outcome], rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(run(At(kill, rank, "shuts down")).tokens[0]) == CASE.max_tokens
    assert f"rank {rank}" in caplog.text
    assert "was ended by SIGKILL; before, it shuts down" in caplog.text


def test_after_ranks_were_killed_the_next_start_works(loaded: LoadedModel, run: Callable[..., Outcome]) -> None:
    with pytest.raises(BackendError):
        run(At(kill, 1, "takes its memory"))
    assert_parity(loaded, CASE, run(None))


@pytest.mark.parametrize(("fault", "phase"), [(stop, "loads the model"), (hang, "decodes"), (stop, "decodes")])
def test_a_rank_that_hangs_is_named_after_the_time_that_a_step_has(
    run: Callable[..., Outcome], fault: Callable[[], None], phase: str
) -> None:
    with pytest.raises(BackendError, match=rf"rank 1 \(process \d+\) {phase}"):
        run(At(fault, 1, phase), HURRIED)


def test_a_rank_that_hangs_while_it_shuts_down_is_ended(
    run: Callable[..., Outcome], caplog: pytest.LogCaptureFixture
) -> None:
    run(At(hang, 1, "shuts down"), HURRIED)
    assert "rank 1 did not end by itself: it shuts down" in caplog.text


def test_a_rank_s_last_words_are_told(run: Callable[..., Outcome]) -> None:
    with pytest.raises(RankFault, match=r"^rank 1 .* failed; before, it decodes") as caught:
        run(At(fail, 1, "decodes"))
    assert "the disk is on fire" in str(caught.value)
    assert "ValueError: a fault that nobody foresaw" in str(caught.value)


def test_a_rank_that_crashes_says_where(run: Callable[..., Outcome]) -> None:
    with pytest.raises(BackendError, match=r"^rank 1 .* was ended by SIGSEGV; before, it prefills") as caught:
        run(At(crash, 1, "prefills"))
    assert "in crash" in str(caught.value)


def test_a_rank_that_hangs_is_asked_where(run: Callable[..., Outcome]) -> None:
    with pytest.raises(BackendError, match=r"rank 1 \(process \d+\) prefills") as caught:
        run(At(hang, 1, "prefills"), HURRIED)
    assert "in hang" in str(caught.value)


def test_a_contradiction_in_a_rank_keeps_its_traceback(run: Callable[..., Outcome]) -> None:
    with pytest.raises(RankFault, match=r"rank 0 .* failed") as caught:
        run(At(contradict, 0, "prefills"))
    assert "InvariantError: page 7 is nowhere" in str(caught.value)
    assert "in serve" in str(caught.value)


def test_what_a_rank_finds_wrong_with_the_input_is_one_line(loaded: LoadedModel) -> None:
    nowhere = LoadedModel(
        "/nowhere", loaded.model, loaded.tokenizer, loaded.geometry, loaded.dtype, loaded.eos_token_ids
    )
    with pytest.raises(InputError, match=r"^rank [01]: no model at /nowhere"):
        ProcessExecutor(nowhere, CASE.config(loaded), SOON)


@pytest.mark.usefixtures("run")
def test_after_an_interrupted_step_the_ranks_are_asked_again_and_end(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they answer to the step that nobody waits for any more is not taken for an answer to what comes next."""
    config = EngineConfig(max_tokens=64, block_size=16, parallel=SOON)
    with Engine(loaded, config) as engine:
        engine.add_request(prompt(1, 40), SamplingParams(max_tokens=4))

        def interrupted(*_: object) -> None:
            monkeypatch.setattr(processes, "wait", wait)
            raise KeyboardInterrupt

        wait = processes.wait
        monkeypatch.setattr(processes, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.stats().rows.resident > 0
        assert engine.stats().rows.unreachable == 0


@pytest.mark.usefixtures("run")
def test_ctrl_c_while_a_step_is_handed_out_waits_until_every_rank_has_it(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Engine(loaded, EngineConfig(max_tokens=64, block_size=16, parallel=SOON)) as engine:
            engine.add_request(prompt(1, 40), SamplingParams(max_tokens=4))
            send = Connection.send_bytes

            def send_and_press(channel: Connection, message: Any) -> None:
                monkeypatch.setattr(Connection, "send_bytes", send)
                os.kill(os.getpid(), signal.SIGINT)
                channel.send_bytes(message)

            monkeypatch.setattr(Connection, "send_bytes", send_and_press)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            assert engine.stats().rows.resident > 0
    finally:
        signal.signal(signal.SIGINT, usual)


@pytest.mark.usefixtures("run")
def test_ranks_of_a_gpu_that_is_not_there_are_not_started(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(RankProcesses, "start", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(BackendError, match="no CUDA device is usable: use the CPU"):
        Engine(loaded, EngineConfig(max_tokens=64, parallel=replace(SOON, device="cuda")))


@pytest.mark.parametrize(
    ("num_ranks", "message"),
    [(3, "4 attention heads cannot be split over 3 ranks: use one of 1, 2, 4"), (0, "by one rank at least")],
)
def test_heads_that_cannot_be_split_are_refused_before_anything_starts(
    loaded: LoadedModel, num_ranks: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ProcessExecutor(loaded, CASE.config(loaded), TensorParallel(num_ranks))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("backing", "pools"), [(HostBacking.SHARED, 1), (HostBacking.PRIVATE, 2)])
def test_host_pools_that_there_is_no_memory_for_are_refused_before_anything_starts(
    loaded: LoadedModel, backing: HostBacking, pools: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pools of more than half the memory each do not fit, though one would."""
    limit = tightest(memory_rooms())
    assert limit is not None
    config = EngineConfig(max_tokens=64, host_pool_bytes=int(1.2 * limit.free_bytes / pools))
    monkeypatch.setattr(RankProcesses, "start", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(CapacityError, match=r"the host pool takes \d+ bytes of memory, but .* bytes left"):
        Engine(loaded, replace(config, parallel=replace(SOON, backing=backing)))
    assert shared_memory_of_this_process() == []
