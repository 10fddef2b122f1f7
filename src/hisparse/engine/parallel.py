"""How many ranks compute a model, and whose their host pools are."""

from dataclasses import dataclass
from enum import Enum

from hisparse.errors import InputError


class HostBacking(Enum):
    """Whose the host pool is: all ranks' of the node, which is one copy of every page, or each rank's own."""

    SHARED = "shared"
    PRIVATE = "private"


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """`num_ranks` processes on one node, which load the model themselves, by its name.

    `device`: "cpu", or "cuda", where each rank has a GPU, or shares one when there are more ranks. Seconds: until all
    ranks are ready, for one step, and until all have ended. Raises `InputError` for less than one rank.
    """

    num_ranks: int
    device: str = "cpu"
    backing: HostBacking = HostBacking.SHARED
    start_s: float = 900.0
    step_s: float = 300.0
    close_s: float = 30.0

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise InputError(f"a model is computed by one rank at least, not by {self.num_ranks}")

    @property
    def num_pools(self) -> int:
        """Host pools that there are on the node."""
        return 1 if self.backing is HostBacking.SHARED else self.num_ranks
