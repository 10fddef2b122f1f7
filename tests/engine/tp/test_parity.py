"""Several ranks generate what stock transformers does, under spills and prefix hits, over one pool or several."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hisparse.engine import Engine, LoadedModel, load_model
from hisparse.engine.models import describe_model
from hisparse.engine.tp import HostBacking, ProcessExecutor, TensorParallel
from hisparse.errors import InputError, InvariantError
from tests.engine.parity import Case, Outcome, assert_parity, prompt, run
from tests.engine.tp.faults import Digests, SlowWriter, Unshared

FIRST = prompt(5, 230)
CASE = Case((FIRST, prompt(6, 200), (*FIRST[:192], *prompt(7, 20))), max_tokens=10, max_running=2, copy_delay=2)
"""Two requests at once on the smallest slab; the third begins as the first did."""
REUSED = 192
POOL_BYTES = 8 << 20


def with_ranks(num_ranks: int, backing: HostBacking = HostBacking.SHARED) -> Case:
    return replace(CASE, parallel=TensorParallel(num_ranks, "cpu", backing, start_s=60, step_s=60, close_s=10))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_generate_together_what_stock_generates_alone(tiny: LoadedModel, num_ranks: int) -> None:
    """The process that drives them has no weights."""
    outcome = run(describe_model(tiny.name), with_ranks(num_ranks))
    assert_parity(tiny, CASE, outcome)
    assert outcome.stats.spills > 0
    assert outcome.stats.rows.miss > 0
    assert outcome.results[2].reused.host + outcome.results[2].reused.device == REUSED


def test_one_pool_serves_all_ranks_because_pools_of_their_own_would_be_alike_bit_for_bit(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alone, shared = run(tiny, CASE), run(tiny, with_ranks(2))
    digests = Digests(tmp_path)
    monkeypatch.setattr(ProcessExecutor, "prepare", digests)
    private = run(tiny, with_ranks(2, HostBacking.PRIVATE))
    first, second = digests.read()
    assert first == second
    assert_parity(tiny, CASE, private)
    assert private.tokens == shared.tokens
    sizes = [outcome.stats.kv.host_physical_bytes for outcome in (alone, shared, private)]
    assert POOL_BYTES < sizes[0] < 2 * POOL_BYTES
    assert sizes == [sizes[0], sizes[0], 2 * sizes[0]]


def test_control_ranks_that_share_nothing_though_told_to_are_counted(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run(tiny, CASE)
    monkeypatch.setattr(ProcessExecutor, "prepare", Unshared())
    assert run(tiny, with_ranks(2)).stats.kv.host_physical_bytes == 2 * alone.stats.kv.host_physical_bytes


@pytest.fixture
def with_slow_writer(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], tuple[LoadedModel, Case, Outcome]]:
    def run_it(heedless: bool) -> tuple[LoadedModel, Case, Outcome]:
        monkeypatch.setattr(ProcessExecutor, "prepare", SlowWriter(heedless))
        loaded = load_model("builtin:tiny-v32")
        return loaded, CASE, run(loaded, with_ranks(2))

    return run_it


def test_a_rank_0_that_is_slow_to_write_is_waited_for(
    with_slow_writer: Callable[[bool], tuple[LoadedModel, Case, Outcome]],
) -> None:
    assert_parity(*with_slow_writer(False))


def test_control_a_peer_that_reads_before_rank_0_has_written_is_caught(
    with_slow_writer: Callable[[bool], tuple[LoadedModel, Case, Outcome]],
) -> None:
    with pytest.raises(AssertionError, match=r"other tokens|differ by"):
        assert_parity(*with_slow_writer(True))


def test_an_engine_of_several_ranks_says_what_it_cannot_do() -> None:
    loaded = load_model("builtin:tiny-v32")
    with Engine(describe_model("builtin:tiny-v32"), with_ranks(2).config(loaded)) as engine:
        with pytest.raises(InputError, match="several ranks cannot change their weights"):
            engine.swap_weights(loaded.model.state_dict())
        with pytest.raises(InvariantError, match="the 2 ranks of this engine are other processes"):
            _ = engine.worker
