"""A process that stores and loads at random until it is killed. Run as a program: `rough_life.py FOLDER SEED`.

Ends with an error when a load serves wrong bytes; says "ready" when its tier is open.
"""

import random
import sys
from pathlib import Path

from hisparse.offload.files import FileTier
from tests.offload.files.world import IDENTITY, config, key_of, loads, store

KEYS = 24
BLOCKS = 12


def main(folder: Path, seed: int) -> None:
    """Live."""
    tier = FileTier(config(folder, blocks=BLOCKS, threads=2), IDENTITY, touch_after_ns=0)
    print("ready", flush=True)
    order = random.Random(seed)
    while True:
        key = key_of(order.randrange(KEYS))
        if not loads(tier, key):
            store(tier, key)
        if tier.stats().set_aside:
            raise SystemExit("a file was found bad that nobody damaged")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
