"""The training loop: batches in, weights out, stopped and continued at any step."""

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tools.finder.data import FACT_VALUE, FIRST_DIGIT, LATER_DIGIT, TEXT, Batch, Feeder
from tools.finder.model import Finder
from tools.finder.schedule import Preset, Stage

TEXT_SHARE = 0.25
"""Share of the text tokens that the language loss is taken on."""
TEXT_WEIGHT = 0.2
FIRST_DIGIT_WEIGHT = 1.5
MAX_NORM = 1.0
SLOW_LENGTH = 8192
"""Steps on sequences of this length take long enough to look at the clock after each of them."""

Log = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Progress:
    """How far a run is. The loop changes it; a checkpoint holds it."""

    seed: int
    train_seconds: float = 1.0
    """Training time of the whole run, over all its calls."""
    elapsed: float = 0.0
    step: int = 0
    stage: int = 0
    stage_step: int = 0
    hit_rate: float = 0.0
    """Running share of first digits that were right, in this stage."""

    @property
    def share(self) -> float:
        """Of the training time, what has passed."""
        return self.elapsed / self.train_seconds


@dataclass(frozen=True, slots=True)
class Targets:
    """A batch on the device. `inputs` `[batch, length]`; `rows`: flat places in it that a loss is taken on, with what
    follows them (`tokens`), and what that is (`kinds`); `kinds_of_rows` `[batch, length]` is every row's.
    """

    inputs: torch.Tensor
    rows: torch.Tensor
    tokens: torch.Tensor
    kinds: torch.Tensor
    kinds_of_rows: torch.Tensor


def targets_of(batch: Batch, rng: np.random.Generator, device: torch.device) -> Targets:
    """Choose the rows of the loss (all answers, some text) and move a batch to `device`."""
    kinds = batch.kinds[:, 1:]
    text = (kinds == TEXT) & (rng.random(kinds.shape, np.float32) < TEXT_SHARE)
    rows = np.flatnonzero((text | (kinds == FIRST_DIGIT) | (kinds == LATER_DIGIT)).ravel())

    def put(values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        moved = tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
        return moved.long()

    wanted, kinds_of_rows = batch.tokens[:, 1:].ravel()[rows], kinds.ravel()[rows]
    return Targets(put(batch.tokens[:, :-1]), put(rows), put(wanted), put(kinds_of_rows), put(kinds))


def choose_probes(kinds: torch.Tensor, num: int) -> torch.Tensor:
    """Rows on which the indexer learns, `[batch, num]`: a third each of answers, facts' values, and all rows alike."""
    weights = torch.full(kinds.shape, 1.0 / kinds.shape[1], device=kinds.device)
    for wanted in ((kinds == FIRST_DIGIT) | (kinds == LATER_DIGIT), kinds == FACT_VALUE):
        weights += wanted / wanted.sum(1, keepdim=True).clamp(min=1)
    return torch.multinomial(weights, num)


@dataclass(frozen=True, slots=True)
class Losses:
    """Device scalars of one step: what is minimised, its parts, and the shares of digits that are right."""

    total: torch.Tensor
    answer: torch.Tensor
    text: torch.Tensor
    index: torch.Tensor
    first_right: torch.Tensor
    later_right: torch.Tensor


def losses_of(model: Finder, targets: Targets, topk: int, num_probes: int) -> Losses:
    """Forward and losses: answers' cross entropy, a little language, and the indexers' divergence from attention."""
    probes = choose_probes(targets.kinds_of_rows, num_probes)
    hidden, index = model(targets.inputs, topk, probes)
    logits = model.lm_head(hidden.flatten(0, 1)[targets.rows]).float()
    entropy = functional.cross_entropy(logits, targets.tokens, reduction="none")
    right = logits.argmax(-1) == targets.tokens
    first, later = targets.kinds == FIRST_DIGIT, targets.kinds == LATER_DIGIT

    def mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (values * weights).sum() / weights.sum().clamp(min=1)

    answer = mean(entropy, first * FIRST_DIGIT_WEIGHT + later)
    text = mean(entropy, ~(first | later))
    total = answer + TEXT_WEIGHT * text + index
    return Losses(total, answer, text, index, mean(right, first), mean(right, later))


def optimizer_of(model: Finder, rate: float) -> torch.optim.AdamW:
    """AdamW over two groups, the indexers and all else, so that each is clipped by its own norm."""
    index = [values for name, values in model.named_parameters() if "indexer" in name]
    others = [values for name, values in model.named_parameters() if "indexer" not in name]
    groups = [{"params": others}, {"params": index}]
    fused = others[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=fused)


class Trainer:
    """One run. `progress`, the model and the optimizer are the whole of its state."""

    def __init__(self, model: Finder, preset: Preset, feeder: Feeder, progress: Progress) -> None:
        self.model = model
        self.preset = preset
        self.progress = progress
        self._feeder = feeder
        self._device = next(model.parameters()).device
        self._optimizer = optimizer_of(model, preset.peak_rate)

    @property
    def stage(self) -> Stage:
        """The stage that the next step belongs to."""
        return self.preset.stages[self.progress.stage]

    def run(self, deadline: float, log: Log) -> Iterator[float]:
        """Train until the run's time is spent or `deadline` (of `time.monotonic`) is near.

        Gives out the training time so far every few steps, so that the caller can save. Raises `FloatingPointError`
        if the loss is not finite.
        """
        began = time.monotonic() - self.progress.elapsed
        while self.progress.elapsed < self.progress.train_seconds and time.monotonic() < deadline:
            length = self.stage.mix(self.progress.stage_step).length
            losses = self._step()
            self.progress.stage_step += 1
            self.progress.step += 1
            tenth = self.progress.step % 10 == 0
            if tenth or length >= SLOW_LENGTH or self._device.type == "cpu":
                # Reading a loss waits for the device, so the clock is read after it.
                self._note(losses, log if tenth else _no_log, began)
                yield self.progress.elapsed
        self.progress.elapsed = time.monotonic() - began

    def _step(self) -> Losses:
        progress, stage = self.progress, self.stage
        index, mix = progress.stage_step, stage.mix(progress.stage_step)
        batch = self._feeder.take(stage.orders(progress.seed * 100 + progress.stage, index, 64))
        targets = targets_of(batch, np.random.default_rng((progress.seed, progress.step)), self._device)
        rate = self.preset.rate(progress.step, progress.share)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            losses = losses_of(self.model, targets, stage.topk(index), mix.probes)
        self._optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        for group in self._optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], MAX_NORM)
        self._optimizer.step()
        return losses

    def _note(self, losses: Losses, log: Log, began: float) -> None:
        progress, stage = self.progress, self.stage
        values = {name: float(getattr(losses, name).detach()) for name in Losses.__slots__}
        if not math.isfinite(values["total"]):
            raise FloatingPointError(f"the loss is {values['total']} at step {progress.step}")
        progress.elapsed = time.monotonic() - began
        progress.hit_rate += (values["first_right"] - progress.hit_rate) / 10
        rate = self.preset.rate(progress.step, progress.share)
        peak = torch.cuda.max_memory_allocated() >> 20 if self._device.type == "cuda" else 0
        place = {"step": progress.step, "seconds": progress.elapsed, "stage": stage.name}
        log({**place, **values, "rate": rate, "peak_mib": peak})
        learned = progress.hit_rate >= stage.enough and progress.stage_step >= stage.least_steps
        if progress.stage + 1 < len(self.preset.stages) and (learned or progress.share >= stage.until):
            progress.stage, progress.stage_step, progress.hit_rate = progress.stage + 1, 0, 0.0

    def save(self, path: Path) -> None:
        """Write everything that `load` needs, so that a reader never sees half of it."""
        state = {
            "progress": asdict(self.progress),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        partial = path.with_name(path.name + ".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Continue where `save` was called. Raises what torch raises if the file is of another model."""
        state = torch.load(path, map_location=self._device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        self.progress = Progress(**state["progress"])


def _no_log(values: dict[str, Any]) -> None:
    """Keep the values to ourselves."""
