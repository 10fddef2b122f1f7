"""The slab keeps to its budget; the indexer's keys lie beside it."""

from dataclasses import replace

import pytest
import torch

from hisparse.config import CachePlan
from hisparse.errors import CapacityError, InvariantError
from hisparse.geometry import RowFormat
from hisparse.worker import CpuBackend, IndexerStore, Slab
from tests.worker.world import make_plan

allocate = CpuBackend().allocate_device


def test_the_slab_is_whole_blocks_within_the_budget(plan: CachePlan) -> None:
    slab = Slab(plan, allocate)
    assert slab.storage.numel() == slab.num_bytes == plan.config.slab_bytes


def test_a_slab_over_its_budget_is_refused(plan: CachePlan) -> None:
    with pytest.raises(InvariantError, match="over its budget"):
        Slab(replace(plan, num_device_blocks=plan.num_device_blocks + 1), allocate)


def test_slab_layers_do_not_share_a_row(plan: CachePlan) -> None:
    slab = Slab(plan, allocate)
    layers = range(plan.model.num_layers)
    for layer in layers:
        slab.layer(layer).write(torch.tensor([9]), torch.full((1, 12), layer + 1.0))
    assert [float(slab.layer(layer).read(torch.tensor(9), torch.float32)[0]) for layer in layers] == [1, 2, 3, 4]


def test_views_of_a_closed_slab_raise(plan: CachePlan) -> None:
    slab = Slab(plan, allocate)
    view = slab.layer(0)
    slab.close()
    slab.close()
    with pytest.raises(InvariantError, match="slab was closed"):
        view.read(torch.tensor(9), torch.float32)


def test_every_leader_has_keys_of_its_own(plan: CachePlan) -> None:
    store = IndexerStore(plan, allocate)
    rows = torch.tensor([4, 11, 60])
    keys = [torch.randn(3, 8) for _ in plan.model.leaders]
    for index, key in enumerate(keys):
        store.write(index, rows, key)
    for index, key in enumerate(keys):
        assert torch.equal(store.read(index, rows), key)
        assert torch.equal(store.read(index, torch.tensor([[11, -1]]))[0, 1], torch.zeros(8))


def test_keys_of_another_type_are_refused(plan: CachePlan) -> None:
    store = IndexerStore(plan, allocate)
    with pytest.raises(InvariantError, match=r"float32, not torch\.bfloat16"):
        store.write(0, torch.tensor([4]), torch.zeros(1, 16, dtype=torch.bfloat16))


def test_keys_beside_packed_rows_are_bytes() -> None:
    store = IndexerStore(make_plan(RowFormat("fp8_ds_mla", 656)), allocate)
    keys = torch.arange(32, dtype=torch.uint8)[None]
    store.write(1, torch.tensor([7]), keys)
    assert torch.equal(store.read(1, torch.tensor([7])), keys)


def test_keys_beside_packed_rows_are_numbers_where_the_geometry_names_their_type() -> None:
    plan = make_plan(RowFormat("fp8_ds_mla", 656))
    store = IndexerStore(replace(plan, model=replace(plan.model, index_dtype="bfloat16")), allocate)
    keys = torch.randn(1, 16).bfloat16()
    store.write(1, torch.tensor([7]), keys)
    assert torch.equal(store.read(1, torch.tensor([7])), keys)
    with pytest.raises(InvariantError, match=r"bfloat16, not torch\.uint8"):
        store.write(1, torch.tensor([7]), torch.zeros(1, 32, dtype=torch.uint8))


def test_a_closed_store_raises(plan: CachePlan) -> None:
    store = IndexerStore(plan, allocate)
    store.close()
    with pytest.raises(InvariantError, match="indexer's store was closed"):
        store.read(0, torch.tensor([4]))


def test_device_memory_that_cannot_be_had_names_the_amount() -> None:
    with pytest.raises(CapacityError, match=f"the device's KV takes {1 << 60} bytes of memory"):
        allocate(1 << 60)
