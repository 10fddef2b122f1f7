"""Transfers of pages: from the scheduler's messages to copies in a stream, and back to two acknowledgements."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby

import torch

from hisparse.errors import ProtocolError
from hisparse.geometry import NULL_BLOCK, BlockGeometry
from hisparse.protocol import Direction, PageCopy, SparseKVPageTransfer, TransferId
from hisparse.worker.shared_pool import HostWrites, OwnWrites
from hisparse.worker.stream import CopyEvent, CopyStream
from hisparse.worker.views import BlockCopies, PagedCacheView


class TransferEngine:
    """Carries out transfers between slab and host pool. It knows physical blocks only, and allocates none.

    Transfers of one direction that follow each other in a command share one copy, and so one event.
    """

    def __init__(
        self,
        stream: CopyStream,
        device: PagedCacheView,
        host: PagedCacheView,
        geometry: BlockGeometry,
        host_writes: HostWrites | None = None,
    ) -> None:
        """`device` and `host` are the views of whole blocks; `geometry` says what a block's payload is.

        `host_writes`: how pages get to the host, in the order of `stream`; None copies them.
        """
        self._stream = stream
        self._host_writes = host_writes if host_writes is not None else OwnWrites(stream)
        self._device = device
        self._host = host
        self._page_bytes = geometry.payload_bytes
        self._moved = dict.fromkeys(Direction, 0)
        # Ids only ever grow, so the last one tells a repeated one without remembering them all.
        self._last_id = -1
        self._in_flight: deque[tuple[tuple[TransferId, ...], CopyEvent]] = deque()
        self._enqueued: list[TransferId] = []
        self._last_host_write: CopyEvent | None = None

    @property
    def host_to_device_bytes(self) -> int:
        """Payload put in the stream towards the device since the start."""
        return self._moved[Direction.HOST_TO_DEVICE]

    @property
    def device_to_host_bytes(self) -> int:
        """Payload put in the stream towards the host since the start; none where another rank writes the pool."""
        return self._moved[Direction.DEVICE_TO_HOST]

    @property
    def num_in_flight(self) -> int:
        """Transfers that were enqueued and not yet seen to be done."""
        return sum(len(ids) for ids, _ in self._in_flight)

    def enqueue(self, transfers: Sequence[SparseKVPageTransfer]) -> None:
        """Put transfers in the stream, in order.

        Raises `ProtocolError` naming the transfer, and enqueues none of them, when an id was seen before, or out of
        order, or when a page's block does not exist or is written twice.
        """
        self._check(transfers)
        for direction, group in groupby(transfers, key=lambda transfer: transfer.direction):
            self._submit(direction, tuple(group))

    def poll(self) -> tuple[TransferId, ...]:
        """Transfers newly seen to be done, in the stream's order. Never waits."""
        done: list[TransferId] = []
        while self._in_flight and self._in_flight[0][1].query():
            done.extend(self._in_flight.popleft()[0])
        return tuple(done)

    def take_enqueued(self) -> tuple[TransferId, ...]:
        """Transfers enqueued since the last call, in order."""
        enqueued = tuple(self._enqueued)
        self._enqueued.clear()
        return enqueued

    def wait_host_writes(self) -> None:
        """Block until every device-to-host copy that was enqueued so far has landed.

        For readers that the stream does not order: a tier on the CPU, a peer process. Their acknowledgements are
        given by the next `poll`, as always.
        """
        if self._last_host_write is not None:
            self._last_host_write.wait()
            self._last_host_write = None

    def _submit(self, direction: Direction, transfers: tuple[SparseKVPageTransfer, ...]) -> None:
        ids = tuple(transfer.transfer_id for transfer in transfers)
        pages = [copy for transfer in transfers for copy in transfer.copies]
        copies = self._copies(direction, pages)
        if direction is Direction.DEVICE_TO_HOST:
            event = self._last_host_write = self._host_writes.submit(copies)
        else:
            event = self._stream.submit(copies)
        if direction is Direction.HOST_TO_DEVICE or self._host_writes.is_writer:
            self._moved[direction] += len(pages) * self._page_bytes
        self._last_id = ids[-1]
        self._enqueued.extend(ids)
        self._in_flight.append((ids, event))

    def _copies(self, direction: Direction, pages: Sequence[PageCopy]) -> BlockCopies:
        device = torch.tensor([page.device_block for page in pages], dtype=torch.int64, device="cpu")
        host = torch.tensor([page.host_block for page in pages], dtype=torch.int64, device="cpu")
        if direction is Direction.DEVICE_TO_HOST:
            return BlockCopies(self._device, self._host, device, host)
        return BlockCopies(self._host, self._device, host, device)

    def _check(self, transfers: Iterable[SparseKVPageTransfer]) -> None:
        last = self._last_id
        written: set[tuple[Direction, int]] = set()
        for transfer in transfers:
            if transfer.transfer_id <= last:
                raise ProtocolError(f"transfer {transfer.transfer_id} came after transfer {last}: ids are never reused")
            last = transfer.transfer_id
            for page in transfer.copies:
                self._check_page(transfer.transfer_id, page)
                is_spill = transfer.direction is Direction.DEVICE_TO_HOST
                destination = (transfer.direction, int(page.host_block if is_spill else page.device_block))
                if destination in written:
                    raise ProtocolError(
                        f"transfer {last} writes block {destination[1]}, which this command wrote already"
                    )
                written.add(destination)

    def _check_page(self, transfer_id: TransferId, page: PageCopy) -> None:
        for what, block, view in (
            ("device", page.device_block, self._device),
            ("host", page.host_block, self._host),
        ):
            if not NULL_BLOCK < block < view.layout.num_blocks:
                raise ProtocolError(
                    f"transfer {transfer_id} names {what} block {block}; data is in 1 to {view.layout.num_blocks - 1}"
                )
