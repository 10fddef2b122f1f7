"""What the scheduler chose for one step."""

from dataclasses import dataclass, field

from hisparse.connector import ConnectorMetadata
from hisparse.engine.request import Request


@dataclass(slots=True)
class ScheduledStep:
    """One step's work. `decodes` compute one token each, the last of theirs; `prefills` the next `n` of theirs."""

    number: int
    decodes: list[Request] = field(default_factory=list)
    prefills: list[tuple[Request, int]] = field(default_factory=list)
    meta: ConnectorMetadata = field(default_factory=ConnectorMetadata)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed."""
        return not (self.decodes or self.prefills)
