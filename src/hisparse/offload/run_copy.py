"""Copies by the CPU: one run of all pages at a time, so that no Python runs for each fragment.

Memory is looked at as an array with an entry for every byte, which is what a run's pieces would be if a page began
there: the pieces lie at the run's stride. Numpy gathers a batch of such entries into a buffer that stays in the cache,
and scatters it. Large pages are copied one by one, which costs less than the buffer does.
"""

import numpy as np

LARGE_BYTES = 32 << 10
"""From here on a call per page is a small part of its copy."""

_BATCH_BYTES = 256 << 10
"""What passes through the buffer at once: it fits a core's second-level cache."""


def copy_run(
    sources: np.ndarray, destinations: np.ndarray, size: int, count: int, source_stride: int, destination_stride: int
) -> None:
    """Copy `count` pieces of `size` bytes from each address `sources[i]` to `destinations[i]`: uint64 `[n]` each.

    Pieces lie `source_stride` and `destination_stride` bytes apart. Destinations overlap neither each other nor a
    source.
    """
    if not len(sources):
        return
    first, to = sources.min(), destinations.min()
    take, put = (sources - first).view(np.int64), (destinations - to).view(np.int64)
    readable = np.asarray(_Memory(int(first), (int(take.max()) + 1, count), size, source_stride))
    writable = np.asarray(_Memory(int(to), (int(put.max()) + 1, count), size, destination_stride))
    if size * count >= LARGE_BYTES:
        for page, place in zip(take.tolist(), put.tolist(), strict=True):
            writable[place] = readable[page]
        return
    batch = _BATCH_BYTES // (size * count)
    for start in range(0, len(take), batch):
        end = start + batch
        writable[put[start:end]] = readable[take[start:end]]


class _Memory:
    """Memory as `[addresses, pieces]`, in the way that numpy asks for it. Not all of it need be mapped."""

    def __init__(self, address: int, shape: tuple[int, int], size: int, stride: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": f"|V{size}",
            "strides": (1, stride),
            "version": 3,
        }
