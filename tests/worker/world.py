"""A small worker whose ids are shuffled on both sides, and the bytes that every row ought to have."""

import random
from typing import Protocol

import torch

from hisparse.config import CacheConfig, CachePlan, ModelGeometry, plan_cache
from hisparse.geometry import RowFormat, device_blocks
from hisparse.kernels.contract import Selection
from hisparse.protocol import (
    DeviceBlockId,
    Direction,
    HostBlockId,
    PageCopy,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    SparseKVWorkerReport,
    Table,
    TableUpdate,
    TransferId,
)
from hisparse.worker import Backend, HiSparseWorker
from hisparse.worker.shared_pool import PoolSharing

ELEMENTS = 12
BLOCK_SIZE = 4
TOPK = 4
NUM_SLOTS = 3
MAX_TOKENS = 64
LEADER_OF = (0, 0, 2, 2)


def make_plan(
    row: RowFormat | None = None,
    device_blocks_: int = 30,
    host_blocks_: int = 30,
    leader_of: tuple[int, ...] = LEADER_OF,
    max_running: int = NUM_SLOTS,
) -> CachePlan:
    """Four layers, two of them leaders; rows of 48 bytes that lie 128 bytes apart on the host.

    `max_running`: rows of a step. Only `NUM_SLOTS` slots have bytes of their own.
    """
    row = row if row is not None else RowFormat("float32", 4 * ELEMENTS)
    page = device_blocks(row, len(leader_of), BLOCK_SIZE).payload_bytes
    config = CacheConfig(
        block_size=BLOCK_SIZE,
        slab_bytes=device_blocks_ * page,
        host_pool_bytes=host_blocks_ * page,
        hot_rows=2 * TOPK,
        staging_rows=2 * TOPK,
        max_running=max_running,
        max_tokens=MAX_TOKENS,
        indexer_tokens=MAX_TOKENS,
    )
    return plan_cache(config, ModelGeometry(row, leader_of, TOPK, index_row_bytes=32))


class MakeWorld(Protocol):
    """Makes a world whose worker is closed after the test."""

    def __call__(self, backend: Backend | None = None, seed: int = 0, plan: CachePlan | None = None) -> "World": ...


class World:
    """Plays the scheduler for one worker. `step` runs an empty forward pass unless told what to do in it."""

    def __init__(
        self,
        backend: Backend | None = None,
        seed: int = 0,
        plan: CachePlan | None = None,
        sharing: PoolSharing | None = None,
    ) -> None:
        self.plan = plan if plan is not None else make_plan()
        rng = random.Random(seed)
        self.free_device = rng.sample(range(1, self.plan.num_device_blocks), self.plan.num_device_blocks - 1)
        self.free_host = rng.sample(range(1, self.plan.num_host_blocks), self.plan.num_host_blocks - 1)
        self.staging = tuple(DeviceBlockId(self.free_device.pop()) for _ in range(self.plan.staging_blocks))
        self.worker = HiSparseWorker(self.plan, self.staging, backend=backend, sharing=sharing)
        self._step = 0
        self._transfer = 0

    # Commands.

    def start(
        self,
        transfers: tuple[SparseKVPageTransfer, ...] = (),
        updates: tuple[TableUpdate, ...] = (),
        resets: tuple[int, ...] = (),
    ) -> None:
        self._step += 1
        self.worker.start_step(SparseKVOffloadCommand(self._step, transfers, resets, updates))

    def step(
        self,
        transfers: tuple[SparseKVPageTransfer, ...] = (),
        updates: tuple[TableUpdate, ...] = (),
        resets: tuple[int, ...] = (),
    ) -> SparseKVWorkerReport:
        self.start(transfers, updates, resets)
        return self.worker.finish_step()

    def transfer(self, direction: Direction, *pairs: tuple[int, int]) -> SparseKVPageTransfer:
        """Pairs of (device block, host block)."""
        self._transfer += 1
        copies = tuple(PageCopy(DeviceBlockId(device), HostBlockId(host)) for device, host in pairs)
        return SparseKVPageTransfer(TransferId(self._transfer), direction, copies)

    # Requests.

    def admit(self, slot: int, num_pages: int) -> list[int]:
        """Give a slot resident pages full of its tokens, and a hot lease. Returns the device blocks."""
        blocks = self.admit_pages(slot, num_pages)
        self.fill(slot, num_pages * BLOCK_SIZE)
        return blocks

    def admit_pages(self, slot: int, num_pages: int) -> list[int]:
        """The same, but nothing is written to the pages."""
        blocks = [self.free_device.pop() for _ in range(num_pages)]
        lease = tuple(self.free_device.pop() for _ in range(self.plan.hot_blocks))
        self.step(updates=(TableUpdate(Table.RESIDENT, slot, 0, tuple(blocks)), TableUpdate(Table.HOT, slot, 0, lease)))
        return blocks

    def fill(self, slot: int, num_tokens: int) -> None:
        """Write the slot's first tokens through the handles."""
        positions = torch.arange(num_tokens)
        slots = torch.full((num_tokens,), slot)
        rows = self.worker.tables.physical_rows(Table.RESIDENT, slots, positions)
        for handle in self.worker.handles:
            handle.write(rows, self.truth(slot, positions, handle.layer))

    def fill_host(self, host_block: int, slot: int) -> None:
        """Overwrite a host block with the first page of `slot`, as a spill of it would."""
        positions = torch.arange(BLOCK_SIZE)
        for layer in range(self.plan.model.num_layers):
            rows = host_block * BLOCK_SIZE + positions
            self.worker.host_pool.layer(layer).write(rows, self.truth(slot, positions, layer))

    def admit_on_host(self, slot: int, num_pages: int) -> None:
        """A slot whose pages are all on the host but the last, and its hot lease."""
        blocks = self.admit(slot, num_pages)
        host = self.spill(slot, dict(enumerate(blocks[:-1])))
        self.step(updates=self.on_host(slot, host))

    def spill(self, slot: int, pages: dict[int, int]) -> dict[int, int]:
        """Start spilling `pages` ({page: device block}) in a step of their own. Returns {page: host block}."""
        host = {page: self.free_host.pop() for page in pages}
        pairs = [(pages[page], host[page]) for page in pages]
        self.step(transfers=(self.transfer(Direction.DEVICE_TO_HOST, *pairs),))
        return host

    @staticmethod
    def on_host(slot: int, host: dict[int, int]) -> tuple[TableUpdate, ...]:
        """The updates by which the scheduler answers a spill that was enqueued."""
        return tuple(
            update
            for page, block in host.items()
            for update in (
                TableUpdate(Table.RESIDENT, slot, page, (0,)),
                TableUpdate(Table.HOST, slot, page, (block,)),
            )
        )

    # Bytes.

    @staticmethod
    def truth(slot: int, positions: torch.Tensor, layer: int) -> torch.Tensor:
        """float32 `[..., ELEMENTS]`: every row of every layer of every slot differs, and none is zero."""
        number = 1 + positions + MAX_TOKENS * (slot + NUM_SLOTS * layer)
        return (ELEMENTS * number.unsqueeze(-1) + torch.arange(ELEMENTS)).to(torch.float32)

    def expected(self, slot: int, positions: torch.Tensor, layer: int) -> torch.Tensor:
        """The truth, with zeros for positions below 0."""
        return self.truth(slot, positions, layer).masked_fill((positions < 0).unsqueeze(-1), 0)

    def decode(self, slot: int, positions: torch.Tensor) -> list[torch.Tensor]:
        """What every layer's attention gathers for a decode row of `slot` that selects `positions`, `[n]`."""
        selection = Selection(positions.to(torch.int32)[None], torch.tensor([slot], dtype=torch.int32))
        return [gathered[0] for gathered in self.forward(selection)]

    def forward(self, selection: Selection) -> list[torch.Tensor]:
        """The same for any decode rows, `[num_rows, topk, elements]`. All leaders select alike. It only launches."""
        gathered: list[torch.Tensor] = []
        rows: dict[int, torch.Tensor] = {}
        for handle, leader in zip(self.worker.handles, self.plan.model.leader_of, strict=True):
            if leader == handle.layer:
                rows[leader] = handle.resolve(selection)
            else:
                handle.load_followed()
            gathered.append(handle.gather(rows[leader]))
        return gathered

    def assert_decodes(self, slot: int, positions: list[int]) -> None:
        wanted = torch.tensor(positions)
        for layer, got in enumerate(self.decode(slot, wanted)):
            assert torch.equal(got, self.expected(slot, wanted, layer)), f"layer {layer}"
