"""Which NUMA node a GPU hangs on, and memory that prefers it. All of it is advice: what cannot be had is left out."""

import ctypes
import logging
import os
import platform
from pathlib import Path

logger = logging.getLogger(__name__)

SYSFS = Path("/sys")

_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}


def nodes(sysfs: Path = SYSFS) -> tuple[int, ...]:
    """The machine's NUMA nodes, in order; empty where the system does not say."""
    found = (sysfs / "devices/system/node").glob("node[0-9]*")
    return tuple(sorted(int(path.name.removeprefix("node")) for path in found))


def node_of_device(bus_id: str, sysfs: Path = SYSFS) -> int | None:
    """The node of the PCI device `bus_id` ("0000:1b:00.0"); None where the system does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Have untouched pages of a mapping come from `node` as long as it has any. False where that is not possible."""
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << node % 64
    result = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        # The kernel reads one bit less than it is told.
        ctypes.c_ulong(64 * words + 1),
        ctypes.c_uint(0),
    )
    if result != 0:
        logger.info("host memory is not placed on NUMA node %d: %s", node, os.strerror(ctypes.get_errno()))
    return bool(result == 0)
