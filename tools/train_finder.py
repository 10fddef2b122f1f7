"""Train the finder, a small sparse-attention model that looks facts up, and write it as a checkpoint.

    python tools/train_finder.py --out DIR [--minutes 8.5] [--seed 0] [--preset smoke]
    python tools/record_finder.py DIR

One call makes everything within its wall limit: text of the running Python's standard library, a tokenizer, training,
evaluation, the checkpoint and its card. A call that ends before training does says so and exits with 3; the same call
again continues from the checkpoint in its work folder. The second command keeps the accuracy of a finished run in
`benchmarks/results` and adds it to the card of the checkpoint that ships. Where there is no repository,
`HISPARSE_COMMIT` says which commit trains.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

UNFINISHED = 3


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and its reports")
    parser.add_argument("--work", type=Path, help="folder for what only a later call needs (default: OUT.work)")
    parser.add_argument("--minutes", type=float, default=8.5, help="wall limit of this call, evaluation included")
    parser.add_argument("--train-minutes", type=float, help="training time over all calls (default: what fits in one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", choices=("full", "smoke"), default="full")
    parser.add_argument(
        "--smoke", dest="preset", action="store_const", const="smoke", help="the same as --preset smoke"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--workers", type=int, default=8, help="processes that make batches; 0 makes them in line")
    parser.add_argument("--wire", action="store_true", help="set look-up heads by hand before training")
    parser.add_argument("--start-from", type=Path, help="take the weights of this exported checkpoint as a start")
    parser.add_argument("--rate", type=float, help="peak learning rate (default: the preset's)")
    parser.add_argument("--checkpoint-seconds", type=float, default=60.0)
    options = parser.parse_args(arguments)
    if options.work is None:
        options.work = options.out.with_name(options.out.name + ".work")
    options.command = shown(sys.argv[1:] if arguments is None else arguments)
    return options


def shown(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line for a record: of an absolute path only its last part, which is all that others can use."""
    return ("tools/train_finder.py", *(re.sub(r"(^|(?<==))/(.*/)?(?=[^/])", "", argument) for argument in arguments))


def say(text: str) -> None:
    """Print at once: the call may be cut off."""
    print(text, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run one call. Returns 0, or 3 if training goes on in a later call."""
    options = parse_arguments(arguments)
    # Heavy imports stay out of the processes that make batches: they import this file, but call nothing of it.
    import torch

    from tools.finder.session import Options, Session

    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    session = Session(Options(**vars(options)), say)
    if not session.train():
        say("training goes on: call again with the same options")
        return UNFINISHED
    run = session.finish()
    for goal in run["goals"]:
        reached = "reached" if goal["reached"] else "missed"
        say(f"{goal['context']} tokens, {goal['keys']} keys: {goal['accuracy']:.1%}, goal {goal['goal']:.0%} {reached}")
    return 0


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    # The package may not be installed where this runs.
    sys.path[:0] = [str(root), str(root / "src")]
    sys.exit(main())
