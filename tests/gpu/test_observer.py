"""What an observer is shown on a GPU: the same as the resolver and the staging count there."""

import pytest

pytest.importorskip("triton", reason="needs triton")

from hisparse.engine import Engine, SamplingParams, load_model
from tests.engine.selections import Totals
from tests.gpu.marks import NEEDS_GPU
from tests.gpu.test_engine import MODELS, PROMPTS, TOKENS, run, slab_for

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("model", MODELS)
def test_selections_add_up_and_tokens_are_those_of_a_run_that_nobody_watches(model: str) -> None:
    loaded = load_model(model, "float32", "cuda")
    config, totals = slab_for(loaded), Totals()
    with Engine(loaded, config, observer=totals) as engine:
        for prompt in PROMPTS:
            engine.add_request(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        for _ in engine.run():
            pass
        rows, results = engine.stats().rows, engine.results()
    assert totals.layers == set(loaded.geometry.leaders)
    assert totals.from_device == rows.resident > 0
    assert totals.from_host == rows.hot + rows.miss > 0
    assert [result.output_ids for result in results] == [result.output_ids for result in run(loaded, config)]
