"""Processes that share a region, for tests: started quickly, killed where a test wants, and what they leave behind."""

import importlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hisparse.errors import HiSparseError
from hisparse.offload.region import Membership, SharedRegion

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["numpy", "tests.offload.members", "tests.offload.ranks", "tests.offload.chain"])

ROW_BYTES = 4096
NUM_BLOCKS = 8
JOIN_SECONDS = 20


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of shared memory that no other test uses. It must be empty in the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hisparse-test-") as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Step:
    """A call that is made on the way, and whether a process dies before or after it. `place`: module:name."""

    place: str
    dies_after: bool

    def __str__(self) -> str:
        return f"{'after' if self.dies_after else 'before'} {self.place.split(':')[1]}"

    def arm(self) -> None:
        """From now on this process is killed there."""
        module, _, names = self.place.partition(":")
        *owners, name = names.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        original: Callable[..., Any] = getattr(owner, name)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            if self.dies_after:
                original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, deadly)


def be_member(name: str, membership: Membership, folder: Path, step: Step | None = None) -> None:
    """Create (member 0) or attach, wait for the others, and leave. Faults of the library end the process with 1."""
    if step is not None:
        step.arm()
    try:
        if membership.member == 0:
            region = SharedRegion.create(name, NUM_BLOCKS, ROW_BYTES, membership, folder)
        else:
            region = SharedRegion.attach(name, membership, folder)
        try:
            region.wait_for_members()
            region.row(membership.member)[:] = membership.member + 1
        finally:
            region.close()
    except HiSparseError:
        os._exit(1)


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process of its own that runs `target`."""
    process = PROCESSES.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def end(process: BaseProcess) -> int:
    """Its exit code: negative for a signal. Fails when it does not end."""
    process.join(JOIN_SECONDS)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{process.name} did not end")
    return process.exitcode
