"""Coordinator, worker and resolver without the engine: a request's KV goes to the host and reads the same."""

from array import array
from itertools import count

import torch

import hisparse
from hisparse.protocol import Table

TOKENS, TOPK, SLOT = 512, 16, 0
row = hisparse.latent_row("float32", kv_lora_rank=24, rope_dim=8)
model = hisparse.ModelGeometry(row, leader_of=(0, 0), index_topk=TOPK, index_row_bytes=32)  # layer 1 follows layer 0
config = hisparse.CacheConfig(
    block_size=16,
    slab_bytes=136 << 10,
    host_pool_bytes=1 << 20,
    hot_rows=2 * TOPK,
    staging_rows=TOPK,
    max_running=1,
    max_tokens=TOKENS,
    indexer_tokens=TOKENS,
)
plan = hisparse.plan_cache(config, model)

# The scheduler's side knows which block is whose and where each page is; the worker's side has the bytes.
log = hisparse.TableLog()
kv = hisparse.KVCacheManager(plan, log)
coordinator = hisparse.HiSparseCoordinator(kv, log, root=b"the model's name")
scheduler = hisparse.HiSparseConnector.for_scheduler(coordinator, log)
worker = hisparse.HiSparseWorker(plan, kv.staging)
bridge = hisparse.HiSparseConnector.for_worker(worker)
steps = count(1)


def run_step() -> None:
    """Carry a command to the worker and its report back. A model's forward pass would stand between the two."""
    bridge.bind_connector_metadata(scheduler.build_connector_meta(next(steps)))
    bridge.start_load_kv()
    scheduler.update_connector_output(bridge.build_connector_worker_meta())
    bridge.clear_connector_metadata()


kv.add("request", SLOT)
coordinator.add("request", SLOT, array("i", range(TOKENS)))
assert kv.grow("request", plan.device.pages(TOKENS)).granted  # every page gets a block of the slab, which is now full
run_step()
positions = torch.arange(TOKENS)
rows = worker.tables.physical_rows(Table.RESIDENT, torch.full_like(positions, SLOT), positions)
truth = torch.randn(model.num_layers, TOKENS, 32, generator=torch.Generator().manual_seed(0))
for handle in worker.handles:
    handle.write(rows, truth[handle.layer])
coordinator.seal("request", TOKENS)  # all pages are full and computed: they may leave

print(f"{coordinator.reclaim(24)} of {plan.device.pages(TOKENS)} pages leave for the host")
while coordinator.num_in_flight:
    run_step()
assert kv.take_hot("request").granted  # whoever reads from the host needs hot rows; their blocks were reclaimed too
run_step()

for first in (0, 4, 400):  # three decode steps, each with the positions that an indexer would have selected
    chosen = torch.arange(first, first + 2 * TOPK, 2, dtype=torch.int32)
    selected = worker.handles[0].resolve(hisparse.Selection(chosen[None], torch.tensor([SLOT], dtype=torch.int32)))
    worker.handles[1].load_followed()
    assert all(torch.equal(handle.gather(selected)[0], truth[handle.layer, chosen]) for handle in worker.handles)
    found = worker.counters()
    print(f"step at {first:>3}: so far {found['resident']} resident, {found['hot']} hot, {found['miss']} missed")
worker.close()
