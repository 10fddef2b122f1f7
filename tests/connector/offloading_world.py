"""A prefix source with everything around it, simulated: devices, regions, a worker, files, threads and time.

Contents are values, not bytes. Page p of a prompt holds `(group, key of the page)`; copies move values between blocks
and rows, so a block that is used under a copy, or a chunk that is taken for another, shows as a wrong value.
"""

from collections.abc import Sequence
from concurrent.futures import Future

from hisparse.cache.groups import GroupKind
from hisparse.connector import (
    GroupPages,
    OffloadingConnector,
    OffloadingSource,
    OffloadingWorkerMetadata,
    RegionCopies,
    StoreTicket,
    TicketId,
    TierEvent,
)
from hisparse.connector.offloading_messages import NOT_WANTED
from hisparse.offload.config import OffloadConfig
from hisparse.offload.manager import OffloadManager
from hisparse.offload.messages import OffloadReport, RegionBlockId, TransferKind
from hisparse.offload.tier import Below
from hisparse.protocol import DeviceBlockId
from tests.offload.offload_world import LateExecutor, LateTier

RESIDENT, INDEXER = GroupKind.RESIDENT, GroupKind.INDEXER
BOTH = (RESIDENT, INDEXER)

Content = tuple[GroupKind, bytes]


def prompt_keys(name: str, num_pages: int) -> list[bytes]:
    return [f"{name}{number}".encode().ljust(16, b".") for number in range(num_pages)]


class Files(LateTier):
    """A `LateTier` that can be told to do from now on what it is asked at once."""

    is_prompt = False

    def store(self, key: bytes, buffer: object) -> "Future[bool]":
        future = super().store(key, buffer)
        if self.is_prompt:
            self.end_all()
        return future


class OffloadingWorld:
    """One worker, which acts only when told to. Transfers wait in `todo`, in the order in which they were sent."""

    def __init__(
        self,
        num_rows: int = 8,
        pages_per_chunk: int = 1,
        has_files: bool = False,
        groups: Sequence[GroupKind] = BOTH,
        **options: object,
    ) -> None:
        self.now_s = 0.0
        self.size = pages_per_chunk
        self.executor = LateExecutor()
        self.files = {group: Files() for group in groups}
        self.rows: dict[GroupKind, list[dict[int, object]]] = {
            group: [dict.fromkeys(range(pages_per_chunk)) for _ in range(num_rows)] for group in groups
        }
        self.config = OffloadConfig.parse(
            {"cpu_bytes": 1 << 20, "policy": "lru", "blocks_per_chunk": pages_per_chunk, **options}
        )
        self.num_rows, self.has_files = num_rows, has_files
        self.managers = {group: self.make_manager(group) for group in groups}
        self.source = OffloadingSource(self.managers, pages_per_chunk)
        self.connector = OffloadingConnector.for_scheduler(self.source)
        self.device: dict[tuple[GroupKind, int], Content] = {}
        self.todo: list[RegionCopies] = []
        self.step = 0
        self._next_block = 0

    def make_manager(self, group: GroupKind) -> OffloadManager:
        def row(block: RegionBlockId) -> object:
            return self.rows[group][block]

        below = Below(self.files[group], row, self.executor) if self.has_files else None
        return OffloadManager(self.config, self.num_rows, 1, below, lambda: self.now_s)

    # The scheduler's side.

    def new_blocks(self, count: int) -> tuple[DeviceBlockId, ...]:
        self._next_block += count
        return tuple(DeviceBlockId(block) for block in range(self._next_block - count + 1, self._next_block + 1))

    def computed(self, group: GroupKind, keys: Sequence[bytes], first: int, end: int) -> GroupPages:
        """Pages of a prompt on the device."""
        pages = GroupPages(group, first, self.new_blocks(end - first))
        for key, block in zip(keys[first:end], pages.blocks, strict=True):
            self.device[group, block] = (group, key)
        return pages

    def empty(self, group: GroupKind, first: int, end: int) -> GroupPages:
        return GroupPages(group, first, self.new_blocks(end - first))

    def offer(
        self, request: str, keys: Sequence[bytes], first: int = 0, end: int | None = None, groups: object = None
    ) -> StoreTicket | None:
        chosen = self.source.groups if groups is None else groups
        end = len(keys) if end is None else end
        pages = [self.computed(group, keys, first, end) for group in self.source.groups if group in chosen]  # type: ignore[operator]
        return self.source.offer(request, keys, pages)

    def keep(self, keys: Sequence[bytes], groups: object = None) -> None:
        """Store a prompt's pages, files included, as a request that comes and goes."""
        self.offer("keeper", keys, groups=groups)
        self.settle()
        self.source.take_events()
        self.source.forget("keeper")

    def load(
        self, request: str, keys: Sequence[bytes], have: dict[GroupKind, int], end: int
    ) -> tuple[TicketId, list[GroupPages]] | None:
        pages = [self.empty(group, have[group], end) for group in self.source.groups if have[group] < end]
        ticket = self.source.begin_load(request, keys, pages)
        return None if ticket is None else (ticket, pages)

    def holds(self, pages: GroupPages, keys: Sequence[bytes]) -> bool:
        """Whether the blocks hold what was computed for these pages."""
        found = [self.device.get((pages.group, block)) for block in pages.blocks]
        wanted = keys[pages.first_page : pages.first_page + len(pages.blocks)]
        return found == [(pages.group, key) for key in wanted]

    # The worker's side, files, and threads.

    def send(self) -> None:
        """One step's command reaches the worker."""
        self.step += 1
        self.todo += self.connector.build_connector_meta(self.step).copies

    def work(self, transfer: RegionCopies, *, fails: bool = False) -> None:
        """Carry one transfer out, or fail to, having left rubbish wherever it writes."""
        self.todo.remove(transfer)
        for row, blocks in zip(transfer.rows, transfer.blocks, strict=True):
            content = self.rows[transfer.group][row]
            for page, block in enumerate(blocks):
                if transfer.kind is TransferKind.STORE:
                    content[page] = "rubbish" if fails else self.device[transfer.group, block]
                elif block != NOT_WANTED:
                    found = content[page]
                    self.device[transfer.group, block] = "rubbish" if fails else found  # type: ignore[assignment]
        ids = (transfer.transfer_id,)
        report = OffloadReport(0, failed=ids) if fails else OffloadReport(0, enqueued=ids, completed=ids)
        self.connector.update_connector_output(OffloadingWorkerMetadata(((transfer.group, report),)))

    def work_all(self) -> None:
        self.send()
        while self.todo:
            self.work(self.todo[0])

    def answer_files(self) -> None:
        """Threads and files do all that they were asked to."""
        self.executor.run_all()
        for tier in self.files.values():
            tier.end_all()

    def settle(self) -> None:
        self.work_all()
        self.answer_files()
        self.source.assert_invariants()

    def events(self) -> tuple[TierEvent, ...]:
        self.source.assert_invariants()
        return self.source.take_events()
