"""Copies in flight and who has acknowledged them.

A transaction holds leases of its own on both ends of every copy, so that neither end can be reused under the copy
whatever becomes of the request. Each worker gives two acknowledgements, in order, once each:

    begun ──every worker enqueued──► enqueued ──every worker completed──► completed (and forgotten)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hisparse.errors import ProtocolError
from hisparse.protocol import PageCopy, SparseKVPageTransfer, SparseKVWorkerReport, TransferId
from hisparse.residency.page_states import RequestPages


@dataclass(slots=True, eq=False)
class Transaction:
    """One transfer on its way.

    `owners`: the requests whose pages move, without those that have finished or were preempted. `pages` are their page
    numbers, the same for all of them, and `keys` the prefix keys under which the copies may be found, None where they
    may not; both are parallel to `transfer.copies`. `publishes`: whether any may; not after the pools were told to
    forget. The sets hold the workers that reported.
    """

    transfer: SparseKVPageTransfer
    owners: list[RequestPages]
    pages: tuple[int, ...]
    keys: tuple[bytes | None, ...]
    publishes: bool = True
    enqueued_by: set[int] = field(default_factory=set)
    completed_by: set[int] = field(default_factory=set)

    def published(self) -> Iterator[tuple[int, PageCopy, bytes]]:
        """Page number, copy and key of what may be found."""
        if self.publishes:
            for page, copy, key in zip(self.pages, self.transfer.copies, self.keys, strict=True):
                if key is not None:
                    yield page, copy, key


class TransactionLog:
    """All transactions in flight, and the rule by which reports of several workers become one fact."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._open: dict[TransferId, Transaction] = {}
        self._last_id = 0

    def next_id(self) -> TransferId:
        self._last_id += 1
        return TransferId(self._last_id)

    def begin(self, transaction: Transaction) -> None:
        self._open[transaction.transfer.transfer_id] = transaction

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> tuple[Transaction, ...]:
        return tuple(self._open.values())

    def is_enqueued(self, transaction: Transaction) -> bool:
        return len(transaction.enqueued_by) == self.num_workers

    def acknowledge(self, report: SparseKVWorkerReport) -> tuple[list[Transaction], list[Transaction]]:
        """Take one worker's report. Returns the transactions that every worker has now enqueued, and completed.

        Raises `ProtocolError` naming the transfer when a report is unknown, repeated or out of order.
        """
        worker = report.worker
        if not 0 <= worker < self.num_workers:
            raise ProtocolError(f"a report came from worker {worker}; there are {self.num_workers}")
        enqueued: list[Transaction] = []
        completed: list[Transaction] = []
        for transfer_id in report.enqueued:
            transaction = self._get(transfer_id, worker, "enqueued")
            if worker in transaction.enqueued_by:
                raise ProtocolError(f"worker {worker} reported transfer {transfer_id} enqueued twice")
            transaction.enqueued_by.add(worker)
            if self.is_enqueued(transaction):
                enqueued.append(transaction)
        for transfer_id in report.completed:
            transaction = self._get(transfer_id, worker, "completed")
            if worker not in transaction.enqueued_by:
                raise ProtocolError(f"worker {worker} reported transfer {transfer_id} completed before enqueued")
            if worker in transaction.completed_by:
                raise ProtocolError(f"worker {worker} reported transfer {transfer_id} completed twice")
            transaction.completed_by.add(worker)
            if len(transaction.completed_by) == self.num_workers:
                completed.append(transaction)
                del self._open[transfer_id]
        return enqueued, completed

    def _get(self, transfer_id: TransferId, worker: int, what: str) -> Transaction:
        transaction = self._open.get(transfer_id)
        if transaction is None:
            past = "finished already" if 0 < transfer_id <= self._last_id else "was never begun"
            raise ProtocolError(f"worker {worker} reported transfer {transfer_id} {what}, which {past}")
        return transaction
