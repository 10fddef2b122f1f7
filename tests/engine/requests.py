"""Requests for the scheduler's tests, and how they are brought to their end."""

import random
from array import array

import pytest

from hisparse.engine.request import Request
from hisparse.engine.sampler import SamplingParams
from hisparse.engine.scheduler import Scheduler
from hisparse.errors import CapacityError
from tests.engine.paper_worker import Drive

PATIENCE = 30
"""Steps in a row that may compute nothing: a few copies after each other, each up to three steps late, reported by a
worker that is up to three reports behind."""


def make_request(name: str, prompt: list[int], max_tokens: int) -> Request:
    return Request(name, SamplingParams(max_tokens=max_tokens), array("i", prompt), len(prompt))


def random_request(rng: random.Random, number: int) -> Request:
    """Prompts of few different beginnings, so that prefixes meet again, and bytes meet their twins on the host."""
    start = rng.choice([[], [0] * 16, [1] * 24, [0, 1] * 18])
    prompt = start + [rng.randrange(2) for _ in range(rng.randint(1, 80 - len(start) - 20))]
    return make_request(f"r{number}", prompt, rng.randint(1, 20))


def queue_some(scheduler: Scheduler, rng: random.Random, queued: list[Request]) -> None:
    """Add up to three random requests, to `queued` too; those that could never run are left out."""
    for _ in range(rng.choice([0, 0, 1, 3])):
        request = random_request(rng, len(queued))
        try:
            scheduler.add(request)
        except CapacityError:
            continue
        queued.append(request)


def drain(drive: Drive, steps: int = 3000) -> None:
    """Step until all is done; fail when nothing moves for too long."""
    idle = 0
    for _ in range(steps):
        if not drive.scheduler.has_work:
            return
        idle = 0 if drive.step() else idle + 1
        assert idle <= PATIENCE, f"nothing was computed for {idle} steps"
    pytest.fail(f"{len(drive.scheduler.running)} requests still run after {steps} steps")


def run_one(drive: Drive, request: Request) -> None:
    drive.scheduler.add(request)
    drain(drive)
