"""What the machine moves at best, measured in the process that compares itself with it."""

import statistics
import time
from collections.abc import Callable

import torch

QUEUE_CYCLES = 20_000_000
"""How long a busy kernel holds the stream while the host fills it behind, in clock cycles."""


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median seconds of `work` after one run that warms up: from event to event on a GPU, by the clock elsewhere."""
    work()
    times = []
    for _ in range(repeats):
        if device.type != "cuda":
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(QUEUE_CYCLES)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def link_rates(device: torch.device, num_bytes: int) -> tuple[float, float]:
    """Bytes per second of one large copy between pinned memory and the device: towards the device, and back."""
    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    to_device = seconds_of(lambda: on_device.copy_(pinned, non_blocking=True), device)
    to_host = seconds_of(lambda: pinned.copy_(on_device, non_blocking=True), device)
    return num_bytes / to_device, num_bytes / to_host


def memory_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes per second that the device's memory reads or writes, from a large copy within it (each byte counts twice).

    Reading alone may be a little faster.
    """
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: destination.copy_(source), device)
