"""What a rank is told when it starts."""

from collections.abc import Callable
from dataclasses import dataclass

from hisparse.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Everything that rank `rank` is told when it starts. It loads the model itself, by name.

    `device`: "cpu" or "cuda", of which it takes the one of its number, or one that it shares. `store_port`: where the
    ranks find each other, on this machine. `parent`: the process that starts it. `dies_with_parent`: whether the system
    is to kill it then, which it does when the thread that started it ends. `start_s`: until all ranks are ready, one of
    which may load much longer than another. `timeout_s`: what it waits for another one later. `wants_revision`: whether
    it looks what weights it has. `prepare`: called first, with the rank; for tests, which break something there.
    """

    rank: int
    num_ranks: int
    model: str
    dtype: str
    device: str
    config: EngineConfig
    store_port: int
    parent: int
    dies_with_parent: bool
    start_s: float
    timeout_s: float
    num_threads: int
    wants_revision: bool = False
    prepare: Callable[[int], None] | None = None

    @property
    def name(self) -> str:
        """The rank as messages call it."""
        return f"rank {self.rank}"
