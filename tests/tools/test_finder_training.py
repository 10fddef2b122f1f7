"""A run goes through its stages in time, can be stopped and continued, and ends with a checkpoint that others load."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools import train_finder
from tools.finder.data import FACT_VALUE, FIRST_DIGIT, LATER_DIGIT, BatchOrder, Feeder, SequenceBuilder
from tools.finder.evaluate import PromptMaker, answers_right, run_cell
from tools.finder.export import MAX_BYTES, export, rounded, served, stock_check
from tools.finder.model import Finder, FinderShape
from tools.finder.report import plot, read_log
from tools.finder.schedule import FULL, SMOKE, Cell, Mix, Stage
from tools.finder.session import stages_of
from tools.finder.train import Progress, Trainer, choose_probes, losses_of, targets_of

CPU = torch.device("cpu")


def trainer_of(shape: FinderShape, builder: SequenceBuilder, stages: tuple[Stage, ...], seconds: float) -> Trainer:
    preset = replace(SMOKE, shape=shape, stages=stages, warmup_steps=2)
    return Trainer(Finder(shape), preset, Feeder(builder, Path("unused"), 0), Progress(0, seconds))


def run_steps(trainer: Trainer, num: int) -> None:
    for index, _ in enumerate(trainer.run(math.inf, lambda entry: None), start=1):
        if index == num:
            break


@pytest.mark.parametrize("preset", [FULL, SMOKE])
def test_stages_end_in_order_and_the_last_with_the_run(preset: Any) -> None:
    ends = [stage.until for stage in preset.stages]
    assert ends == sorted(ends)
    assert ends[-1] == 1.0
    # Look-up is learned with dense attention, and what ships reads `topk` positions.
    assert not any(preset.stages[0].mixes[0].topks)
    assert all(preset.shape.topk in mix.topks for mix in preset.stages[-1].mixes)


def test_full_training_reaches_every_context_that_it_is_judged_on() -> None:
    lengths = {mix.length for stage in FULL.stages for mix in stage.mixes}
    assert max(cell.context for cell in FULL.cells) <= max(lengths)
    assert set(FULL.goals) <= set(FULL.cells)


def test_the_rate_rises_stays_and_falls() -> None:
    rates = [FULL.rate(step, share) for step, share in ((0, 0.0), (199, 0.1), (999, 0.45), (1999, 0.9), (2999, 1.0))]
    assert rates[0] < rates[1] == rates[2] == FULL.peak_rate
    assert rates[2] > rates[3] > rates[4] > 0


def test_a_stage_takes_its_mixes_and_selections_in_turn() -> None:
    stage = Stage("x", (Mix(64, 2, (16, 32)), Mix(128, 1)), 1.0)
    assert [stage.mix(index).length for index in range(4)] == [64, 128, 64, 128]
    assert [stage.topk(index) for index in range(4)] == [16, 0, 32, 0]
    assert [order.length for order in stage.orders(0, 1, 3)] == [128, 64, 128]


def test_a_loss_is_taken_on_every_answer_and_never_on_what_a_fact_tells(builder: SequenceBuilder) -> None:
    batch = builder.batch(BatchOrder(0, 0, 4, 224))
    targets = targets_of(batch, np.random.default_rng(0), CPU)
    kinds = torch.from_numpy(batch.kinds[:, 1:]).flatten()
    for kind in (FIRST_DIGIT, LATER_DIGIT):
        assert (targets.kinds == kind).sum() == (kinds == kind).sum()
    assert not (targets.kinds == FACT_VALUE).any()
    assert torch.equal(targets.tokens, torch.from_numpy(batch.tokens[:, 1:]).flatten()[targets.rows].long())


def test_probes_favour_answers_and_facts(builder: SequenceBuilder) -> None:
    kinds = torch.from_numpy(builder.batch(BatchOrder(0, 0, 16, 448)).kinds).long()
    probes = choose_probes(kinds, 16)
    assert all(row.unique().numel() == 16 for row in probes)
    chosen = kinds.gather(1, probes)
    for wanted in ((FIRST_DIGIT, LATER_DIGIT), (FACT_VALUE,)):
        share = sum((chosen == kind).float().mean() for kind in wanted)
        assert share > 1.5 * sum((kinds == kind).float().mean() for kind in wanted)


@pytest.mark.parametrize("topk", [0, 16])
def test_a_few_steps_on_one_batch_lower_its_loss(shape: FinderShape, builder: SequenceBuilder, topk: int) -> None:
    model = Finder(shape)
    targets = targets_of(builder.batch(BatchOrder(0, 0, 4, 112)), np.random.default_rng(0), CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = losses_of(model, targets, topk, 16)
    losses = first
    for _ in range(15):
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
        losses = losses_of(model, targets, topk, 16)
    assert losses.answer < 0.7 * first.answer
    assert losses.text < 0.9 * first.text


def test_a_stage_ends_when_it_is_learned_or_when_its_time_is_over(shape: FinderShape, builder: SequenceBuilder) -> None:
    never, always = 2.0, 0.0
    short = Mix(56, 1)
    stages = (
        Stage("learned", (short,), 1.0, always, least_steps=3),
        Stage("timed", (short,), 0.0, never),
        Stage("last", (short,), 1.0, never),
    )
    trainer = trainer_of(shape, builder, stages, 3600.0)
    run_steps(trainer, 3)
    assert (trainer.stage.name, trainer.progress.stage_step) == ("timed", 0)
    run_steps(trainer, 1)
    assert trainer.stage.name == "last"
    run_steps(trainer, 2)
    assert (trainer.stage.name, trainer.progress.step) == ("last", 6)


def test_a_run_that_is_continued_ends_where_an_unbroken_one_does(
    shape: FinderShape, builder: SequenceBuilder, tmp_path: Path
) -> None:
    # An hour is planned, so that the clock moves no rate; numbers are equal but for that.
    stages = (Stage("only", (Mix(56, 2),), 1.0),)
    unbroken = trainer_of(shape, builder, stages, 1e9)
    start = {name: values.clone() for name, values in unbroken.model.state_dict().items()}
    torch.manual_seed(5)
    run_steps(unbroken, 6)
    broken = trainer_of(shape, builder, stages, 1e9)
    broken.model.load_state_dict(start)
    torch.manual_seed(5)
    run_steps(broken, 3)
    broken.save(tmp_path / "checkpoint.pt")
    torch.manual_seed(99)
    continued = trainer_of(shape, builder, stages, 1e9)
    continued.load(tmp_path / "checkpoint.pt")
    assert continued.progress.step == 3
    run_steps(continued, 3)
    ends = [trainer.model.state_dict() for trainer in (unbroken, continued, broken)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    # The control: without the last three steps the weights are others.
    assert not all(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])


def test_a_run_stops_at_its_time_and_at_the_calls(shape: FinderShape, builder: SequenceBuilder) -> None:
    stages = (Stage("only", (Mix(56, 1),), 1.0),)
    trainer = trainer_of(shape, builder, stages, 0.2)
    assert list(trainer.run(math.inf, lambda entry: None))[-1] >= 0.2
    trainer = trainer_of(shape, builder, stages, 3600.0)
    began = time.monotonic()
    list(trainer.run(began + 0.2, lambda entry: None))
    assert 0.2 <= trainer.progress.elapsed < 5.0


def test_a_loss_that_is_not_finite_ends_the_run(shape: FinderShape, builder: SequenceBuilder) -> None:
    trainer = trainer_of(shape, builder, (Stage("only", (Mix(56, 1),), 1.0),), 3600.0)
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError):
        run_steps(trainer, 1)


class Oracle(torch.nn.Module):
    """Knows each prompt's answer and says it; a wrong last digit if told to."""

    def __init__(self, pairs: list[tuple[list[int], list[int]]], vocab: int, wrong: bool) -> None:
        super().__init__()
        self.shape = FinderShape(vocab=vocab)
        self.lm_head = torch.nn.Identity()
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self._pairs, self._wrong = pairs, wrong

    def forward(self, tokens: torch.Tensor, topk: int, window: bool) -> tuple[torch.Tensor, None]:
        said = torch.zeros(*tokens.shape, self.shape.vocab)
        for row, (prompt, answer) in enumerate(self._pairs):
            for place, token in enumerate(answer):
                is_wrong = self._wrong and place == len(answer) - 1
                said[row, len(prompt) + place - 1, token + is_wrong] = 1.0
        return said, None


def test_an_answer_counts_only_if_all_of_it_is_right(tokenizer: Any) -> None:
    maker = PromptMaker(tokenizer, 0)
    pairs = maker.encode(maker.prompts(Cell(128, 2), 4))
    for wrong in (False, True):
        model: Any = Oracle(pairs, tokenizer.get_vocab_size(), wrong)
        assert answers_right(model, pairs) == [not wrong] * 4


def test_prompts_keep_to_their_context_and_differ_by_seed(tokenizer: Any) -> None:
    cell = Cell(256, 4)
    prompts = PromptMaker(tokenizer, 0).prompts(cell, 8)
    for prompt in prompts:
        assert 200 < len(tokenizer.encode(prompt.text + prompt.answer).ids) <= 256
    assert PromptMaker(tokenizer, 0).prompts(cell, 8) == prompts
    assert PromptMaker(tokenizer, 1).prompts(cell, 8) != prompts


def test_a_cell_without_time_counts_nothing(shape: FinderShape, tokenizer: Any) -> None:
    maker = PromptMaker(tokenizer, 0)
    assert run_cell(Finder(shape), maker, Cell(64, 1), 4, time.monotonic() - 1).prompts == 0
    outcome = run_cell(Finder(shape), maker, Cell(64, 1), 4, math.inf)
    assert outcome.prompts == sum(prompts for _, prompts in outcome.thirds) == 4


def test_stock_classes_load_the_checkpoint(shape: FinderShape, tokenizer: Any, tmp_path: Path) -> None:
    model = Finder(shape)
    export(model, tokenizer, tmp_path)
    maker = PromptMaker(tokenizer, 0)
    prompts = maker.prompts(Cell(96, 2), 2)
    checked = stock_check(tmp_path, prompts, CPU)
    assert checked["tokenised_alike"] == 2
    assert checked["max_logit_difference"] < 1e-4 < checked["max_logit"]
    assert json.loads((tmp_path / "config.json").read_text())["index_topk"] == shape.topk
    # What is evaluated are the weights that ship.
    shipped = served(model, CPU).state_dict()
    assert all(torch.equal(shipped[name].bfloat16(), values) for name, values in rounded(model.state_dict()).items())


def test_a_model_that_is_too_large_is_not_exported(tokenizer: Any, tmp_path: Path) -> None:
    large = FinderShape(layers=1, hidden=64, intermediate=40_000)
    with pytest.raises(ValueError, match=str(MAX_BYTES)):
        export(Finder(large), tokenizer, tmp_path)


def test_the_command_trains_continues_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shape: FinderShape
) -> None:
    quick = replace(
        SMOKE,
        shape=replace(shape, hidden=32, intermediate=32),
        stages=(Stage("first", (Mix(56, 2),), 0.5), Stage("second", (Mix(112, 2, (16,)),), 1.0)),
        cells=(Cell(64, 1), Cell(96, 2)),
        goals={Cell(96, 2): 0.9},
        eval_prompts=2,
        eval_seconds=0.0,
        corpus_bytes=200_000,
    )
    monkeypatch.setattr("tools.finder.session.PRESETS", {"smoke": quick})
    out = tmp_path / "finder"
    arguments = ["--out", str(out), "--smoke", "--device", "cpu", "--workers", "0", "--train-minutes", "0.03"]
    # The margin alone is longer than the first call.
    assert train_finder.main([*arguments, "--minutes", "0.1"]) == train_finder.UNFINISHED
    assert not (out / "model.safetensors").exists()
    assert train_finder.main([*arguments, "--minutes", "2"]) == 0
    assert "96 tokens, 2 keys: 0.0%, goal 90% missed" in capsys.readouterr().out
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == names | {"eval.json", "log.jsonl", "training.svg", "README.md"}
    run = json.loads((out / "eval.json").read_text())
    assert [cell["prompts"] for cell in run["cells"]] == [2, 2]
    assert [stage["stage"] for stage in run["stages"]] == ["first", "second"]
    assert "| 96 | – | 0.0% (2) |" in (out / "README.md").read_text()
    assert run["command"].startswith("python tools/train_finder.py --out finder --smoke ")
    assert str(tmp_path) not in (out / "eval.json").read_text()
    with pytest.raises(ValueError, match="seed 0"):
        train_finder.main([*arguments, "--seed", "1"])


def test_the_log_is_summed_by_stage_and_drawn(tmp_path: Path) -> None:
    entry = {"answer": 1.0, "text": 2.0, "index": 0.1, "first_right": 0.5, "later_right": 0.25}
    steps = [
        {"step": 10, "seconds": 1.0, "stage": "a", **entry},
        {"step": 20, "seconds": 3.0, "stage": "a", **entry},
        {"step": 30, "seconds": 4.0, "stage": "b", **entry},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [{"began": 0.0}, *steps]))
    assert read_log(path) == steps
    sums = [(stage["stage"], stage["steps"], stage["seconds"]) for stage in stages_of(steps)]
    assert sums == [("a", 20, 3.0), ("b", 10, 1.0)]
    drawing = plot(steps)
    assert drawing.startswith("<svg")
    assert drawing.count("<polyline") == 5
    assert drawing.count(">b</text>") == 2
