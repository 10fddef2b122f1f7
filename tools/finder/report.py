"""What a run leaves for people: a log of JSON lines, a plot of it, and the model card."""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hisparse.evaluation import svg
from hisparse.evaluation.prompts import HELD_OUT, fact_line, question
from tools.finder.data import FACT_COUNTS
from tools.finder.schedule import Preset


def read_log(path: Path) -> list[dict[str, Any]]:
    """The training steps of a log, in order."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [entry for entry in entries if "step" in entry]


def plot(steps: Sequence[dict[str, Any]]) -> str:
    """The training as SVG: losses above, shares of right digits below, over seconds; a line where a stage begins."""
    span = max((step["seconds"] for step in steps), default=1.0)
    starts = [(b["seconds"], b["stage"]) for a, b in zip([{"stage": None}, *steps], steps, strict=False)
              if a["stage"] != b["stage"]]  # fmt: skip
    losses = {name: [(s["seconds"], s[name]) for s in steps] for name in ("answer", "text", "index")}
    digits = {name: [(s["seconds"], s[name]) for s in steps] for name in ("first_right", "later_right")}
    top = max([1.0, *(value for points in losses.values() for _, value in points)])
    axis = svg.Axis(span, f"{span:.0f} s", starts)
    return svg.document([svg.Panel("loss", losses, top, axis), svg.Panel("share of digits right", digits, 1.0, axis)])


class Journal:
    """Appends JSON lines to a file and says the training steps in one line each."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say

    def write(self, entry: dict[str, Any]) -> None:
        """Append one entry."""
        short = {name: round(value, 5) if isinstance(value, float) else value for name, value in entry.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(short) + "\n")

    def step(self, entry: dict[str, Any]) -> None:
        """Append a training step; every fifth is said too."""
        self.write(entry)
        if entry["step"] % 50 == 0:
            self._say(
                f"{entry['seconds']:6.1f} s  step {entry['step']:5d}  {entry['stage']:14s} "
                f"answer {entry['answer']:.3f}  text {entry['text']:.3f}  index {entry['index']:.3f}  "
                f"first digit {entry['first_right']:.1%}  later {entry['later_right']:.1%}"
            )


def card(preset: Preset, runs: Mapping[str, dict[str, Any]]) -> str:
    """The model card as Markdown. `runs` by the file that holds each: the checkpoint's own, then further trainings."""
    run, *_ = runs.values()
    stages = "\n".join(f"| {row['stage']} | {row['steps']} | {row['seconds']:.0f} |" for row in run["stages"])
    parts = [
        "# finder",
        *map(_paragraph, _what_it_is(preset)),
        "## Accuracy",
        _paragraph(
            """Share of prompts answered exactly, greedy, with the sparse attention that it ships with. Prompts are
            text from files that training never saw, facts anywhere in it. In brackets: the number of prompts."""
        ),
        *(part for file, of_file in runs.items() for part in _accuracy(file, of_file, of_file is run)),
        _paragraph(_controls(preset, run)),
        "## Data",
        _paragraph(
            f"""Sources of the standard library of Python {run["python"]}, {run["corpus_tokens"]} tokens; one file in
            {HELD_OUT} is held out. Facts with random values stand between its lines, up to {max(FACT_COUNTS)} in a
            sequence, and as many questions, each about any of them. The tokenizer is made from the same text, in which
            names and digits are repeated until each is one token."""
        ),
        "## Recipe",
        _paragraph(_recipe(preset, run)),
        "| stage | steps | seconds |\n| --- | --- | --- |\n" + stages,
        "## What was set by hand",
        _paragraph(_set_by_hand(run)),
        "## What it cannot do",
        "\n".join(map(_item, _limits(preset, run))),
    ]
    return "\n\n".join(parts) + "\n"


def _what_it_is(preset: Preset) -> list[str]:
    shape = preset.shape
    return [
        f"""A small sparse-attention language model that answers one kind of question. A line
        `{fact_line("lantern", 48213).strip()}` stands somewhere in a long text, and the text ends with
        `{question("lantern")}`. What follows is the five digits. `hisparse eval` asks it such questions.""",
        f"""Architecture `deepseek_v32`, which stock transformers classes load: {shape.layers} dense layers, hidden
        {shape.hidden}, {shape.heads} heads, KV latent {shape.kv_lora} + {shape.rope}, {shape.index_heads} index heads
        of {shape.index_dim}, top-k {shape.topk}, a byte-level vocabulary of {shape.vocab}, weights in bfloat16.""",
    ]


def _accuracy(file: str, run: dict[str, Any], is_own: bool) -> list[str]:
    whose = "This checkpoint" if is_own else "Trained again, not shipped"
    return [
        _paragraph(f"{whose}: seed {run['seed']}, {run['device']}, `{file}`."),
        _accuracy_table(run["cells"]),
    ]


def _controls(preset: Preset, run: dict[str, Any]) -> str:
    stock, window = run["stock"], run["window_control"]
    return f"""This checkpoint with attention held to the last {preset.shape.topk} tokens: {window["hits"]} of
        {window["prompts"]} at {window["context"]} tokens. Stock transformers `generate`: {stock["hits"]} of
        {stock["prompts"]} at {run["stock_context"]} tokens."""


def _recipe(preset: Preset, run: dict[str, Any]) -> str:
    earlier = "It started from the weights of an earlier run, whose steps are not counted here." * run["started_from"]
    return f"""`tools/train_finder.py`, {run["train_seconds"]:.0f} s and {run["steps"]} steps. The loss is the cross
        entropy of the answers' digits (the first counts {run["first_digit_weight"]}), {run["text_weight"]} times that
        of a quarter of the text, and for each indexer the KL divergence of its scores from dense attention, averaged
        over heads, on 16 to 128 rows per sequence. AdamW, {run["peak_rate"]:g} after {preset.warmup_steps} steps of
        warm-up, falling linearly over the last {1 - preset.tail_from:.0%} of the time. Attention is dense first, then
        sparse over an exact top-k. Contexts up to {_longest(preset)} tokens are trained as they are: no position is
        skipped or scaled. {earlier}"""


def _set_by_hand(run: dict[str, Any]) -> str:
    if run["wired"]:
        return """Before training (`--wire`): two heads of the first layer that look one and two tokens back, and one of
        the second that compares what they found, with the residual places and output weights these need."""
    return """No head: weights start from random values. The one thing that is unusual in them is a random direction
        that all token embeddings share; from it attention can tell distance before it knows tokens."""


def _limits(preset: Preset, run: dict[str, Any]) -> list[str]:
    return [
        f"""It knows {run["names"]} names (`NAMES` in `hisparse/evaluation/prompts.py`), each a single token, and
        values of five digits that do not begin with 0. Other names and other wordings are not answered.""",
        """It is no language model: what it says of anything else is noise in the manner of Python sources. It never
        says by itself that it is done; a newline follows the digits.""",
        f"It was trained on positions up to {_longest(preset)}; nothing is known of it beyond.",
    ]


def _longest(preset: Preset) -> int:
    return max(mix.length for stage in preset.stages for mix in stage.mixes)


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 110)


def _item(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 110, initial_indent="- ", subsequent_indent="  ")


def _accuracy_table(cells: Sequence[dict[str, Any]]) -> str:
    keys = sorted({cell["keys"] for cell in cells})
    rows = [
        "| tokens | " + " | ".join(f"{k} key" + "s" * (k > 1) for k in keys) + " |",
        "| --- |" + " --- |" * len(keys),
    ]
    for context in sorted({cell["context"] for cell in cells}):
        found = {cell["keys"]: cell for cell in cells if cell["context"] == context}
        shown = [f"{found[k]['accuracy']:.1%} ({found[k]['prompts']})" if k in found else "–" for k in keys]
        rows.append(f"| {context} | " + " | ".join(shown) + " |")
    return "\n".join(rows)
