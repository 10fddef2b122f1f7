"""Several ranks on one GPU, or on one each, generate what stock transformers does, over one pinned host pool."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hisparse.engine import load_model
from hisparse.engine.models import describe_model
from hisparse.engine.parallel import HostBacking, TensorParallel
from tests.engine.parity import Case, prompt, run, stock
from tests.engine.test_offload_engine import CONVERSATIONS, SHARED, assert_like_stock, config, offload, one_run
from tests.engine.tp.collectives import COLLECTIVES, Collective, assert_like_gloo
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

FIRST = prompt(5, 230)
SLEEP_CYCLES = 20_000_000
CASE = Case((FIRST, prompt(6, 200), (*FIRST[:192], *prompt(7, 20))), max_tokens=10, max_running=2)


def on_gpus(num_ranks: int) -> TensorParallel:
    """The first step compiles, and so takes seconds."""
    return TensorParallel(num_ranks, "cuda", start_s=40, step_s=25, close_s=10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_of_ranks_that_share_a_gpu_waits_for_the_tensor_and_gives_what_gloo_gives(
    collective: Collective, dtype: torch.dtype
) -> None:
    def late(tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.cuda()
        made = torch.zeros_like(source)
        torch.cuda._sleep(SLEEP_CYCLES)
        return made.copy_(source)

    assert_like_gloo(collective, dtype, late)


@pytest.mark.parametrize("name", ["builtin:tiny-v32", "builtin:tiny-glm"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_on_gpus_generate_what_stock_generates(name: str, num_ranks: int) -> None:
    # First, because it leaves most of what ranks would compile.
    alone = run(load_model(name, device="cuda"), CASE)
    outcome = run(describe_model(name), replace(CASE, parallel=on_gpus(num_ranks)))
    assert outcome.tokens == [stock(name, ids, CASE.params, CASE.max_tokens).tokens for ids in CASE.prompts]
    assert outcome.stats.spills > 0
    assert outcome.stats.rows.miss > 0 == outcome.stats.rows.unreachable
    assert outcome.stats.kv.host_physical_bytes == alone.stats.kv.host_physical_bytes


def test_engines_of_other_numbers_of_ranks_read_each_others_files(tmp_path: Path) -> None:
    name, page = "builtin:tiny-v32", 16
    for number, num_ranks in enumerate((2, 4, 1)):
        loaded = describe_model(name) if num_ranks > 1 else load_model(name, device="cuda")
        parallel = on_gpus(num_ranks) if num_ranks > 1 else None
        results, stats = one_run(loaded, config(loaded, offload(tmp_path), parallel=parallel), CONVERSATIONS)
        assert_like_stock(loaded, CONVERSATIONS, results)
        assert stats.rows.unreachable == 0
        # All but the first compute the ends of prompts only: less than a page of each.
        assert (stats.reused.files > len(SHARED)) == bool(number)
        assert (stats.reused.computed < len(CONVERSATIONS) * (page + 1)) == bool(number)


def test_ranks_with_pinned_pools_of_their_own_do_too() -> None:
    parallel = replace(on_gpus(2), backing=HostBacking.PRIVATE)
    outcome = run(describe_model("builtin:tiny-v32"), replace(CASE, parallel=parallel))
    expected = [stock("builtin:tiny-v32", ids, CASE.params, CASE.max_tokens).tokens for ids in CASE.prompts]
    assert outcome.tokens == expected
