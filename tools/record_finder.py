"""Keep what finished trainings of the finder reached, and write the card of the shipped checkpoint anew from all.

    python tools/record_finder.py [DIR ...]

Each folder's `eval.json` becomes `benchmarks/results/finder_seed<seed>.json`. The checkpoint in the package comes first
in its card, and the other trainings follow. Which of the records is its own, a checksum of the weights says.
"""

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Keep the runs that are named, and write the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", metavar="DIR", type=Path, nargs="*", help="what a finished training wrote")
    options = parser.parse_args(arguments)

    from tools.finder import record

    for folder in options.folders:
        print(record.keep(folder))
    record.CARD.write_text(record.shipped_card(), encoding="utf-8")
    print(record.CARD)
    return 0


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    # The package may not be installed where this runs.
    sys.path[:0] = [str(root), str(root / "src")]
    sys.exit(main())
