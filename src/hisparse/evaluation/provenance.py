"""Where the rows that an answer rests on were read from: device or host."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hisparse.engine.observer import SeenSelection, StepRows
from hisparse.evaluation.questions import Question


@dataclass(frozen=True, slots=True)
class NeedleRows:
    """KV rows of answers' tokens that were read while they were asked for: one for each token and leader layer.

    `read`: rows that were selected at least once; `from_host`: those of them that came from the host at least once.
    """

    read: int = 0
    from_host: int = 0

    def __add__(self, other: "NeedleRows") -> "NeedleRows":
        return NeedleRows(self.read + other.read, self.from_host + other.from_host)

    @property
    def share_from_host(self) -> float | None:
        """Of the rows that were read, those that came from the host. None if none was read."""
        return self.from_host / self.read if self.read else None


@dataclass(slots=True)
class _Watched:
    """Rows of one request, each as layer and position. `NeedleWatch` adds to the sets."""

    question: Question
    read: set[tuple[int, int]] = field(default_factory=set)
    from_host: set[tuple[int, int]] = field(default_factory=set)


class NeedleWatch:
    """A `SelectionObserver` that notes which needle rows a question's tokens and its answer's read, and from where.

    Tokens before the question read them as well, but no answer hangs on that.
    """

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._in_step: list[tuple[int, _Watched]] = []

    def watch(self, request_id: str, question: Question) -> None:
        """Note what request `request_id`, which asks `question`, reads."""
        self._watched[request_id] = _Watched(question)

    def rows(self, request_id: str) -> NeedleRows:
        """What the request has read so far."""
        watched = self._watched[request_id]
        return NeedleRows(len(watched.read), len(watched.from_host))

    def begin_step(self, rows: Sequence[StepRows]) -> bool:
        asking = [(part, self._watched.get(part.request_id)) for part in rows]
        self._in_step = [
            (part.slot, watched)
            for part, watched in asking
            if watched is not None and part.start + part.num_rows > watched.question.asked_from
        ]
        return bool(self._in_step)

    def observe(self, selection: SeenSelection) -> None:
        for slot, watched in self._in_step:
            needle, asked_from = watched.question.needle, watched.question.asked_from
            asks = (selection.slots == slot) & (selection.query_positions >= asked_from)
            positions = selection.positions[asks]
            in_needle = (positions >= needle.start) & (positions < needle.stop)
            for found, rows in ((selection.from_host, watched.from_host), (selection.from_device, None)):
                where = positions[in_needle & found[asks]].unique()
                named = {(selection.layer, position) for position in where.tolist()}
                watched.read |= named
                if rows is not None:
                    rows |= named
