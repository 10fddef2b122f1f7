"""What holds for every test: the same random numbers in every run, and hypothesis that repeats itself."""

import os
import random
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell runs us in its background, and processes that tests start would ignore Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    print_blob=True,
    # Two test processes share two cores: a slow draw says nothing about the strategy.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Seed whatever a test may draw from. Tests of the scheduler side run without torch, so it is not imported here."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
