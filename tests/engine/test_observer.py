"""An observer is shown every selection and where it was read; without one there is nothing."""

import pytest

from hisparse.engine import Engine, LoadedModel, SamplingParams
from tests.engine.parity import prompt
from tests.engine.selections import Totals
from tests.engine.test_engine import config, finish, small

PROMPTS = [prompt(seed, 150 + 7 * seed) for seed in range(3)]


def run(engine: Engine) -> list[tuple[int, ...]]:
    for ids in PROMPTS:
        engine.add_request(ids, SamplingParams(max_tokens=8))
    finish(engine)
    return [result.output_ids for result in engine.results()]


def test_it_is_shown_as_many_selections_as_the_resolver_and_the_staging_count(tiny: LoadedModel) -> None:
    totals = Totals()
    with Engine(tiny, small(tiny), observer=totals) as engine:
        run(engine)
        rows = engine.stats().rows
    assert totals.layers == set(tiny.geometry.leaders)
    assert totals.from_device == rows.resident > 0
    assert totals.from_host == rows.hot + rows.miss > 0
    told = sum(part.num_rows for step in totals.steps for part in step)
    # The last token of a request is never computed; a preempted request computes again.
    assert told >= sum(map(len, PROMPTS)) + 7 * len(PROMPTS)
    assert {part.request_id for step in totals.steps for part in step} == {"request-0", "request-1", "request-2"}


def test_with_everything_resident_nothing_comes_from_the_host(tiny: LoadedModel) -> None:
    totals = Totals()
    with Engine(tiny, config(), observer=totals) as engine:
        run(engine)
    assert totals.from_host == 0
    assert totals.from_device > 0


def test_steps_that_it_does_not_ask_for_are_not_shown(tiny: LoadedModel) -> None:
    totals = Totals(wants=False)
    with Engine(tiny, small(tiny), observer=totals) as engine:
        run(engine)
    assert totals.steps
    assert not totals.layers


@pytest.mark.parametrize("observed", [False, True])
def test_tokens_do_not_depend_on_who_looks(tiny: LoadedModel, observed: bool) -> None:
    with Engine(tiny, config()) as engine:
        expected = run(engine)
        assert engine.runner._watch is None
    with Engine(tiny, small(tiny), observer=Totals() if observed else None) as engine:
        assert run(engine) == expected
