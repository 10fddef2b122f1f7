"""One evaluation: every context length, every way of answering."""

from collections.abc import Callable, Sequence

from hisparse.engine import EngineConfig, LoadedModel
from hisparse.evaluation.questions import Question, QuestionSet
from hisparse.evaluation.report import ContextReport, EvalReport
from hisparse.evaluation.runs import (
    BROKEN,
    HISPARSE,
    RESIDENT,
    STOCK,
    Progress,
    Run,
    run_broken,
    run_hisparse,
    run_resident,
    run_stock,
)

RUNS = {RESIDENT: run_resident, HISPARSE: run_hisparse, BROKEN: run_broken, STOCK: run_stock}
"""All ways of answering, by name, in the order in which they run."""


def evaluate(
    loaded: LoadedModel,
    asked: QuestionSet,
    questions: dict[int, list[Question]],
    configure: Callable[[Sequence[Question]], EngineConfig],
    *,
    with_stock: bool = False,
    progress: Progress = lambda name, tokens: None,
    finished: Callable[[EvalReport], None] = lambda report: None,
) -> EvalReport:
    """Ask `questions` (what `asked.questions` gave) and report.

    `configure` gives the options of the `hisparse` run for the questions of one context; the other runs take them
    over as far as they apply. After each run `finished` is given a report of those there are so far, from the first on
    that has something to be compared. Raises as `Engine` does.
    """
    names = [name for name in RUNS if with_stock or name != STOCK]
    # All at once and first, so that what does not fit is told before anything has run.
    configs = {context: configure(of_context) for context, of_context in questions.items()}
    for config in configs.values():
        config.plan(loaded.geometry_for(config.kv_dtype))
    reports: list[ContextReport] = []
    for context, of_context in questions.items():
        runs: dict[str, Run] = {}
        for name in names:
            runs[name] = RUNS[name](loaded, of_context, configs[context], progress)
            if HISPARSE in runs and RESIDENT in runs:
                so_far = ContextReport(context, tuple(of_context), dict(runs))
                finished(EvalReport(loaded.name, asked, (*reports, so_far)))
        reports.append(ContextReport(context, tuple(of_context), runs))
    return EvalReport(loaded.name, asked, tuple(reports))
