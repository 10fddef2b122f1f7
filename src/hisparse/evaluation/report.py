"""What an evaluation found, for programs and as a plot."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hisparse.evaluation import svg
from hisparse.evaluation.provenance import NeedleRows
from hisparse.evaluation.questions import Question, QuestionSet
from hisparse.evaluation.runs import BROKEN, HISPARSE, RESIDENT, Run


@dataclass(frozen=True, slots=True)
class ContextReport:
    """One context length. `runs` by name; the order is that in which they ran. `resident` and `hisparse` are there.

    Where an evaluation was ended early, the last context may lack runs that others have.
    """

    context: int
    questions: tuple[Question, ...]
    runs: dict[str, Run]

    @property
    def accuracy(self) -> dict[str, float]:
        """Of each run."""
        return {name: run.accuracy for name, run in self.runs.items()}

    @property
    def differing(self) -> tuple[int, ...]:
        """The questions, by index, to which `hisparse` gave other tokens than `resident`."""
        pairs = zip(self.runs[HISPARSE].output_ids, self.runs[RESIDENT].output_ids, strict=True)
        return tuple(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)

    @property
    def control_failed(self) -> bool:
        """Whether a broken host changed no answer: then nothing shows that any of them needed the host."""
        return BROKEN in self.runs and self.runs[BROKEN].output_ids == self.runs[HISPARSE].output_ids

    @property
    def needles(self) -> NeedleRows:
        """All needle rows that `hisparse` read."""
        return sum(self.runs[HISPARSE].needles, NeedleRows())


@dataclass(frozen=True, slots=True)
class EvalReport:
    """All contexts, in the order in which they were asked for."""

    model: str
    asked: QuestionSet
    contexts: tuple[ContextReport, ...]

    @property
    def identical(self) -> bool:
        """Whether `hisparse` gave the tokens of `resident` on every prompt."""
        return not any(context.differing for context in self.contexts)

    @property
    def accuracy(self) -> dict[str, float]:
        """Of each run, over all contexts that have it. They have equally many prompts."""
        shares = {name: [context.accuracy[name] for context in self._with(name)] for name in self.contexts[0].runs}
        return {name: sum(of_run) / len(of_run) for name, of_run in shares.items()}

    @property
    def needles(self) -> NeedleRows:
        """All needle rows that `hisparse` read."""
        return sum((context.needles for context in self.contexts), NeedleRows())

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values. Shares are of 1, times in seconds, sizes in bytes."""
        return {
            "model": self.model,
            "keys": self.asked.num_keys,
            "prompts": self.asked.num_prompts,
            "seed": self.asked.seed,
            "accuracy": self.accuracy,
            "identical": self.identical,
            "needle_rows": _needles(self.needles),
            "contexts": [_context(context) for context in self.contexts],
        }

    def plot(self) -> str:
        """Accuracy of each run by context length, as SVG."""
        contexts = sorted(self.contexts, key=lambda report: report.context)
        series = {
            name: sorted((report.context, report.accuracy[name]) for report in self._with(name))
            for name in self.contexts[0].runs
        }
        marks = [(report.context, f"{report.context}") for report in contexts]
        end = contexts[-1].context
        title = f"accuracy, {self.asked.num_keys} keys"
        return svg.document([svg.Panel(title, series, 1.0, svg.Axis(end, f"{end} tokens", marks), dots=True)])

    def _with(self, run: str) -> list[ContextReport]:
        return [context for context in self.contexts if run in context.runs]


def _needles(rows: NeedleRows) -> dict[str, Any]:
    return {**asdict(rows), "share_from_host": rows.share_from_host}


def _context(report: ContextReport) -> dict[str, Any]:
    stats, resident = report.runs[HISPARSE].stats, report.runs[RESIDENT].stats
    assert stats is not None
    assert resident is not None
    return {
        "context": report.context,
        "accuracy": report.accuracy,
        "identical": not report.differing,
        "differing": list(report.differing),
        "needle_rows": _needles(report.needles),
        "kv": {"total_bytes": resident.kv.total_bytes, "device_bytes": stats.kv.device_bytes},
        "spills": stats.spills,
        "preemptions": stats.preemptions,
        "seconds": {name: run.seconds for name, run in report.runs.items()},
        "answers": list(_answers(report.questions, report.runs)),
    }


def _answers(questions: Sequence[Question], runs: dict[str, Run]) -> Iterator[dict[str, Any]]:
    for index, question in enumerate(questions):
        yield {
            "name": question.prompt.name,
            "answer": question.prompt.answer.strip(),
            "depth": question.prompt.depth,
            "prompt_tokens": len(question.ids),
            "said": {name: run.texts[index].strip() for name, run in runs.items()},
            "needle_rows": _needles(runs[HISPARSE].needles[index]),
        }
