"""What a machine offers for KV on the host: driver, compilers, limits, placement, and the link as it measures.

Looking never raises: what is missing becomes a finding that names the fix.
"""

import importlib.util
import platform
import resource
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from hisparse.errors import BackendError
from hisparse.kernels import attention_libraries
from hisparse.kernels.cuda.compiler import MINIMUM_ARCHITECTURE, nvrtc_version
from hisparse.worker.cuda import driver, numa
from hisparse.worker.cuda.host_memory import PinnedMapping, PinRequest

LINK_BYTES = 256 << 20
"""What one copy of a measurement moves."""

_REPEATS = 7
_LINK_SHARE = 0.75
"""The least part of what a link can carry that a healthy machine reaches."""

_LANE_GBPS = {"2.5": 0.25, "5.0": 0.5, "8.0": 0.985, "16.0": 1.969, "32.0": 3.938, "64.0": 7.563}
"""GB/s of one PCIe lane, by its transfers per second in GT/s, after encoding."""

_GENERATION = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


class Status(Enum):
    """How much a finding matters: nothing to do, slower or riskier than need be, or the GPU cannot be used."""

    OK = "ok"
    ADVICE = "advice"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `fix`: what to do, where something is to be done. `numbers`: what was measured."""

    name: str
    status: Status
    value: str
    fix: str | None = None
    numbers: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """A PCIe link as the system describes it: GT/s of a lane as text, and the number of lanes."""

    speed: str
    width: int

    @property
    def generation(self) -> int | None:
        return _GENERATION.get(self.speed)

    @property
    def gbps(self) -> float | None:
        """GB/s that the lanes carry, each way, before packet headers."""
        lane = _LANE_GBPS.get(self.speed)
        return None if lane is None else lane * self.width


def inspect_machine(device: int = 0, sysfs: Path = numa.SYSFS) -> tuple[Finding, ...]:
    """Everything, in the order in which it is to be fixed. Takes about a second where there is a GPU."""
    findings = [find_driver(), find_torch(), find_compiler(), find_triton()]
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        findings.append(find_gpu(device))
        findings.append(find_attention(torch.cuda.get_device_capability(device)))
    findings.append(find_memlock())
    findings.append(find_numa(driver.bus_id(device) if has_gpu else None, sysfs))
    if has_gpu:
        link = read_link(driver.bus_id(device), sysfs)
        findings.append(find_link(link))
        findings.append(find_bandwidth(device, link))
    return tuple(findings)


def find_driver() -> Finding:
    """The NVIDIA driver and the CUDA version that it serves."""
    try:
        number = driver.version()
    except BackendError as error:
        return Finding("driver", Status.MISSING, str(error), "install the NVIDIA driver, 580 or newer (CUDA 13)")
    name = f"CUDA {number // 1000}.{number % 1000 // 10}"
    if not driver.copies_in_batches():
        return Finding(
            "driver", Status.ADVICE, f"{name}, without batched copies", "a driver for CUDA 12.8 (570) has them"
        )
    return Finding("driver", Status.OK, name)


def find_torch() -> Finding:
    """Whether torch was built for CUDA and sees a device."""
    built = torch.version.cuda
    if built is None:
        return Finding(
            "torch", Status.MISSING, f"{torch.__version__}, built without CUDA", "install a CUDA build of torch"
        )
    if not torch.cuda.is_available():
        return Finding(
            "torch",
            Status.MISSING,
            f"{torch.__version__} sees no GPU",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES; a container needs --gpus all",
        )
    return Finding("torch", Status.OK, f"{torch.__version__}, {torch.cuda.device_count()} GPU(s)")


def find_compiler() -> Finding:
    """NVRTC, which compiles the kernels."""
    try:
        major, minor = nvrtc_version()
    except BackendError as error:
        return Finding("nvrtc", Status.MISSING, str(error), "pip install 'hisparse[cuda]'")
    return Finding("nvrtc", Status.OK, f"{major}.{minor}")


def find_triton() -> Finding:
    """Triton, which compiles the attention and indexer kernels."""
    if importlib.util.find_spec("triton") is None:
        return Finding("triton", Status.MISSING, "not installed", "pip install 'hisparse[cuda]'")
    return Finding("triton", Status.OK, "installed")


def find_gpu(device: int) -> Finding:
    """The GPU and whether the kernels run on it."""
    found = torch.cuda.get_device_properties(device)
    value = f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory / 2**30:.0f} GiB"
    if (found.major, found.minor) < MINIMUM_ARCHITECTURE:
        least = ".".join(map(str, MINIMUM_ARCHITECTURE))
        return Finding("gpu", Status.MISSING, value, f"the kernels need compute capability {least} or newer")
    return Finding("gpu", Status.OK, value)


def find_attention(capability: tuple[int, int]) -> Finding:
    """What computes decode attention on a GPU of this compute capability."""
    value, install = attention_libraries.describe(capability)
    return Finding("attention", Status.OK if install is None else Status.ADVICE, value, install)


def find_memlock(limit: int | None = None) -> Finding:
    """The limit of locked memory, which some systems apply to pinned memory. `limit`: in bytes, this process's."""
    found = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if found == resource.RLIM_INFINITY:
        return Finding("memlock", Status.OK, "unlimited")
    return Finding(
        "memlock",
        Status.ADVICE,
        f"{found} bytes",
        "where pinning fails, raise it: ulimit -l unlimited, LimitMEMLOCK=infinity, or --ulimit memlock=-1",
    )


def find_numa(gpu_bus_id: str | None, sysfs: Path = numa.SYSFS) -> Finding:
    """The machine's nodes, and the one that the GPU hangs on."""
    nodes = numa.nodes(sysfs)
    if len(nodes) <= 1:
        return Finding("numa", Status.OK, "one node")
    value = f"{len(nodes)} nodes"
    if gpu_bus_id is None:
        return Finding("numa", Status.OK, value)
    node = numa.node_of_device(gpu_bus_id, sysfs)
    if node is None:
        return Finding(
            "numa", Status.ADVICE, f"{value}, the GPU's is not known", "start with numactl --preferred=N if you know it"
        )
    return Finding("numa", Status.OK, f"{value}, the GPU is on node {node}, which the host pool prefers")


def read_link(gpu_bus_id: str, sysfs: Path = numa.SYSFS) -> Link | None:
    """The widest link that GPU and slot agree on; idle GPUs run slower, so the current one says little.

    None where the system does not say.
    """
    folder = sysfs / "bus/pci/devices" / gpu_bus_id.lower()
    try:
        speed = (folder / "max_link_speed").read_text().split()[0]
        return Link(speed, int((folder / "current_link_width").read_text()))
    except (OSError, ValueError, IndexError):
        return None


def find_link(link: Link | None) -> Finding:
    """The PCIe generation and width."""
    if link is None or link.generation is None or link.width <= 0:
        return Finding("pcie", Status.OK, "the system does not say")
    value = f"generation {link.generation} x{link.width}"
    if link.width < 16:
        return Finding("pcie", Status.ADVICE, value, "reads from the host go over this link: use a slot with 16 lanes")
    return Finding("pcie", Status.OK, value)


def find_bandwidth(device: int, link: Link | None) -> Finding:
    """The copy engine's rate over pinned memory, each way, measured now."""
    try:
        to_device, to_host = measure_link(device)
    except (BackendError, torch.cuda.OutOfMemoryError) as error:
        return Finding("link", Status.MISSING, str(error), "free memory, or raise the limits that the message names")
    return judge_bandwidth(to_device, to_host, link)


def judge_bandwidth(to_device: float, to_host: float, link: Link | None) -> Finding:
    """Whether measured rates (GB/s) are what the link carries."""
    value = f"{to_device:.1f} GB/s to the device, {to_host:.1f} GB/s to the host"
    numbers = {"to_device_gbps": to_device, "to_host_gbps": to_host}
    possible = link.gbps if link is not None else None
    if possible is not None and min(to_device, to_host) < _LINK_SHARE * possible:
        return Finding(
            "link",
            Status.ADVICE,
            f"{value}; the link carries {possible:.0f}",
            "look for other traffic, a host pool on another NUMA node, or power management of the link",
            numbers,
        )
    return Finding("link", Status.OK, value, None, numbers)


def measure_link(device: int, num_bytes: int = LINK_BYTES) -> tuple[float, float]:
    """GB/s to the device and to the host: medians of copies of pinned memory. Raises `BackendError`."""
    place = torch.device("cuda", device)
    memory = PinnedMapping(PinRequest(num_bytes, device))
    try:
        host = memory.storage
        on_device = torch.empty(num_bytes, dtype=torch.uint8, device=place)
        to_device = statistics.median(_seconds(lambda: on_device.copy_(host, non_blocking=True), place))
        to_host = statistics.median(_seconds(lambda: host.copy_(on_device, non_blocking=True), place))
    finally:
        torch.cuda.synchronize(place)
        memory.release()
    return num_bytes / to_device / 1e9, num_bytes / to_host / 1e9


def _seconds(copy: Callable[[], object], device: torch.device) -> Iterator[float]:
    copy()
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):
            begin.record()
            copy()
            end.record()
        end.synchronize()
        yield begin.elapsed_time(end) / 1e3


def system_name() -> str:
    """The kernel and the Python that all of this was found under."""
    return f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
