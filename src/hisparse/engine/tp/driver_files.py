"""Shared memory that a CUDA driver makes for a rank, and leaves behind when the rank has ended.

For events that other processes wait for, the driver puts a file into the system's shared memory, which it does not
remove, even if the process ends in good order. Once every peer has opened the events the name is of no use, and what
is without a name goes with the last process that has it.
"""

import os
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def remove_driver_files(pid: int, since_s: float, directory: Path = SHARED_MEMORY) -> None:
    """Remove what the driver made for process `pid`, by its name there, which started at `since_s` (Unix seconds).

    What is older belongs to a process of another container that shares the directory: it is left alone.
    """
    for path in directory.glob(f"cuda.shm.{os.getuid():x}.{pid:x}.*"):
        with suppress(OSError):
            if path.stat().st_mtime >= since_s:
                path.unlink()
