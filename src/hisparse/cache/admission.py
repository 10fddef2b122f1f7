"""The answer to "may this request have these blocks?". A value: a refusal is ordinary work, not an exception."""

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """GRANTED: done. WAIT: not now, but reclaiming or finishing requests will help. NEVER: nothing will."""

    GRANTED = "granted"
    WAIT = "wait"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Admission:
    """A verdict and, when it is not GRANTED, how many blocks are missing in which pool."""

    verdict: Verdict
    slab_short: int = 0
    indexer_short: int = 0
    host_short: int = 0
    reason: str = ""

    @property
    def granted(self) -> bool:
        """Whether everything that was asked for is there."""
        return self.verdict is Verdict.GRANTED


GRANTED = Admission(Verdict.GRANTED)
