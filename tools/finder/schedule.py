"""What is trained when: contexts that grow, attention that becomes sparse, a learning rate that rises and falls.

Time, not steps, drives it, because a run has a wall limit: each stage ends at the latest at its share of the training
time, and earlier once the model answers well enough. What earlier stages leave over goes to the last.
"""

from dataclasses import dataclass, field

from tools.finder.data import BatchOrder
from tools.finder.model import FinderShape


@dataclass(frozen=True, slots=True)
class Mix:
    """Batches of one kind. `topks`: how many positions attention reads, taken in turn; 0 is dense attention."""

    length: int
    size: int
    topks: tuple[int, ...] = (0,)

    @property
    def probes(self) -> int:
        """Rows per sequence on which the indexer learns: 16 for short sequences, 128 for long ones."""
        return min(self.length // 2, 128, max(16, self.length // 32))


@dataclass(frozen=True, slots=True)
class Stage:
    """Mixes that are taken in turn until `until` of the training time, or until the answers' first digits are right
    in `enough` of the cases (over 1: never) after at least `least_steps`.
    """

    name: str
    mixes: tuple[Mix, ...]
    until: float
    enough: float = 2.0
    least_steps: int = 40

    def mix(self, index: int) -> Mix:
        """The mix of batch `index`."""
        return self.mixes[index % len(self.mixes)]

    def topk(self, index: int) -> int:
        """What batch `index` attends to."""
        topks = self.mix(index).topks
        return topks[index // len(self.mixes) % len(topks)]

    def orders(self, seed: int, index: int, num: int) -> list[BatchOrder]:
        """The orders of the batches from `index` on."""
        mixes = [(number, self.mix(number)) for number in range(index, index + num)]
        return [BatchOrder(seed, number, mix.size, mix.length) for number, mix in mixes]


@dataclass(frozen=True, slots=True)
class Cell:
    """One evaluation: prompts of `context` tokens with `keys` facts."""

    context: int
    keys: int


@dataclass(frozen=True, slots=True)
class Preset:
    """A whole recipe. `eval_seconds` of a call are kept for export and evaluation."""

    shape: FinderShape
    stages: tuple[Stage, ...]
    cells: tuple[Cell, ...]
    eval_prompts: int
    eval_seconds: float
    corpus_bytes: int
    peak_rate: float = 3e-3
    warmup_steps: int = 200
    tail_from: float = 0.45
    goals: dict[Cell, float] = field(default_factory=dict)

    def rate(self, step: int, share: float) -> float:
        """Learning rate of `step` once `share` of the training time has passed: warm-up, level, linear tail."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        tail = min(1.0, max(0.02, (1.0 - share) / (1.0 - self.tail_from)))
        return self.peak_rate * warmup * tail


_SPARSE = (64, 128, 256)

FULL = Preset(
    shape=FinderShape(),
    stages=(
        Stage("dense 128", (Mix(128, 192),), 0.35, 0.97),
        Stage("dense 512", (Mix(512, 64),), 0.40, 0.98),
        Stage("dense 2k", (Mix(2048, 24),), 0.44, 0.98),
        Stage("dense 8k", (Mix(8192, 8),), 0.49, 0.98),
        Stage("dense 32k", (Mix(32768, 2),), 0.53, 0.98, least_steps=80),
        Stage("sparse 2k", (Mix(2048, 24, _SPARSE),), 0.60, 0.98, least_steps=150),
        Stage("sparse 8k", (Mix(8192, 8, _SPARSE), Mix(2048, 24, (64,))), 0.72, 0.98, least_steps=150),
        Stage(
            "sparse mixed",
            (
                Mix(2048, 24, (64,)),
                Mix(8192, 8, (64,)),
                Mix(512, 64, (64,)),
                Mix(8192, 8, (0, 64, 128)),
                Mix(2048, 24, (64,)),
                Mix(8192, 8, (64,)),
                Mix(32768, 2, (64, 64, 128)),
            ),
            1.0,
        ),
    ),
    cells=tuple(
        [Cell(8192, keys) for keys in (1, 4, 16)]
        + [Cell(32768, keys) for keys in (16, 1)]
        + [Cell(context, keys) for context in (1024, 2048, 4096, 16384) for keys in (1, 4, 16)]
        + [Cell(32768, 4)]
    ),
    eval_prompts=64,
    eval_seconds=130.0,
    corpus_bytes=12 << 20,
    goals={Cell(8192, 1): 0.99, Cell(8192, 4): 0.97, Cell(8192, 16): 0.95, Cell(32768, 1): 0.95, Cell(32768, 16): 0.90},
)

SMOKE = Preset(
    shape=FinderShape(
        vocab=1024, hidden=64, intermediate=128, layers=2, heads=4, q_lora=32, kv_lora=32, nope=16, rope=16,
        index_heads=8, index_dim=32, topk=32,
    ),
    stages=(
        Stage("dense 112", (Mix(112, 24),), 0.8, 0.95),
        Stage("sparse", (Mix(112, 24, (32,)), Mix(224, 10, (32, 64))), 1.0),
    ),
    cells=(Cell(112, 4), Cell(112, 1), Cell(224, 4), Cell(448, 4)),
    eval_prompts=32,
    eval_seconds=12.0,
    corpus_bytes=1 << 20,
    peak_rate=4e-3,
    warmup_steps=50,
    goals={Cell(112, 4): 0.5},
)  # fmt: skip

PRESETS = {"full": FULL, "smoke": SMOKE}
