"""Pinning a shared region, chunk by chunk, so that a GPU reads and writes its rows in place."""

import logging

from hisparse.errors import BackendError, InputError
from hisparse.offload.region import SharedRegion
from hisparse.worker.cuda import teardown
from hisparse.worker.cuda.host_memory import CHUNK_BYTES, Pinning, chunks, pinning_advice

logger = logging.getLogger(__name__)


class PinnedRegion:
    """All rows of a region, pinned for one process's GPU, until `release`, exit or SIGTERM.

    A chunk is a whole number of rows, so that no copy of the driver's crosses from one registration into the next.
    Every member pins for itself: the pages are shared, their registration is not.
    """

    def __init__(
        self,
        region: SharedRegion,
        device_index: int,
        pinning: Pinning | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`chunk_bytes`: the most that one registration covers.

        Raises `BackendError` when the driver refuses, and has given back what it had by then.
        """
        if chunk_bytes < region.row_bytes:
            raise InputError(f"chunks of {chunk_bytes} bytes hold no row of {region.row_bytes} bytes")
        self._device_index = device_index
        self._pinning = pinning if pinning is not None else Pinning()
        self._registered: list[int] = []
        self._teardown: int | None = None
        size = chunk_bytes // region.row_bytes * region.row_bytes
        num_bytes = region.num_blocks * region.row_bytes
        try:
            for start, length in chunks(num_bytes, size):
                self._register(region.address + start, length, pinned_bytes=start, num_bytes=num_bytes)
        except BaseException:
            self.release()
            raise
        self._teardown = teardown.add(self._unpin_or_raise)

    @property
    def num_chunks(self) -> int:
        """Registrations that are in force."""
        return len(self._registered)

    def release(self) -> tuple[str, ...]:
        """Unpin. Returns a line for each chunk that the driver kept; idempotent. The region is closed after this."""
        key, self._teardown = self._teardown, None
        if key is not None:
            teardown.remove(key)
        problems = self._unpin()
        for problem in problems:
            logger.warning("shared region: %s", problem)
        return problems

    def _register(self, address: int, length: int, pinned_bytes: int, num_bytes: int) -> None:
        try:
            with self._pinning.context(self._device_index):
                self._pinning.register(address, length)
                self._registered.append(address)
                seen_at = self._pinning.device_address(address)
        except BackendError as error:
            raise BackendError(pinning_advice(str(error), num_bytes, pinned_bytes)) from error
        if seen_at != address:
            raise BackendError(
                "the GPU sees pinned host memory at addresses of its own, which this library does not support: "
                "use a driver and a system with unified addressing (64-bit Linux)"
            )

    def _unpin(self) -> tuple[str, ...]:
        """Goes on after a failure."""
        registered, self._registered = self._registered, []
        problems = []
        for address in registered:
            try:
                with self._pinning.context(self._device_index):
                    self._pinning.unregister(address)
            except BackendError as error:
                problems.append(f"a chunk at {address:#x} stays pinned: {error}")
        return tuple(problems)

    def _unpin_or_raise(self) -> None:
        problems = self._unpin()
        if problems:
            raise BackendError("; ".join(problems))
