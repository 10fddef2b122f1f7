"""The calls of the CUDA driver that torch does not offer: registering host memory, and batched and strided copies.

torch owns the context; every call here works in the one of the current device.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from hisparse.errors import BackendError

PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
DEVICE_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
_ACCESS_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_MIN_BATCH_VERSION = 12080


class DriverError(BackendError):
    """A call of the CUDA driver failed. `status` is its return code."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@cache
def library() -> ctypes.CDLL:
    """libcuda. Raises `BackendError` when no driver is installed."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendError(f"the NVIDIA driver was not found ({error}): install it, or use device cpu") from error


def check(status: int, what: str) -> None:
    """Raise `DriverError` saying what failed and why, unless `status` is 0."""
    if status == 0:
        return
    text = ctypes.c_char_p()
    library().cuGetErrorString(status, ctypes.byref(text))
    reason = text.value.decode() if text.value else "unknown error"
    raise DriverError(f"{what} failed: {reason} (CUDA driver error {status})", status)


def version() -> int:
    """The newest CUDA version that the driver serves, as 1000*major + 10*minor. Raises `BackendError` without one."""
    number = ctypes.c_int()
    check(library().cuDriverGetVersion(ctypes.byref(number)), "reading the driver's version")
    return number.value


@contextmanager
def device_context(index: int) -> Iterator[None]:
    """The primary context of device `index`, which is torch's, current in this thread. Raises `DriverError`.

    Threads start without a context, and torch sets one only when it changes the device.
    """
    context, before = _primary_context(index), ctypes.c_void_p()
    check(library().cuCtxGetCurrent(ctypes.byref(before)), "reading the current context")
    check(library().cuCtxSetCurrent(context), f"using device {index}")
    try:
        yield
    finally:
        library().cuCtxSetCurrent(before)


@cache
def _primary_context(index: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    check(library().cuInit(ctypes.c_uint(0)), "starting the driver")
    check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(index)), f"opening device {index}")
    return context


def bus_id(index: int) -> str:
    """The PCI address of device `index`, as sysfs writes it: "0000:1b:00.0". Raises `DriverError`."""
    check(library().cuInit(ctypes.c_uint(0)), "starting the driver")
    text = ctypes.create_string_buffer(32)
    status = library().cuDeviceGetPCIBusId(text, ctypes.c_int(len(text)), ctypes.c_int(index))
    check(status, f"reading the PCI address of device {index}")
    return text.value.decode().lower()


def register(address: int, num_bytes: int) -> None:
    """Pin host memory and map it for all devices. Raises `DriverError`."""
    status = library().cuMemHostRegister_v2(
        ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(PORTABLE | DEVICE_MAPPED)
    )
    check(status, f"pinning {num_bytes} bytes of host memory")


def unregister(address: int) -> None:
    """Undo `register` for the memory that starts at `address`. Raises `DriverError`."""
    check(library().cuMemHostUnregister(ctypes.c_void_p(address)), "unpinning host memory")


def device_address(address: int) -> int:
    """Where devices see registered host memory. Raises `DriverError`."""
    pointer = ctypes.c_uint64()
    status = library().cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(address), ctypes.c_uint(0))
    check(status, "mapping host memory for the device")
    return pointer.value


@dataclass(frozen=True, slots=True)
class Fragments:
    """Contiguous copies: `num_bytes[i]` from address `sources[i]` to `destinations[i]`. uint64 `[n]` each."""

    sources: np.ndarray
    destinations: np.ndarray
    num_bytes: np.ndarray


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Strided copies: `heights[i]` rows of `widths[i]` bytes from address `sources[i]` to `destinations[i]`.

    Rows lie `source_pitch` and `destination_pitch` bytes apart.
    """

    sources: list[int]
    destinations: list[int]
    widths: list[int]
    heights: list[int]
    source_pitch: int
    destination_pitch: int


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_END_OF_2D = (
    ("x_bytes", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("memory_type", ctypes.c_uint),
    ("host", ctypes.c_void_p),
    ("device", ctypes.c_uint64),
    ("array", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
)


class _Memcpy2D(ctypes.Structure):
    _fields_ = (
        *((f"source_{name}", kind) for name, kind in _END_OF_2D),
        *((f"destination_{name}", kind) for name, kind in _END_OF_2D),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@cache
def _batch_function() -> tuple[Any, bool] | None:
    """The batched copy and whether it still takes an index for failures; None when the driver has none."""
    if version() < _MIN_BATCH_VERSION:
        return None
    for name, has_fail_index in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        function = getattr(library(), name, None)
        if function is not None:
            return function, has_fail_index
    return None


def copies_in_batches() -> bool:
    """Whether the driver takes many copies in one call (CUDA 12.8 and later)."""
    return _batch_function() is not None


def copy_batch(fragments: Fragments, stream: int) -> None:
    """Put all fragments in a stream in one call. Sources are read in stream order. Raises `DriverError`.

    Must not be called where `copies_in_batches` is false, nor with the default stream.
    """
    found = _batch_function()
    if found is None:
        raise BackendError("this driver has no batched copy: check copies_in_batches first")
    function, has_fail_index = found
    count = len(fragments.num_bytes)
    attributes = _Attributes(access_order=_ACCESS_IN_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE)
    arguments: list[Any] = [
        *(
            ctypes.c_void_p(values.ctypes.data)
            for values in (fragments.destinations, fragments.sources, fragments.num_bytes)
        ),
        ctypes.c_size_t(count),
        ctypes.byref(attributes),
        (ctypes.c_size_t * 1)(0),
        ctypes.c_size_t(1),
    ]
    if has_fail_index:
        arguments.append(ctypes.byref(ctypes.c_size_t()))
    check(function(*arguments, ctypes.c_void_p(stream)), f"copying {count} pages")


def copy_singly(fragments: Fragments, stream: int) -> None:
    """The same, one call per fragment: for drivers without batches. Raises `DriverError`."""
    columns = (fragments.sources.tolist(), fragments.destinations.tolist(), fragments.num_bytes.tolist())
    for source, destination, size in zip(*columns, strict=True):
        status = library().cuMemcpyAsync(
            ctypes.c_uint64(destination), ctypes.c_uint64(source), ctypes.c_size_t(size), ctypes.c_void_p(stream)
        )
        check(status, f"copying {size} bytes")


def copy_rectangles(shapes: Rectangles, stream: int) -> None:
    """Put strided copies in a stream, one call each. Raises `DriverError`."""
    arguments = _Memcpy2D(
        source_memory_type=_UNIFIED,
        source_pitch=shapes.source_pitch,
        destination_memory_type=_UNIFIED,
        destination_pitch=shapes.destination_pitch,
    )
    # The driver reads the struct before it returns, so one serves all; a step can copy thousands of blocks.
    copy, by_reference, handle = library().cuMemcpy2DAsync_v2, ctypes.byref(arguments), ctypes.c_void_p(stream)
    columns = (shapes.sources, shapes.destinations, shapes.widths, shapes.heights)
    for source, destination, width, height in zip(*columns, strict=True):
        arguments.source_device, arguments.destination_device = source, destination
        arguments.width_bytes, arguments.height = width, height
        status = copy(by_reference, handle)
        if status:
            check(status, f"copying {height} rows of {width} bytes")
