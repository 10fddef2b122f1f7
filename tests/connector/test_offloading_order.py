"""A block whose page is on its way to the host may be filled from below at once: the host still gets what it held."""

from collections.abc import Callable

import torch

from hisparse.cache import KVCacheManager, TableLog
from hisparse.cache.groups import GroupKind
from hisparse.connector import OffloadingWorker, RegionCopies
from hisparse.offload.config import OffloadConfig
from hisparse.offload.engine_layout import GroupLayout, ModelIdentity
from hisparse.offload.late_copies import LateCpuCopies
from hisparse.offload.messages import TransferKind
from hisparse.offload.region import SharedRegion, new_region_name
from hisparse.offload.sharding import Topology
from hisparse.offload.transfer import RegionTransfers
from hisparse.protocol import (
    DeviceBlockId,
    Direction,
    HostBlockId,
    PageCopy,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    TransferId,
)
from hisparse.worker import CopyDelay, CpuBackend, HiSparseWorker
from tests.worker.world import make_plan

RESIDENT = GroupKind.RESIDENT
OTHER, REUSED, HOST = 7, 9, 3
"""Blocks: one whose page is stored and loaded again, the one that is spilled and then filled, and the host's."""


def copies(number: int, kind: TransferKind, block: int) -> tuple[RegionCopies, ...]:
    return (RegionCopies(RESIDENT, TransferId(number), kind, (0,), ((block,),)),)


def spill_and_fill(seed: int, order: Callable[[HiSparseWorker], Callable[[], None]]) -> tuple[bool, bool]:
    """Whether the host has what the block held, and the block what was loaded into it."""
    plan = make_plan()
    identity = ModelIdentity("tiny", "1", "0", "float32", bytes(16))
    layout = GroupLayout.of(RESIDENT, plan, identity, OffloadConfig(1 << 20), Topology(1))
    staging = KVCacheManager(plan, TableLog()).staging
    region = SharedRegion.create(new_region_name("test"), 1, layout.rows.row_bytes)
    with HiSparseWorker(plan, staging, backend=CpuBackend(CopyDelay(seed, 4))) as worker:
        device = LateCpuCopies(CopyDelay())
        pages = layout.pages([worker.slab.layer(layer) for layer in range(plan.model.num_layers)])
        transfers = {RESIDENT: RegionTransfers(pages.layers, region, layout.rows, device, pages.slot)}
        offloading = OffloadingWorker(0, transfers, device, order(worker), release=region.close)
        slab, host = worker.slab.pages().rows(torch.uint8), worker.host_pool.pages().rows(torch.uint8)
        slab.random_(256)
        old, new = slab[REUSED].clone(), slab[OTHER].clone()
        offloading.start(copies(1, TransferKind.STORE, OTHER))
        offloading.take_reports()
        page = PageCopy(DeviceBlockId(REUSED), HostBlockId(HOST))
        spill = SparseKVPageTransfer(TransferId(1), Direction.DEVICE_TO_HOST, (page,))
        worker.start_step(SparseKVOffloadCommand(1, (spill,)))
        assert worker.finish_step().enqueued == (TransferId(1),)
        # Enqueued, so the block is given to someone else.
        worker.start_step(SparseKVOffloadCommand(2))
        offloading.start(copies(2, TransferKind.LOAD, REUSED))
        offloading.take_reports()
        worker.finish_step()
        worker.wait_host_writes()
        outcome = torch.equal(host[HOST], old), torch.equal(slab[REUSED], new)
        offloading.close()
    return outcome


def test_a_load_into_a_block_comes_behind_the_copy_that_still_reads_it() -> None:
    outcomes = [spill_and_fill(seed, lambda worker: worker.order_before_compute) for seed in range(8)]
    assert outcomes == [(True, True)] * 8


def test_control_without_the_order_the_host_gets_what_was_loaded() -> None:
    outcomes = [spill_and_fill(seed, lambda worker: lambda: None) for seed in range(8)]
    assert (False, True) in outcomes
