"""What the scheduler's process and a rank's say to each other. A rank answers every request once, in order.

One more request is `executor.StepWork`, which a `Stepped` answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from hisparse.cache.groups import GroupKind
from hisparse.connector import ConnectorWorkerMetadata, RegionCopies
from hisparse.engine.executor import CacheSpec, Choice
from hisparse.engine.offload import Reports
from hisparse.engine.parallel import HostBacking


@dataclass(frozen=True, slots=True)
class Phase:
    """A rank, on its own: what it does from now on, until it says otherwise."""

    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank's first answer: its model is loaded. `revision`: of the whole weights, where that was asked."""

    revision: str | None


@dataclass(frozen=True, slots=True)
class OpenCaches:
    """Take the memory of all caches."""

    caches: CacheSpec
    backing: HostBacking


@dataclass(frozen=True, slots=True)
class Opened:
    """The memory is there. `host_usable_bytes`, `host_physical_bytes`: of the pool that the rank sees, shared or not.

    `host_file`: device and inode of the file that the pool maps, None where it maps none. `digests`: of the mapping of
    each group's pages to its region, where there are tiers.
    """

    host_usable_bytes: int
    host_physical_bytes: int
    host_file: tuple[str, int] | None
    digests: Mapping[GroupKind, bytes]


@dataclass(frozen=True, slots=True)
class Stepped:
    """A `StepWork` was carried out. `logits`: float32 `[len(choices), vocab]`, if they were asked for."""

    choices: tuple[Choice, ...]
    logits: np.ndarray | None
    report: ConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class Move:
    """Begin copies to or from the tiers, between two steps."""

    copies: tuple[RegionCopies, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """They were begun. What there is to report of these and others."""

    reports: Reports


@dataclass(frozen=True, slots=True)
class Count:
    """Asks for counters."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The worker's counters, and the rows that had no block to go to."""

    counters: dict[str, int]
    num_missing: int


@dataclass(frozen=True, slots=True)
class Close:
    """Give everything back and end."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Everything was given back; the process is about to end."""


class FailureKind(Enum):
    """Whose fault a failure is: the caller's, the machine's, or the library's."""

    INPUT = "input"
    BACKEND = "backend"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank cannot go on, and ends. `text`: what the exception says; its traceback is among the rank's last words.

    `at_s`: when, by the clock that all processes of a machine share. Exceptions themselves do not cross: not all of
    them can be put together again from what they were pickled to.
    """

    kind: FailureKind
    text: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Logged:
    """A rank, on its own: a warning, or worse, of the logger `name`."""

    name: str
    level: int
    text: str
