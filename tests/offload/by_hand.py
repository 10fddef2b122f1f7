"""Descriptors executed one by one, on memory that real addresses name."""

import ctypes
from collections.abc import Sequence

import numpy as np

from hisparse.offload.copy_plan import CopyPlan, Descriptors, Direction, WriterFilter
from hisparse.offload.layout import LayerMapping, TensorView


def execute(descriptors: Descriptors, count: int) -> None:
    """Make the first `count` copies."""
    rows = zip(descriptors.sources[:count], descriptors.destinations[:count], descriptors.sizes[:count], strict=True)
    for source, destination, size in rows:
        ctypes.memmove(int(destination), int(source), int(size))


def addresses(buffer: np.ndarray, stride: int, index: Sequence[int]) -> np.ndarray:
    """Where pages `index` of a buffer begin: uint64."""
    return np.array([buffer.ctypes.data + stride * i for i in index], dtype=np.uint64)


def store(
    mapping: LayerMapping, view: TensorView, buffer: np.ndarray, pages: np.ndarray, blocks: Sequence[int]
) -> None:
    """Store block `blocks[i]` of a tensor as canonical page `i`, if this rank is elected to."""
    ids = np.arange(len(blocks), dtype=np.uint64)
    local = addresses(buffer, view.block_stride, blocks)
    canonical = addresses(pages, pages.shape[1], range(len(blocks)))
    local, canonical = WriterFilter(mapping, len(blocks)).select(ids, local, canonical)
    plan = CopyPlan(mapping, Direction.STORE)
    descriptors = Descriptors(len(blocks) * plan.num_fragments)
    execute(descriptors, plan.fill(descriptors, 0, local, canonical))


def load(mapping: LayerMapping, view: TensorView, buffer: np.ndarray, pages: np.ndarray, blocks: Sequence[int]) -> None:
    """Load canonical page `i` into block `blocks[i]` of a tensor."""
    plan = CopyPlan(mapping, Direction.LOAD)
    descriptors = Descriptors(len(blocks) * plan.num_fragments)
    local = addresses(buffer, view.block_stride, blocks)
    canonical = addresses(pages, pages.shape[1], range(len(blocks)))
    execute(descriptors, plan.fill(descriptors, 0, canonical, local))
