"""The same questions answered in several ways: KV on the device, mostly on the host, on a broken host, and by stock."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hisparse.engine import Engine, EngineConfig, EngineStats, LoadedModel, SamplingParams
from hisparse.engine.executor import default_backend
from hisparse.engine.stock import stock_generate, stock_model
from hisparse.errors import InvariantError
from hisparse.evaluation.broken import BrokenHostBackend
from hisparse.evaluation.provenance import NeedleRows, NeedleWatch
from hisparse.evaluation.questions import Question

RESIDENT, HISPARSE, BROKEN, STOCK = "resident", "hisparse", "broken", "stock"

Progress = Callable[[str, int], None]
"""Told the name of a run and how many prompt tokens it has just read."""


@dataclass(frozen=True, slots=True)
class Run:
    """One way of answering. Per question, in order: `output_ids`, the `texts` they are, and whether `right`.

    `needles` is empty unless the run was watched; `stats` is None for stock transformers, which has no such things.
    """

    output_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    right: tuple[bool, ...]
    seconds: float
    needles: tuple[NeedleRows, ...] = ()
    stats: EngineStats | None = None

    @property
    def accuracy(self) -> float:
        """Share of the questions that were answered exactly."""
        return sum(self.right) / len(self.right)


def run_resident(loaded: LoadedModel, questions: Sequence[Question], config: EngineConfig, progress: Progress) -> Run:
    """With everything on the device. Raises `InvariantError` if a page left it."""
    run = _run(RESIDENT, Engine(loaded, replace(config, slab_bytes=None)), questions, progress)
    if run.stats is None or run.stats.spills:
        raise InvariantError("the resident run spilled pages")
    return run


def run_hisparse(loaded: LoadedModel, questions: Sequence[Question], config: EngineConfig, progress: Progress) -> Run:
    """With the slab of `config`, watching where needle rows come from."""
    watch = NeedleWatch()
    return _run(HISPARSE, Engine(loaded, config, observer=watch), questions, progress, watch)


def run_broken(loaded: LoadedModel, questions: Sequence[Question], config: EngineConfig, progress: Progress) -> Run:
    """As `run_hisparse`, over a host tier that gives wrong rows."""
    backend = BrokenHostBackend(default_backend(loaded, config))
    return _run(BROKEN, Engine(loaded, config, backend=backend), questions, progress)


def run_stock(loaded: LoadedModel, questions: Sequence[Question], config: EngineConfig, progress: Progress) -> Run:
    """By stock transformers' own `generate`, one question at a time."""
    began = time.monotonic()
    model = stock_model(loaded, config.kv_dtype)
    outputs = []
    for question in questions:
        params = sampling(question)
        outputs.append(stock_generate(model, question.ids, params, params.max_tokens, loaded.eos_token_ids).tokens)
        progress(STOCK, len(question.ids))
    texts = tuple(loaded.tokenizer.decode(tokens) for tokens in outputs)
    right = tuple(question.is_answered_by(text) for question, text in zip(questions, texts, strict=True))
    return Run(tuple(outputs), texts, right, time.monotonic() - began)


def sampling(question: Question) -> SamplingParams:
    """Greedy, as many tokens as an answer has."""
    return SamplingParams(max_tokens=question.answer_tokens)


def _run(
    name: str, engine: Engine, questions: Sequence[Question], progress: Progress, watch: NeedleWatch | None = None
) -> Run:
    began = time.monotonic()
    with engine:
        request_ids = [engine.add_request(question.ids, sampling(question)) for question in questions]
        if watch is not None:
            for request_id, question in zip(request_ids, questions, strict=True):
                watch.watch(request_id, question)
        for step in engine.run():
            progress(name, step.prefill_tokens)
        results, stats = engine.results(), engine.stats()
    texts = tuple(result.text for result in results)
    return Run(
        output_ids=tuple(result.output_ids for result in results),
        texts=texts,
        right=tuple(question.is_answered_by(text) for question, text in zip(questions, texts, strict=True)),
        seconds=time.monotonic() - began,
        needles=tuple(map(watch.rows, request_ids)) if watch is not None else (),
        stats=stats,
    )
