"""The few calls of the CUDA driver that a launch takes, through ctypes. torch owns the context.

A kernel is loaded once per device and found again by its specialisation, so a launch allocates nothing and waits for
nothing, and a graph can capture it. Loading is not capturable: call every shape once before capturing it.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from hisparse.errors import BackendError
from hisparse.kernels.cuda.compiler import MINIMUM_ARCHITECTURE, compile_kernel
from hisparse.kernels.cuda.parameters import DeviceLimits, Specialization

_SHARED_BYTES_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_DECLARED_SHARED_BYTES = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendError(f"the NVIDIA driver was not found ({error}): install it, or use device cpu") from error


def _check(status: int, what: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _library().cuGetErrorString(status, ctypes.byref(text))
    message = text.value.decode() if text.value else "unknown error"
    raise BackendError(f"{what} failed: {message} (CUDA driver error {status})")


@cache
def device_limits(device_index: int) -> DeviceLimits:
    """Limits of a CUDA device. Raises `BackendError` when there is none or it is too old."""
    if not torch.cuda.is_available():
        raise BackendError("no CUDA device is available: check nvidia-smi and torch's CUDA build, or use device cpu")
    properties = torch.cuda.get_device_properties(device_index)
    arch = (properties.major, properties.minor)
    if arch < MINIMUM_ARCHITECTURE:
        raise BackendError(
            f"{properties.name} has compute capability {arch[0]}.{arch[1]}; the kernels need "
            f"{MINIMUM_ARCHITECTURE[0]}.{MINIMUM_ARCHITECTURE[1]} or newer"
        )
    shared_bytes = ctypes.c_int()
    status = _library().cuDeviceGetAttribute(ctypes.byref(shared_bytes), _SHARED_BYTES_OPTIN, device_index)
    _check(status, "reading the device's shared memory")
    return DeviceLimits(arch, properties.multi_processor_count, shared_bytes.value)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that is loaded on one device."""

    function: ctypes.c_void_p
    name: str
    threads: int

    def launch(self, grid: tuple[int, int], shared_bytes: int, arguments: ctypes.Structure) -> None:
        """Launch on torch's current stream with one struct by value. Returns before the kernel runs."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        status = _library().cuLaunchKernel(
            self.function,
            *(ctypes.c_uint(extent) for extent in (*grid, 1, self.threads, 1, 1, shared_bytes)),
            stream,
            parameters,
            None,
        )
        _check(status, f"launching {self.name}")


@cache
def load(specialization: Specialization, device_index: int) -> Kernel:
    """Compile or find a kernel and load it on a device. Raises `BackendError`."""
    limits = device_limits(device_index)
    cubin = compile_kernel(specialization, limits.arch)
    library = _library()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device_index):
        _check(library.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {specialization.kernel}")
        name = specialization.kernel.encode()
        _check(library.cuModuleGetFunction(ctypes.byref(function), module, name), f"finding {specialization.kernel}")
        _allow_shared_memory(function, specialization, limits)
    return Kernel(function, specialization.kernel, specialization.threads)


def _allow_shared_memory(function: ctypes.c_void_p, specialization: Specialization, limits: DeviceLimits) -> None:
    """Let the kernel use all the dynamic shared memory that its own declarations leave."""
    declared = ctypes.c_int()
    _check(
        _library().cuFuncGetAttribute(ctypes.byref(declared), _DECLARED_SHARED_BYTES, function), "reading shared memory"
    )
    largest = limits.shared_bytes - declared.value
    status = _library().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, largest)
    _check(status, f"giving {specialization.kernel} {largest} bytes of shared memory")
