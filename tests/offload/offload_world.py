"""Everything around the offload manager, simulated: devices, a region, workers, a tier below, threads and time.

Contents are values, not bytes. A computed chunk holds its key on the device; worker `w` writes `(key, w)` into its part
of a region row, and what a worker reads back must be its own share of that key. So a block that is reused under a copy,
published too early or confused with another is seen as a wrong value.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from hisparse.offload.config import OffloadConfig
from hisparse.offload.manager import OffloadManager
from hisparse.offload.messages import OffloadReport, RegionBlockId, RegionTransfer, TransferEvent, TransferKind
from hisparse.offload.tier import Below
from hisparse.protocol import TransferId

Row = dict[int, object]
"""What each worker's share of one region row holds."""


class LateExecutor(Executor):
    """Runs a task when told to, or at once, or refuses it as one that was shut down."""

    def __init__(self) -> None:
        self.tasks: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.is_prompt = False
        self.is_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        if self.is_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self.tasks.append((future, lambda: fn(*args, **kwargs)))
        if self.is_prompt:
            self.run_all()
        return future

    def run_all(self) -> None:
        tasks, self.tasks = self.tasks, []
        for future, task in tasks:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except Exception as error:
                    future.set_exception(error)


class LateTier:
    """A tier whose work ends when told to, well or badly. `rows` are the region's rows, not buffers."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Row] = {}
        self.work: list[tuple[str, bytes, Row, Future[bool]]] = []
        self.refuses: set[str] = set()
        """Names of methods that raise at once."""
        self.touched: list[tuple[bytes, ...]] = []
        self.closed_within: float | None = None

    def lookup(self, key: bytes) -> bool:
        self._refuse("lookup")
        return key in self.kept

    def store(self, key: bytes, buffer: Any) -> "Future[bool]":
        return self._begin("store", key, buffer)

    def load(self, key: bytes, buffer: Any) -> "Future[bool]":
        return self._begin("load", key, buffer)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._refuse("touch")
        self.touched.append(tuple(keys))

    def close(self, deadline: float) -> None:
        self.closed_within = deadline

    def end(self, number: int, *, well: bool = True, error: Exception | None = None) -> None:
        """End one piece of work: do it, or leave rubbish in a buffer that was to be filled."""
        what, key, row, future = self.work.pop(number)
        well = well and error is None and (what == "store" or key in self.kept)
        if what == "store" and well:
            self.kept[key] = dict(row)
        if what == "load":
            row.update(self.kept[key] if well else dict.fromkeys(row, "rubbish"))
        if error is None:
            future.set_result(well)
        else:
            future.set_exception(error)

    def end_all(self) -> None:
        while self.work:
            self.end(0)

    def _begin(self, what: str, key: bytes, row: Row) -> "Future[bool]":
        self._refuse(what)
        future: Future[bool] = Future()
        self.work.append((what, key, row, future))
        return future

    def _refuse(self, what: str) -> None:
        if what in self.refuses:
            raise OSError(5, f"{what} refused")


class World:
    """A manager with everything around it. Workers act only when told to, each at a time of its own."""

    def __init__(self, num_blocks: int, num_workers: int = 1, has_tier: bool = False, **options: object) -> None:
        self.num_workers = num_workers
        self.now_s = 0.0
        self.rows: list[Row] = [dict.fromkeys(range(num_workers)) for _ in range(num_blocks)]
        self.tier = LateTier()
        self.executor = LateExecutor()
        config = OffloadConfig.parse({"cpu_bytes": 1 << 20, "policy": "lru", **options})
        below = Below(self.tier, self.row, self.executor) if has_tier else None
        self.manager = OffloadManager(config, num_blocks, num_workers, below, lambda: self.now_s)
        self.is_stepping = True
        """Whether a transfer that is begun is handed out at once, as if the step ended."""
        self.open: dict[TransferId, tuple[RegionTransfer, list[bytes]]] = {}
        self.todo: set[tuple[TransferId, int]] = set()
        """Transfers and the workers that have not copied for them yet."""
        self.kept_loads: dict[TransferId, list[bytes]] = {}

    def row(self, block: RegionBlockId) -> Any:
        return self.rows[block]

    def store(self, request: str, keys: list[bytes]) -> tuple[int, TransferId | None]:
        """Offer chunks that the device holds; gives how many were accepted, and the transfer."""
        plan = self.manager.prepare_store(request, keys)
        return plan.num_accepted, self._hand_out(plan.transfer, keys)

    def load(self, request: str, keys: list[bytes]) -> TransferId | None:
        return self._hand_out(self.manager.prepare_load(request, len(keys)), keys)

    def _hand_out(self, transfer: RegionTransfer | None, keys: list[bytes]) -> TransferId | None:
        if transfer is None:
            return None
        if self.is_stepping:
            self.manager.hand_out()
        self.open[transfer.transfer_id] = (transfer, keys)
        self.todo |= {(transfer.transfer_id, worker) for worker in range(self.num_workers)}
        return transfer.transfer_id

    def pass_step(self, now_s: float) -> None:
        """The next step hands out its copies at `now_s`, if there are any."""
        self.now_s = now_s
        self.manager.hand_out()

    def copy(self, transfer_id: TransferId, worker: int) -> None:
        """One worker copies its share and reports that it is done."""
        transfer, keys = self.open[transfer_id]
        for position, block in transfer.chunks:
            share = (keys[position], worker)
            if transfer.kind is TransferKind.STORE:
                self.rows[block][worker] = share
            else:
                assert self.rows[block][worker] == share, f"worker {worker} read {self.rows[block][worker]}"
        self.todo.remove((transfer_id, worker))
        self.manager.report(OffloadReport(worker, enqueued=(transfer_id,), completed=(transfer_id,)))

    def fail(self, transfer_id: TransferId, worker: int) -> None:
        """One worker cannot copy; a store has left rubbish in its share by then."""
        transfer, _ = self.open[transfer_id]
        if transfer.kind is TransferKind.STORE:
            for _, block in transfer.chunks:
                self.rows[block][worker] = "rubbish"
        self.todo.remove((transfer_id, worker))
        self.manager.report(OffloadReport(worker, failed=(transfer_id,)))

    def copy_all(self) -> None:
        for transfer_id, worker in sorted(self.todo):
            self.copy(transfer_id, worker)

    def keep(self, request: str, keys: list[bytes]) -> None:
        """Store chunks from beginning to end, the tier below included, as a request that comes and goes."""
        self.store(request, keys)
        self.settle()
        self.manager.finish(request)

    def settle(self) -> tuple[TransferEvent, ...]:
        """Let everything that is under way end well."""
        self.copy_all()
        self.executor.run_all()
        self.tier.end_all()
        events = self.manager.take_events()
        self.manager.assert_invariants()
        return events


def chain(name: str, length: int) -> list[bytes]:
    """Keys of a prompt's chunks."""
    return [f"{name}{number}".encode().ljust(16, b".") for number in range(length)]
