"""Tells whoever measures an engine what happens in it. An engine without a meter does none of this."""

from typing import TYPE_CHECKING, Protocol

from hisparse.engine.output import StepOutput
from hisparse.engine.request import Request

if TYPE_CHECKING:
    from hisparse.engine.engine import Engine


class EngineMeter(Protocol):
    """What an engine tells, in its own thread, between steps and never inside a forward pass.

    A meter reads what it is given and changes nothing. What it does takes the engine's time: once a step, an amount of
    work that depends neither on prompts nor on pools. `Engine.stats` waits for the device; a meter that calls it in
    every step makes every step wait.
    """

    def see_first_token(self, request: Request) -> None:
        """The request got its first token, for the first time: a preempted request is not told of again."""
        ...

    def see_end(self, engine: "Engine", request: Request) -> None:
        """The request ended, or was aborted: then it has no `finish_reason`."""
        ...

    def see_step(self, engine: "Engine", output: StepOutput, seconds: float) -> None:
        """A step of so many seconds is over, and its books are closed."""
        ...
