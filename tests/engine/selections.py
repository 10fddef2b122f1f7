"""An observer that adds up what it is shown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hisparse.engine.observer import SeenSelection, StepRows


@dataclass
class Totals:
    """Counts selections, and checks that each is of a row that was announced. `wants`: which steps it asks for."""

    wants: bool = True
    from_device: int = 0
    from_host: int = 0
    layers: set[int] = field(default_factory=set)
    steps: list[list[StepRows]] = field(default_factory=list)

    def begin_step(self, rows: Sequence[StepRows]) -> bool:
        self.steps.append(list(rows))
        return self.wants

    def observe(self, selection: SeenSelection) -> None:
        self.layers.add(selection.layer)
        assert not bool((selection.from_device & selection.from_host).any())
        assert bool((selection.positions <= selection.query_positions[:, None]).all())
        announced = {(r.slot, r.start + n) for r in self.steps[-1] for n in range(r.num_rows)}
        seen = set(zip(selection.slots.tolist(), selection.query_positions.tolist(), strict=True))
        assert {row for row in seen if row[0] >= 0} <= announced
        self.from_device += int(selection.from_device.sum())
        self.from_host += int(selection.from_host.sum())
