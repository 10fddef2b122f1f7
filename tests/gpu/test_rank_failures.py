"""Ranks on GPUs, with pinned memory, that are killed or hang: the run ends, names the rank, and leaves nothing."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from hisparse.engine.models import describe_model
from hisparse.engine.tp import ProcessExecutor, TensorParallel
from hisparse.errors import BackendError
from tests.engine.parity import Case, Outcome, prompt, stock
from tests.engine.parity import run as run_case
from tests.engine.tp.faults import PHASES, At, kill, stop
from tests.engine.tp.leftovers import nothing_is_left
from tests.engine.tp.quick_ranks import quick_ranks
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

NAME = "builtin:tiny-v32"
CASE = Case((prompt(1, 150),), max_tokens=4)
SOON = TensorParallel(2, "cuda", start_s=60, step_s=40, close_s=10)
HURRIED = TensorParallel(2, "cuda", start_s=60, step_s=12, close_s=2)


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with quick_ranks():
        yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Outcome]]:
    """One run of two ranks, broken by the fault that it is given. Checks that nothing is left of it."""
    monkeypatch.setattr(ProcessExecutor, "start_method", "forkserver")

    def one_run(fault: Callable[[int], None] | None, parallel: TensorParallel = SOON) -> Outcome:
        monkeypatch.setattr(ProcessExecutor, "prepare", fault)
        return run_case(describe_model(NAME), replace(CASE, parallel=parallel))

    with nothing_is_left(monkeypatch):
        yield one_run


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES[:-1])
def test_a_rank_that_is_killed_is_named_and_the_next_start_works(
    run: Callable[..., Outcome], phase: str, rank: int
) -> None:
    with pytest.raises(BackendError, match=rf"^rank {rank} \(process \d+\) was ended by SIGKILL; before, it {phase}"):
        run(At(kill, rank, phase))
    if phase == "takes its memory":
        expected = stock(NAME, CASE.prompts[0], CASE.params, CASE.max_tokens)
        assert run(None).tokens == [expected.tokens]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_shuts_down_is_logged(
    run: Callable[..., Outcome], rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(run(At(kill, rank, "shuts down")).tokens[0]) == CASE.max_tokens
    assert "was ended by SIGKILL; before, it shuts down" in caplog.text


def test_a_rank_that_hangs_is_ended_with_its_pinned_memory(run: Callable[..., Outcome]) -> None:
    with pytest.raises(BackendError, match=r"rank 1 \(process \d+\) decodes"):
        run(At(stop, 1, "decodes"), HURRIED)
