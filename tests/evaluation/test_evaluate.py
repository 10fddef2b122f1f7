"""A model that can answer does so from the host as it does from the device, and fails once the host is broken."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hisparse.engine import EngineConfig, LoadedModel
from hisparse.errors import CapacityError
from hisparse.evaluation.evaluate import evaluate
from hisparse.evaluation.questions import Question, QuestionSet
from hisparse.evaluation.report import ContextReport, EvalReport
from hisparse.evaluation.runs import run_broken, run_hisparse
from tests.evaluation.conftest import CONTEXT, SEED

ASKED = QuestionSet((CONTEXT,), 4, 3, SEED)


def small_slab(loaded: LoadedModel, share: float) -> EngineConfig:
    """A slab for that share of the rows of three prompts."""
    model = loaded.geometry
    total = 3 * CONTEXT * model.num_layers * model.row.row_bytes
    return EngineConfig(
        max_tokens=CONTEXT, slab_bytes=int(share * total), block_size=16, max_running=3, staging_rows=64, hot_rows=64
    )


@pytest.fixture(scope="module")
def report(loaded: LoadedModel, questions: list[Question]) -> EvalReport:
    """All four runs."""
    read: dict[str, int] = {}

    def count(run: str, tokens: int) -> None:
        read[run] = read.get(run, 0) + tokens

    def configure(_: Sequence[Question]) -> EngineConfig:
        return small_slab(loaded, 0.2)

    found = evaluate(loaded, ASKED, {CONTEXT: questions}, configure, with_stock=True, progress=count)
    total = sum(len(question.ids) for question in questions)
    assert list(read) == ["resident", "hisparse", "broken", "stock"]
    assert read["resident"] == read["stock"] == total
    return found


def test_hisparse_answers_from_the_host_what_resident_answers_from_the_device(report: EvalReport) -> None:
    assert report.identical
    assert report.accuracy["resident"] == report.accuracy["hisparse"] == report.accuracy["stock"] == 1.0
    assert report.needles.read >= 5 * len(report.contexts[0].questions)
    assert report.needles.share_from_host == 1.0


def test_a_broken_host_tier_is_seen(report: EvalReport) -> None:
    assert report.accuracy["broken"] == 0.0


def test_the_broken_run_is_wrong_where_needle_rows_came_from_the_host_and_only_there(loaded: LoadedModel) -> None:
    questions = QuestionSet((CONTEXT,), 4, 3, seed=0).questions(loaded.tokenizer.encode)[CONTEXT]
    config = small_slab(loaded, 0.2)
    sound, broken = (run(loaded, questions, config, lambda *_: None) for run in (run_hisparse, run_broken))
    from_host = [rows.from_host > 0 for rows in sound.needles]
    assert [not right for right in broken.right] == from_host
    assert 0 < sum(from_host) < 3


def test_with_all_on_the_device_no_row_comes_from_the_host(loaded: LoadedModel, questions: list[Question]) -> None:
    config = replace(small_slab(loaded, 0.2), slab_bytes=None)
    run = run_hisparse(loaded, questions[:1], config, lambda *_: None)
    assert run.right == (True,)
    assert run.needles[0].read >= 5
    assert run.needles[0].from_host == 0


def test_one_other_token_is_a_difference(report: EvalReport) -> None:
    (context,) = report.contexts
    run = context.runs["hisparse"]
    changed = replace(run, output_ids=(*run.output_ids[:2], (0, *run.output_ids[2][1:])))
    worse = ContextReport(context.context, context.questions, {**context.runs, "hisparse": changed})
    assert worse.differing == (2,)
    assert not replace(report, contexts=(context, worse)).identical


def test_the_json_says_what_the_report_says(report: EvalReport) -> None:
    said = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert said["accuracy"] == {"resident": 1.0, "hisparse": 1.0, "broken": 0.0, "stock": 1.0}
    assert said["identical"] is True
    assert said["needle_rows"]["share_from_host"] == report.needles.share_from_host
    (context,) = said["contexts"]
    assert [answer["said"]["hisparse"] for answer in context["answers"]] == [a["answer"] for a in context["answers"]]
    assert context["kv"]["device_bytes"] < 0.25 * context["kv"]["total_bytes"]
    assert context["spills"] > 0


def test_the_plot_has_a_line_for_each_run(report: EvalReport) -> None:
    plot = report.plot()
    assert plot.count("<polyline") == plot.count("<circle") == 4
    assert all(f">{name}</text>" in plot for name in report.accuracy)


def test_a_budget_that_is_too_small_is_told_before_anything_runs(
    loaded: LoadedModel, questions: list[Question]
) -> None:
    runs: list[str] = []
    with pytest.raises(CapacityError):
        evaluate(
            loaded,
            ASKED,
            {CONTEXT: questions},
            lambda _: small_slab(loaded, 0.01),
            progress=lambda run, _: runs.append(run),
        )
    assert runs == []
