"""A folder for tests that start a tier hundreds of times."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where waiting for the disk costs nothing. Where there is none, the ordinary one."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="hisparse-test-", dir=MEMORY))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
