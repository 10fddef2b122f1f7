"""Several ranks on one GPU, or on one each, generate what stock transformers does, over one pinned host pool."""

from dataclasses import replace

import pytest

from hisparse.engine import load_model
from hisparse.engine.models import describe_model
from hisparse.engine.parallel import HostBacking, TensorParallel
from tests.engine.parity import Case, prompt, run, stock
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

FIRST = prompt(5, 230)
CASE = Case((FIRST, prompt(6, 200), (*FIRST[:192], *prompt(7, 20))), max_tokens=10, max_running=2)


@pytest.mark.parametrize("name", ["builtin:tiny-v32", "builtin:tiny-glm"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_on_gpus_generate_what_stock_generates(name: str, num_ranks: int) -> None:
    parallel = TensorParallel(num_ranks, "cuda", start_s=240, step_s=120)
    outcome = run(describe_model(name), replace(CASE, parallel=parallel))
    assert outcome.tokens == [stock(name, ids, CASE.params, CASE.max_tokens).tokens for ids in CASE.prompts]
    assert outcome.stats.spills > 0
    assert outcome.stats.rows.miss > 0 == outcome.stats.rows.unreachable
    alone = run(load_model(name, device="cuda"), CASE)
    assert outcome.stats.kv.host_physical_bytes == alone.stats.kv.host_physical_bytes


def test_ranks_with_pinned_pools_of_their_own_do_too() -> None:
    parallel = TensorParallel(2, "cuda", HostBacking.PRIVATE, start_s=240, step_s=120)
    outcome = run(describe_model("builtin:tiny-v32"), replace(CASE, parallel=parallel))
    expected = [stock("builtin:tiny-v32", ids, CASE.params, CASE.max_tokens).tokens for ids in CASE.prompts]
    assert outcome.tokens == expected
