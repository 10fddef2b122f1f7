"""Copies between devices and region that are under way, and the rule by which many workers' reports become one fact.

Each worker says `enqueued` and then `completed`, or `failed` at any time before `completed`; each once. A transfer is
over when every worker has said its last word, and not before: until then some worker may still write its share.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hisparse.errors import ProtocolError
from hisparse.offload.cpu_tier import Entry
from hisparse.offload.messages import OffloadReport, TransferKind, TransferOutcome
from hisparse.protocol import TransferId


@dataclass(slots=True, eq=False)
class OpenTransfer:
    """A transfer on its way. It holds one reference to each of its entries.

    `request` becomes None when the request is finished. `due_s` is None until the workers are given it. `is_overdue`
    once the manager has given it up. The sets hold the workers that reported.
    """

    transfer_id: TransferId
    kind: TransferKind
    request: str | None
    entries: tuple[Entry, ...]
    due_s: float | None = None
    is_overdue: bool = False
    enqueued_by: set[int] = field(default_factory=set)
    over_for: set[int] = field(default_factory=set)
    failed_by: set[int] = field(default_factory=set)


class TransferLog:
    """All open transfers of `num_workers` workers. `last_id`: of the last transfer that workers have heard of."""

    def __init__(self, num_workers: int, last_id: int = 0) -> None:
        self.num_workers = num_workers
        self._open: dict[TransferId, OpenTransfer] = {}
        self._begun: list[OpenTransfer] = []
        """Those that the workers were not given yet."""
        self._handed_out_s = float("-inf")
        self.last_id = last_id

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenTransfer]:
        return iter(self._open.values())

    def begin(self, kind: TransferKind, request: str, entries: tuple[Entry, ...]) -> OpenTransfer:
        """Open a transfer under an id that was never used before."""
        self.last_id += 1
        transfer = OpenTransfer(TransferId(self.last_id), kind, request, entries)
        self._open[transfer.transfer_id] = transfer
        self._begun.append(transfer)
        return transfer

    def hand_out(self, now_s: float, due_s: float) -> None:
        """The workers are given all that was begun since the last call, and have until `due_s` for it."""
        self._handed_out_s = now_s
        for transfer in self._begun:
            transfer.due_s = due_s
        self._begun.clear()

    def acknowledge(self, report: OffloadReport) -> list[tuple[OpenTransfer, TransferOutcome]]:
        """Take one worker's report; returns what has now happened over all workers, in the order of the report.

        Raises `ProtocolError` naming the transfer when a report is unknown, repeated or out of order; then nothing
        of the report counts.
        """
        self._check(report)
        happened: list[tuple[OpenTransfer, TransferOutcome]] = []
        for transfer_id in report.enqueued:
            transfer = self._open[transfer_id]
            transfer.enqueued_by.add(report.worker)
            if len(transfer.enqueued_by) == self.num_workers:
                happened.append((transfer, TransferOutcome.ENQUEUED))
        for transfer_id in report.completed + report.failed:
            transfer = self._open[transfer_id]
            transfer.over_for.add(report.worker)
            if transfer_id in report.failed:
                transfer.failed_by.add(report.worker)
            if len(transfer.over_for) == self.num_workers:
                del self._open[transfer_id]
                happened.append((transfer, TransferOutcome.FAILED if transfer.failed_by else TransferOutcome.DONE))
        return happened

    def overdue(self) -> list[OpenTransfer]:
        """Transfers that were due when the last ones were handed out and are not over. Each is returned once."""
        late = [t for t in self if t.due_s is not None and t.due_s <= self._handed_out_s and not t.is_overdue]
        for transfer in late:
            transfer.is_overdue = True
        return late

    def _check(self, report: OffloadReport) -> None:
        worker = report.worker
        if not 0 <= worker < self.num_workers:
            raise ProtocolError(f"a report came from worker {worker}; there are {self.num_workers}")
        enqueued = set(report.enqueued)
        for what in ("enqueued", "completed", "failed"):
            ids: tuple[TransferId, ...] = getattr(report, what)
            for position, transfer_id in enumerate(ids):
                transfer = self._get(transfer_id, worker, what)
                said = f"worker {worker} reported transfer {transfer_id} {what}"
                if transfer_id in ids[:position] or (what == "enqueued" and worker in transfer.enqueued_by):
                    raise ProtocolError(f"{said} twice")
                if worker in transfer.over_for:
                    raise ProtocolError(f"{said} after it had reported the end of it")
                if what == "completed" and transfer_id not in enqueued and worker not in transfer.enqueued_by:
                    raise ProtocolError(f"{said} before enqueued")
                if what == "failed" and transfer_id in report.completed:
                    raise ProtocolError(f"{said} and completed at once")

    def _get(self, transfer_id: TransferId, worker: int, what: str) -> OpenTransfer:
        transfer = self._open.get(transfer_id)
        if transfer is None:
            past = "is over already" if 0 < transfer_id <= self.last_id else "was never begun"
            raise ProtocolError(f"worker {worker} reported transfer {transfer_id} {what}, which {past}")
        return transfer
