"""Removing the regions that dead processes left behind, and nothing else."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from hisparse.errors import InputError
from hisparse.offload import region_control as control
from hisparse.offload import shared_file

logger = logging.getLogger(__name__)

PREFIX = "hisparse-kv-region."
"""What the name of every region's file begins with."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep did with the files whose names begin like a region's.

    `removed` belonged to dead processes. `in_use` have a living member. `foreign` are no regions of this version, and
    stay. `failed`: a line for each file that could not be looked at or removed.
    """

    removed: tuple[Path, ...] = ()
    in_use: tuple[Path, ...] = ()
    foreign: tuple[Path, ...] = ()
    failed: tuple[str, ...] = ()


def sweep_regions(directory: Path = shared_file.SHARED_MEMORY) -> SweepReport:
    """Remove every region in `directory` that no living process uses. Never raises for what it finds there."""
    removed: list[Path] = []
    in_use: list[Path] = []
    foreign: list[Path] = []
    failed: list[str] = []
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            _sweep(path, removed, in_use, foreign)
        except OSError as error:
            failed.append(f"{path} could not be removed ({error.strerror})")
        except InputError as error:
            failed.append(str(error))
    for line in failed:
        logger.warning("shared regions: %s", line)
    if removed:
        logger.info("removed %d shared regions of dead processes: %s", len(removed), ", ".join(map(str, removed)))
    return SweepReport(tuple(removed), tuple(in_use), tuple(foreign), tuple(failed))


def _sweep(path: Path, removed: list[Path], in_use: list[Path], foreign: list[Path]) -> None:
    fd = shared_file.open_named(path)
    if fd is None:
        return
    try:
        if control.read_shape(fd) is None:
            foreign.append(path)
        elif not control.lock_unused(fd):
            in_use.append(path)
        else:
            control.remove_name(fd, path)
            removed.append(path)
    finally:
        os.close(fd)
