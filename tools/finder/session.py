"""One call of the training command, from text to checkpoint."""

import json
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks._record import provenance
from hisparse.evaluation.prompts import NAMES, library_files, read_sources
from tools.finder.data import Corpus, Feeder, SequenceBuilder
from tools.finder.evaluate import PromptMaker, run_cell, run_cells
from tools.finder.export import export, load_weights, served, stock_check
from tools.finder.model import Finder
from tools.finder.report import Journal, card, plot, read_log
from tools.finder.schedule import PRESETS, Cell
from tools.finder.train import FIRST_DIGIT_WEIGHT, TEXT_WEIGHT, Progress, Trainer
from tools.finder.vocabulary import FactTokens, train_tokenizer
from tools.finder.wiring import wire

STOCK_CELL = Cell(1024, 4)
STOCK_PROMPTS = 8
WINDOW_CELL = Cell(2048, 4)
WINDOW_PROMPTS = 32
MARGIN_SECONDS = 12.0
"""Kept free at the end of a call: for the stock classes, the reports and what was forgotten."""
ENOUGH_SHARE = 0.98
"""Of the training time, what has to be spent before the result is evaluated."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, as a record shows it in `command`, and parsed.

    Folders: `out` for what is kept, `work` for what only a later call needs.
    """

    command: tuple[str, ...]
    out: Path
    work: Path
    minutes: float
    train_minutes: float | None
    seed: int
    preset: str
    device: str
    workers: int
    wire: bool
    start_from: Path | None
    checkpoint_seconds: float
    rate: float | None


class Session:
    """Holds what the steps of a call share. `deadline` is of `time.monotonic`."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        """Prepares text, model and trainer, and continues a checkpoint of `options.work` if there is one.

        Raises `ValueError` if that checkpoint is of another seed or start.
        """
        self.deadline = time.monotonic() + 60 * options.minutes
        self.options = options
        preset = PRESETS[options.preset]
        self.preset = replace(preset, peak_rate=options.rate or preset.peak_rate)
        self._say = say
        self._device = torch.device(options.device)
        options.out.mkdir(parents=True, exist_ok=True)
        options.work.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        self.tokenizer = prepare_text(options.work, self.preset.corpus_bytes, self.preset.shape.vocab)
        self._corpus_path = options.work / "corpus.npy"
        corpus = Corpus.load(self._corpus_path)
        self._corpus_tokens = len(corpus.tokens)
        builder = SequenceBuilder(corpus, FactTokens.of(self.tokenizer))
        self._feeder = Feeder(builder, self._corpus_path, options.workers)
        self.trainer = Trainer(self._first_model(), self.preset, self._feeder, Progress(options.seed))
        self._continue()
        self.journal = Journal(options.out / "log.jsonl", say)

    def _first_model(self) -> Finder:
        model = Finder(self.preset.shape)
        if self.options.wire:
            wire(model)
        if self.options.start_from is not None:
            load_weights(model, self.options.start_from)
        return model.to(self._device)

    @property
    def _train_until(self) -> float:
        """When this call has to stop training, to have the time that the preset keeps for evaluation."""
        return self.deadline - self.preset.eval_seconds - MARGIN_SECONDS

    def _plan(self) -> None:
        """At the start of a run, decide how long it trains over all its calls."""
        minutes = self.options.train_minutes
        seconds = self._train_until - time.monotonic() if minutes is None else 60 * minutes
        self.trainer.progress.train_seconds = max(1.0, seconds)

    @property
    def checkpoint(self) -> Path:
        """The file that a later call continues from."""
        return self.options.work / "checkpoint.pt"

    def _continue(self) -> None:
        if not self.checkpoint.exists():
            return
        self.trainer.load(self.checkpoint)
        progress = self.trainer.progress
        if progress.seed != self.options.seed:
            raise ValueError(f"{self.checkpoint} is of seed {progress.seed}: use its seed, or another --work")
        self._say(f"continuing at step {progress.step}, {progress.elapsed:.0f} of {progress.train_seconds:.0f} s")

    def train(self) -> bool:
        """Train until the training time is spent (then True), or until this call has no more time for it."""
        options, progress = self.options, self.trainer.progress
        if progress.step == 0:
            self._plan()
        self.journal.write({"began": progress.elapsed, "train_seconds": progress.train_seconds, "seed": options.seed})
        saved = progress.elapsed
        try:
            for elapsed in self.trainer.run(self._train_until, self.journal.step):
                if elapsed - saved >= options.checkpoint_seconds:
                    self.trainer.save(self.checkpoint)
                    saved = elapsed
        finally:
            self._feeder.close()
        self.trainer.save(self.checkpoint)
        # A step may end just before the planned time and just after this call's.
        return progress.elapsed >= ENOUGH_SHARE * progress.train_seconds

    def finish(self) -> dict[str, Any]:
        """Export first, then evaluate, so that a call that is cut off leaves a checkpoint. Returns `eval.json`."""
        out, preset = self.options.out, self.preset
        export(self.trainer.model, self.tokenizer, out)
        (out / "training.svg").write_text(plot(read_log(out / "log.jsonl")), encoding="utf-8")
        model = served(self.trainer.model, self._device)
        maker = PromptMaker(self.tokenizer, self.options.seed)
        run = self._facts()
        run["window_control"] = run_cell(
            model, maker, WINDOW_CELL, WINDOW_PROMPTS, self.deadline, window=True
        ).as_json()
        run["stock"] = stock_check(out, maker.prompts(STOCK_CELL, STOCK_PROMPTS), self._device)
        self._say(f"last {preset.shape.topk} tokens only: {run['window_control']}; stock classes: {run['stock']}")
        until = self.deadline - MARGIN_SECONDS / 2
        for outcome in run_cells(model, maker, preset.cells, preset.eval_prompts, until, self._say):
            run["cells"].append(outcome.as_json())
            if outcome.cell in preset.goals:
                goal = preset.goals[outcome.cell]
                reached = {"goal": goal, "reached": outcome.accuracy >= goal}
                run["goals"].append({**outcome.as_json(), **reached})
            (out / "eval.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        (out / "README.md").write_text(card(preset, {"eval.json": run}), encoding="utf-8")
        return run

    def _facts(self) -> dict[str, Any]:
        """What `eval.json` says of the run itself."""
        options, progress = self.options, self.trainer.progress
        cuda = self._device.type == "cuda"
        return {
            "benchmark": "finder",
            **provenance(options.command),
            "seed": options.seed,
            "preset": options.preset,
            "wired": options.wire,
            "started_from": options.start_from is not None,
            "device": torch.cuda.get_device_name() if cuda else "CPU",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "parameters": sum(values.numel() for values in self.trainer.model.parameters()),
            "corpus_tokens": self._corpus_tokens,
            "names": len(NAMES),
            "first_digit_weight": FIRST_DIGIT_WEIGHT,
            "text_weight": TEXT_WEIGHT,
            "peak_rate": self.preset.peak_rate,
            "train_seconds": progress.elapsed,
            "steps": progress.step,
            "stages": stages_of(read_log(options.out / "log.jsonl")),
            "stock_context": STOCK_CELL.context,
            "cells": [],
            "goals": [],
        }


def prepare_text(work: Path, corpus_bytes: int, vocab: int) -> Any:
    """The tokenizer, made and stored in `work` together with the tokens of the training files, or found there.

    Both depend on the Python library alone, not on the run's seed.
    """
    stored = work / "tokenizer.json"
    if stored.exists():
        return Tokenizer.from_file(str(stored))
    texts = read_sources(library_files(held_out=False), corpus_bytes, random.Random(0))
    tokenizer = train_tokenizer(texts, vocab)
    tokens = np.concatenate([np.array(encoding.ids) for encoding in tokenizer.encode_batch(texts)])
    Corpus.of(tokens, FactTokens.of(tokenizer).newline).save(work / "corpus.npy")
    # Last, because it says that all of it is there.
    tokenizer.save(str(stored))
    return tokenizer


def stages_of(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many steps and seconds each stage took, from the log's entries."""
    stages: list[dict[str, Any]] = []
    before = {"step": 0, "seconds": 0.0}
    for entry in steps:
        if not stages or stages[-1]["stage"] != entry["stage"]:
            stages.append({"stage": entry["stage"], "steps": 0, "seconds": 0.0})
        stages[-1]["steps"] += entry["step"] - before["step"]
        stages[-1]["seconds"] += entry["seconds"] - before["seconds"]
        before = entry
    return stages
