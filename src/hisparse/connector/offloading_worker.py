"""The worker's side of the offload path: copies between its pages and the region, and what became of them."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from hisparse.cache.groups import GroupKind
from hisparse.connector.offloading_messages import RegionCopies
from hisparse.errors import BackendError, CapacityError, ProtocolError
from hisparse.offload.messages import OffloadReport, TransferKind
from hisparse.offload.page_copies import CopyDevice
from hisparse.offload.transfer import PageBatch, RegionTransfers
from hisparse.protocol import TransferId
from hisparse.worker.stream import CopyEvent

_MISFORTUNES = (OSError, MemoryError, BackendError, CapacityError, torch.OutOfMemoryError)
"""What a machine may answer through no fault of ours: the transfer failed. Anything else is a fault, and raises."""


class OffloadingWorker:
    """Carries out transfers of several groups in one stream of copies. It waits for nothing before `close`.

    Order against everything else that touches device blocks:

    - A store sees what was computed in earlier steps: copies begin behind all that is in the current stream.
    - A block that was spilled may be given to a load while the copy to the host still reads it. `order` settles that,
      and `CudaCopies.begin` does on a GPU: the compute stream waits in each `begin_step` for the page copies of
      earlier steps, this stream waits for the compute stream, and a block is only given away in the step behind the one
      whose report said `enqueued`. So transfers begin after the step's `begin_step`, which is why this connector
      comes behind HiSparse's.
    - A step that reads what was loaded is scheduled after the transfer was seen to be done.
    """

    def __init__(
        self,
        rank: int,
        groups: Mapping[GroupKind, RegionTransfers],
        device: CopyDevice,
        order: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        """`device`: the one that all `groups` copy by. `order` is called before copies begin, and has page copies of
        earlier steps made where no stream does. `release` gives the regions back, once nothing is under way.
        """
        self.rank = rank
        self._groups = dict(groups)
        self._device = device
        self._order = order
        self._release = release
        self._last_id: dict[GroupKind, int] = dict.fromkeys(groups, 0)
        self._in_flight: deque[tuple[GroupKind, TransferId, CopyEvent, bool]] = deque()
        """Group, id, end, and whether the transfer failed on the way; in the order of the stream."""
        self._enqueued: dict[GroupKind, list[TransferId]] = {group: [] for group in groups}
        self._is_closed = False

    @property
    def num_in_flight(self) -> int:
        """Transfers that were begun and whose end was not seen."""
        return len(self._in_flight)

    def start(self, copies: Sequence[RegionCopies]) -> None:
        """Enqueue transfers, in order.

        Raises `ProtocolError` for a group that is not there or an id that came before, with nothing of it enqueued,
        and `InvariantError` for blocks or rows that do not exist.
        """
        if not copies:
            return
        self._order()
        for transfer in copies:
            last = self._last_id.get(transfer.group)
            if last is None:
                raise ProtocolError(
                    f"transfer {transfer.transfer_id} is of the {transfer.group.value} group, which is not offloaded"
                )
            if transfer.transfer_id <= last:
                raise ProtocolError(
                    f"transfer {transfer.transfer_id} of the {transfer.group.value} group came after {last}: ids are "
                    "never reused"
                )
            self._last_id[transfer.group] = transfer.transfer_id
            self._begin(transfer)

    def take_reports(self) -> tuple[tuple[GroupKind, OffloadReport], ...]:
        """What was enqueued and what was seen to end since the last call. Never waits."""
        over: dict[GroupKind, tuple[list[TransferId], list[TransferId]]] = {group: ([], []) for group in self._groups}
        while self._in_flight and self._in_flight[0][2].query():
            group, transfer_id, _, has_failed = self._in_flight.popleft()
            over[group][has_failed].append(transfer_id)
        reports = []
        for group, (completed, failed) in over.items():
            enqueued = self._enqueued[group]
            if enqueued or completed or failed:
                report = OffloadReport(self.rank, tuple(enqueued), tuple(completed), tuple(failed))
                reports.append((group, report))
                enqueued.clear()
        return tuple(reports)

    def close(self) -> None:
        """Wait for what is under way, then give the regions back. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for _, _, event, _ in self._in_flight:
                event.wait()
        finally:
            self._in_flight.clear()
            self._release()

    def _begin(self, transfer: RegionCopies) -> None:
        transfers = self._groups[transfer.group]
        blocks = np.array(transfer.blocks, dtype=np.int64)
        pages = PageBatch.of_chunks(blocks, np.array(transfer.rows, dtype=np.int64))
        try:
            event = (transfers.store if transfer.kind is TransferKind.STORE else transfers.load)(pages)
        except _MISFORTUNES:
            # Some of the copies may be in the stream already: both ends are theirs until it has passed them.
            self._in_flight.append((transfer.group, transfer.transfer_id, self._device.end(), True))
            return
        self._enqueued[transfer.group].append(transfer.transfer_id)
        self._in_flight.append((transfer.group, transfer.transfer_id, event, False))
