"""Nothing in a decode step makes the host wait for the GPU: the token that the engine reads comes after it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from hisparse.config import CacheConfig, CachePlan, plan_cache
from hisparse.engine import EngineConfig, LoadedModel, load_model
from hisparse.engine.batch import ScheduledTokens, StepBatch, build_batch
from hisparse.engine.cuda_runner import CudaModelRunner
from hisparse.protocol import (
    DeviceBlockId,
    Direction,
    HostBlockId,
    PageCopy,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    Table,
    TableUpdate,
    TransferId,
)
from hisparse.worker import HiSparseWorker
from hisparse.worker.cuda import CudaBackend
from tests.engine.wide import wide_model
from tests.gpu.marks import NEEDS_GPU
from tests.gpu.waiting import nothing_waits

pytestmark = NEEDS_GPU

PAGE = 16
NUM_PAGES = 8


@pytest.fixture(params=["plain rows", "packed rows"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    if request.param == "plain rows":
        return load_model("builtin:tiny-glm", "float32", "cuda")
    wide = wide_model("bfloat16", "cuda")
    return replace(wide, geometry=wide.geometry_for("fp8_ds_mla"))


@pytest.fixture
def worker(loaded: LoadedModel) -> Iterator[HiSparseWorker]:
    plan: CachePlan = plan_cache(
        CacheConfig(
            block_size=PAGE,
            slab_bytes=1 << 20,
            host_pool_bytes=1 << 20,
            hot_rows=64,
            staging_rows=64,
            max_running=2,
            max_tokens=512,
            indexer_tokens=1024,
        ),
        loaded.geometry,
    )
    worker = HiSparseWorker(plan, [DeviceBlockId(block) for block in (41, 42, 43, 44)], backend=CudaBackend())
    yield worker
    worker.close()


def admit(step: int) -> SparseKVOffloadCommand:
    """Slot 1 gets eight pages, a hot lease and places for its index keys."""
    pages = tuple(range(1, 1 + NUM_PAGES))
    updates = (
        TableUpdate(Table.RESIDENT, 1, 0, pages),
        TableUpdate(Table.HOT, 1, 0, (20, 21, 22, 23)),
        TableUpdate(Table.INDEXER, 1, 0, pages),
    )
    return SparseKVOffloadCommand(step, resets=(1,), updates=updates)


def spill(step: int) -> SparseKVOffloadCommand:
    copies = tuple(PageCopy(DeviceBlockId(block), HostBlockId(block + 3)) for block in (1, 2, 3))
    return SparseKVOffloadCommand(step, (SparseKVPageTransfer(TransferId(step), Direction.DEVICE_TO_HOST, copies),))


def spilled(step: int) -> SparseKVOffloadCommand:
    updates = (TableUpdate(Table.RESIDENT, 1, 0, (0, 0, 0)), TableUpdate(Table.HOST, 1, 0, (4, 5, 6)))
    return SparseKVOffloadCommand(step, resets=(0,), updates=updates)


def prompt() -> StepBatch:
    return build_batch([ScheduledTokens(1, list(range(120)), 0, wants_logits=True, is_decode=False)])


def decode(position: int) -> StepBatch:
    return build_batch([ScheduledTokens(1, [7], position, wants_logits=True, is_decode=True)])


@pytest.mark.parametrize("use_graphs", [True, False], ids=["replayed", "eager"])
def test_a_decode_step_with_transfers_updates_and_resets_never_waits(
    loaded: LoadedModel, worker: HiSparseWorker, use_graphs: bool
) -> None:
    config = EngineConfig(max_tokens=512, cuda_graphs=use_graphs)
    with CudaModelRunner(loaded, worker, config) as runner:

        def step(command: SparseKVOffloadCommand, batch: StepBatch) -> torch.Tensor:
            worker.start_step(command)
            logits = runner.run(batch)
            worker.finish_step()
            return logits

        step(admit(1), prompt())
        step(SparseKVOffloadCommand(2), decode(120))
        with nothing_waits():
            step(spill(3), decode(121))
            step(spilled(4), decode(122))
            logits = step(SparseKVOffloadCommand(5), decode(123))
        assert torch.isfinite(logits).all()
        counters = worker.counters()
        assert counters["miss"] > 0
        assert counters["unreachable"] == 0
        assert worker.tables.num_missing() == 0


def test_reading_back_is_what_the_check_forbids(no_synchronisation: None) -> None:
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.zeros(3, device="cuda").tolist()
