"""The finder that ships answers questions about real text with most of its KV on the host, and stock classes agree."""

from dataclasses import replace

import pytest

from hisparse.engine import EngineConfig, LoadedModel, load_model
from hisparse.engine.builtin import FINDER
from hisparse.evaluation.evaluate import evaluate
from hisparse.evaluation.prompts import NAMES
from hisparse.evaluation.questions import Question, QuestionSet
from hisparse.evaluation.report import EvalReport
from hisparse.evaluation.runs import run_resident, run_stock

ASKED = QuestionSet(contexts=(2048,), num_keys=4, num_prompts=6, seed=1)
STOCK_PROMPTS = 3


def config(model: LoadedModel) -> EngineConfig:
    """A slab that holds a third of one prompt's rows, what prefill stages and hot rows included."""
    rows = 2048 // 3
    slab_bytes = rows * model.geometry.num_layers * model.geometry.row.row_bytes
    return EngineConfig(max_tokens=2048, slab_bytes=slab_bytes, block_size=16, max_running=2, fixed_shapes=True)


@pytest.fixture(scope="module")
def finder() -> LoadedModel:
    """The checkpoint in float32."""
    return load_model(FINDER)


@pytest.fixture(scope="module")
def questions(finder: LoadedModel) -> list[Question]:
    """Questions among four facts each."""
    return ASKED.questions(finder.tokenizer.encode)[2048]


@pytest.fixture(scope="module")
def report(finder: LoadedModel, questions: list[Question]) -> EvalReport:
    """The three runs of the engine."""
    return evaluate(finder, ASKED, {2048: questions}, lambda _: config(finder))


def test_every_answer_is_right_from_the_host_as_it_is_from_the_device(report: EvalReport) -> None:
    assert report.accuracy["resident"] == report.accuracy["hisparse"] == 1.0
    assert report.identical
    # Each of five digits was read at least once, and all or nearly all of them from the host.
    assert report.needles.read >= 5 * ASKED.num_prompts
    assert report.needles.share_from_host is not None
    assert report.needles.share_from_host > 0.8


def test_a_broken_host_tier_spoils_every_answer_that_was_read_from_it(report: EvalReport) -> None:
    runs = report.contexts[0].runs
    from_host = [rows.from_host > 0 for rows in runs["hisparse"].needles]
    assert [not right for right in runs["broken"].right] == from_host
    assert report.accuracy["broken"] < 0.2


def test_stock_transformers_gives_the_same_tokens(
    finder: LoadedModel, questions: list[Question], report: EvalReport
) -> None:
    stock = run_stock(finder, questions[:STOCK_PROMPTS], config(finder), lambda *_: None)
    assert stock.output_ids == report.contexts[0].runs["hisparse"].output_ids[:STOCK_PROMPTS]
    assert all(stock.right)


def test_a_fact_that_was_not_told_is_not_answered(finder: LoadedModel, questions: list[Question]) -> None:
    """The control: the text is what is read, the values are not in the weights."""
    asked = questions[0].prompt
    other = next(name for name in NAMES if f"the key of {name} " not in asked.text)
    told = f"# the key of {asked.name} is{asked.answer}\n"
    assert asked.text.count(told) == 1
    ids = finder.tokenizer.encode(asked.text.replace(told, f"# the key of {other} is{asked.answer}\n"))
    untold = replace(questions[0], ids=tuple(ids))
    run = run_resident(finder, [questions[0], untold], config(finder), lambda *_: None)
    assert run.right == (True, False)


def test_names_and_digits_are_one_token_each(finder: LoadedModel) -> None:
    encode = finder.tokenizer.encode
    assert all(len(encode(f" {name}")) == 1 for name in NAMES)
    assert len(encode(" 90210")) == 5


def test_text_comes_back_from_its_tokens(finder: LoadedModel, questions: list[Question]) -> None:
    text = questions[0].prompt.text
    assert finder.tokenizer.decode(finder.tokenizer.encode(text)) == text
