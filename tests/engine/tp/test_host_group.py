"""Ranks that share a GPU sum and gather through host memory, and gloo never sees a tensor of theirs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hisparse.engine import LoadedModel, load_model
from hisparse.engine.models import describe_model
from hisparse.engine.tp import ProcessExecutor, TensorParallel, host_group
from hisparse.engine.tp.host_group import HostStagedGroup
from hisparse.engine.tp.rank_process import backend_for
from tests.engine.parity import Case, assert_parity, prompt, run
from tests.engine.tp.collectives import COLLECTIVES, TIMEOUT, Collective, assert_like_gloo, dist
from tests.engine.tp.faults import HostStaged

CASE = Case((prompt(5, 230), prompt(6, 200)), max_tokens=6, max_running=2, copy_delay=2)
PARALLEL = TensorParallel(2, "cpu", start_s=60, step_s=60, close_s=10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_through_the_host_gives_what_gloo_gives(collective: Collective, dtype: torch.dtype) -> None:
    assert_like_gloo(collective, dtype, lambda tensor: tensor)


@pytest.mark.parametrize(
    ("device", "num_ranks", "backend"),
    [("cpu", 2, "gloo"), ("cuda:0", 2, "nccl"), ("cuda:1", 4, host_group.NAME), ("cuda:0", 3, host_group.NAME)],
)
def test_ranks_that_share_gpus_pass_through_the_host(
    monkeypatch: pytest.MonkeyPatch, device: str, num_ranks: int, backend: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert backend_for(torch.device(device), num_ranks) == backend


def test_a_collective_that_is_not_offered_is_refused() -> None:
    group = HostStagedGroup(dist.HashStore(), 0, 1, TIMEOUT)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        group.reduce_scatter([torch.zeros(2)], [[torch.zeros(2)]]).wait()


@pytest.fixture
def staged_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, bool], list[int]]:
    """Run two ranks that pass through the host, check the result, and return the collectives of each."""

    def run_it(name: str, is_lossy: bool) -> list[int]:
        prepare = HostStaged(tmp_path, is_lossy)
        monkeypatch.setattr(ProcessExecutor, "prepare", prepare)
        outcome = run(describe_model(name), replace(CASE, parallel=PARALLEL))
        assert_parity(load_model(name), CASE, outcome)
        return prepare.read()

    return run_it


def test_ranks_that_pass_through_the_host_generate_what_stock_generates(
    tiny: LoadedModel, staged_run: Callable[[str, bool], list[int]]
) -> None:
    first, second = staged_run(tiny.name, False)
    # One for the embedding, one for the logits, and two a layer at least, in every forward pass.
    assert first == second
    assert first >= CASE.max_tokens * (2 + 2 * tiny.config.num_hidden_layers)


def test_control_without_what_comes_back_from_the_host_they_generate_something_else(
    staged_run: Callable[[str, bool], list[int]],
) -> None:
    with pytest.raises(AssertionError, match=r"other tokens|differ by"):
        staged_run("builtin:tiny-v32", True)
