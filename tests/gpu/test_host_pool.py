"""Pinned memory is what the GPU reads in place, whole, and it is gone in time whatever ends the process."""

import signal
import subprocess
import sys
import time

import pytest
import torch

from hisparse.errors import BackendError, InvariantError
from hisparse.worker.cuda import driver
from hisparse.worker.cuda.host_memory import PinnedMapping, PinRequest
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

CHUNK = 1 << 20

HOLDER = """
import sys, time, torch
from hisparse.worker.cuda.host_memory import PinnedMapping, PinRequest
torch.zeros(1, device="cuda")
memory = PinnedMapping(PinRequest(4 << 30, 0))
print("pinned", flush=True)
time.sleep(60)
"""


@pytest.fixture
def device() -> int:
    return torch.zeros(1, device="cuda").device.index


def test_every_byte_can_be_read_and_written_by_the_gpu_across_registrations(device: int) -> None:
    num_bytes = 3 * CHUNK + 12345
    memory = PinnedMapping(PinRequest(num_bytes, device, chunk_bytes=CHUNK))
    storage = memory.storage
    assert storage.numel() == num_bytes
    assert storage.is_pinned()
    for start in range(0, num_bytes, CHUNK):
        assert driver.device_address(storage.data_ptr() + start) == storage.data_ptr() + start
    storage.random_(0, 256)
    pieces = storage.split(CHUNK)
    assert all(torch.equal(piece.cuda().cpu(), piece) for piece in pieces)
    memory.release()


def test_released_memory_is_no_longer_pinned_and_raises(device: int) -> None:
    memory = PinnedMapping(PinRequest(CHUNK, device))
    storage = memory.storage
    memory.release()
    memory.release()
    assert not storage.is_pinned()
    with pytest.raises(InvariantError, match="after its release"):
        _ = memory.storage


def test_memory_that_is_pinned_already_is_refused_with_what_failed(device: int) -> None:
    memory = PinnedMapping(PinRequest(CHUNK, device))
    with pytest.raises(BackendError, match="pinning 1048576 bytes of host memory failed"):
        driver.register(memory.storage.data_ptr(), CHUNK)
    memory.release()


def test_sigterm_ends_a_process_with_pinned_memory_at_once_and_by_that_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "pinned\n"
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == -signal.SIGTERM
            print(f"4 GiB were unpinned and the process gone after {time.monotonic() - begin:.2f} s")
        finally:
            process.kill()
