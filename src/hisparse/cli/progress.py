"""Progress of a run on a terminal: one bar for prefill, one for decode. Piped, it shows nothing."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from hisparse.engine import StepOutput


def on_terminal() -> bool:
    """Whether a person watches: both output streams are terminals."""
    return sys.stdout.isatty() and sys.stderr.isatty()


class _Bars:
    """Bars on standard error that vanish when their context ends."""

    def __init__(self, unit: str, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description:8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not shown,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class RunProgress(_Bars):
    """One bar for prefill, one for decode. `prompt_tokens` and `output_tokens` are their ends, over all requests."""

    def __init__(self, prompt_tokens: int, output_tokens: int, shown: bool) -> None:
        super().__init__("tokens", shown)
        self._prefill = self._progress.add_task("prefill", total=prompt_tokens)
        self._decode = self._progress.add_task("decode", total=output_tokens)
        self._prefill_left = prompt_tokens

    def advance(self, step: "StepOutput") -> None:
        """Count one step. A preempted request prefills again, which is no progress: the bar stays at its end."""
        prefilled = min(step.prefill_tokens, self._prefill_left)
        self._prefill_left -= prefilled
        self._progress.advance(self._prefill, prefilled)
        self._progress.advance(self._decode, len(step.tokens))


class VerifyProgress(_Bars):
    """One bar for every reference that a verification runs."""

    def __init__(self, shown: bool) -> None:
        super().__init__("requests verified", shown)
        self._tasks: dict[str, TaskID] = {}

    def advance(self, reference: str, done: int, total: int) -> None:
        """`done` of `total` requests have run on `reference`."""
        if reference not in self._tasks:
            self._tasks[reference] = self._progress.add_task(reference, total=total)
        self._progress.update(self._tasks[reference], completed=done)


class EvalProgress(_Bars):
    """One bar for every way of answering, all of which read the same `prompt_tokens` tokens."""

    def __init__(self, prompt_tokens: int, shown: bool) -> None:
        super().__init__("prompt tokens", shown)
        self._prompt_tokens = prompt_tokens
        self._tasks: dict[str, TaskID] = {}
        self._left: dict[str, int] = {}

    def advance(self, run: str, num_tokens: int) -> None:
        """`run` has read so many tokens more. What a preempted request reads again is no progress."""
        if run not in self._tasks:
            self._tasks[run] = self._progress.add_task(run, total=self._prompt_tokens)
            self._left[run] = self._prompt_tokens
        read = min(num_tokens, self._left[run])
        self._left[run] -= read
        self._progress.advance(self._tasks[run], read)


class BlockProgress(_Bars):
    """One bar over the stored blocks that a command reads."""

    def __init__(self, task: str, num_blocks: int, shown: bool) -> None:
        super().__init__("blocks", shown)
        self._task = self._progress.add_task(task, total=num_blocks)

    def advance(self) -> None:
        """One block more is done."""
        self._progress.advance(self._task)
