"""Ranks that are broken on purpose. Each is a callable that a rank's process is given before it does anything."""

import ctypes
import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hisparse.engine import executor
from hisparse.engine.tp import host_group, rank_process
from hisparse.errors import InvariantError
from hisparse.protocol import Direction
from hisparse.worker import shared_pool
from hisparse.worker.cuda.driver import DriverError
from hisparse.worker.host_order import HostOrder

PRELOADED = [
    "hisparse.engine.tp.rank_process",
    "transformers.models.deepseek_v32.modeling_deepseek_v32",
    "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa",
    "transformers.distributed.configuration_utils",
    "torch.distributed.tensor",
    "tests.engine.tp.faults",
]
PHASES = (
    "starts",
    "meets the other ranks",
    "loads the model",
    "takes its memory",
    "prefills",
    "decodes",
    "shuts down",
)
"""What ranks say that they do, in order."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    while True:
        time.sleep(60)


def stop() -> None:
    """As a process that a debugger holds: not one more instruction."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    print("the disk is on fire", file=sys.stderr)
    raise ValueError("a fault that nobody foresaw")


def crash() -> None:
    """As a library that reads a GPU's memory as the host's."""
    ctypes.string_at(8)


def contradict() -> None:
    raise InvariantError("page 7 is nowhere")


def refuse() -> None:
    """As a GPU's driver, by an exception that cannot be pickled."""
    raise DriverError("copying pages failed: out of memory (CUDA driver error 2)", 2)


def warn() -> None:
    logging.getLogger("hisparse.worker").warning("the disk is %s", "slow")


@dataclass(frozen=True)
class At:
    """Rank `rank` does `fault` when it has said that it does `phase`."""

    fault: Callable[[], None]
    rank: int
    phase: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.fault.__name__}s when it {self.phase}"

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        if self.phase == PHASES[0]:
            self.fault()
        say: Any = rank_process._Rank._say

        def faulty(self_: Any, phase: str) -> None:
            say(self_, phase)
            if phase == self.phase:
                self.fault()

        rank_process._Rank._say = faulty  # type: ignore[method-assign]


@dataclass(frozen=True)
class Digests:
    """Every rank writes, when it ends, what is in its slab, its index keys and its host pool: digests, to a file."""

    folder: Path

    def __call__(self, rank: int) -> None:
        close = executor.ModelRank.close

        def close_and_tell(self_: executor.ModelRank) -> None:
            worker = self_.worker
            leaders = [worker.indexer.view(leader).storage for leader in range(len(worker.plan.model.leaders))]
            contents = {"slab": worker.slab.storage, "keys": torch.cat(leaders), "host": worker.host_pool.storage}
            told = {name: hashlib.sha256(bytes_.numpy().tobytes()).hexdigest() for name, bytes_ in contents.items()}
            (self.folder / f"{rank}.json").write_text(json.dumps(told))
            close(self_)

        executor.ModelRank.close = close_and_tell  # type: ignore[method-assign]

    def read(self) -> list[dict[str, str]]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.iterdir())]


@dataclass(frozen=True)
class HostStaged:
    """Ranks on a CPU that do their collectives as ranks that share a GPU do. Each writes how many there were.

    `is_lossy`: what comes back from the host is lost.
    """

    folder: Path
    is_lossy: bool = False

    def __call__(self, rank: int) -> None:
        rank_process.backend_for = lambda device, num_ranks: host_group.NAME
        if self.is_lossy:
            host_group._given_back = lambda staged, whole: host_group._Done()
        close = executor.ModelRank.close

        def close_and_tell(self_: executor.ModelRank) -> None:
            (self.folder / f"{rank}.json").write_text(json.dumps(rank_process.dist.group.WORLD.num_collectives))
            close(self_)

        executor.ModelRank.close = close_and_tell  # type: ignore[method-assign]

    def read(self) -> list[int]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.iterdir())]


@dataclass(frozen=True)
class FailsWhereItSpills:
    """Rank 1 fails in a step that spills, before its forward pass: rank 0 waits for it there, and writes nothing."""

    def __call__(self, rank: int) -> None:
        if rank != 1:
            return
        forward = executor.ModelRank._forward

        def failing(self_: executor.ModelRank, work: Any) -> Any:
            if any(transfer.direction is Direction.DEVICE_TO_HOST for transfer in work.meta.command.transfers):
                raise MemoryError("no room for the batch")
            return forward(self_, work)

        executor.ModelRank._forward = failing  # type: ignore[method-assign]


@dataclass(frozen=True)
class Unshared:
    """Ranks that take pools of their own, though they were told to share one."""

    def __call__(self, rank: int) -> None:
        rank_process._Rank._sharing = lambda self_, loaded: None  # type: ignore[method-assign,assignment,return-value]


@dataclass(frozen=True)
class SlowWriter:
    """Rank 0 is slow to write the pool; its peers wait for it, or do not."""

    heedless: bool

    def __call__(self, rank: int) -> None:
        if rank == 0:
            run = shared_pool._Published.run

            def slow(copies: Any) -> None:
                time.sleep(0.05)
                run(copies)

            shared_pool._Published.run = slow  # type: ignore[method-assign]
        elif self.heedless:
            HostOrder.wait_published = lambda *_: None  # type: ignore[method-assign,assignment]
            HostOrder.num_published = property(lambda _: 1 << 40)  # type: ignore[method-assign,assignment]
