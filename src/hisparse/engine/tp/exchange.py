"""How ranks get rank 0's events while they start: as plain bytes, for whoever reaches the store can write to it."""

import struct
from typing import Any

from hisparse.errors import BackendError
from hisparse.worker.cuda.shared_pool import EventHandles, Exchange

_KEY = "hisparse-host-events"
_INDEX = struct.Struct("=i")
_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


def exchange_events(store: Any) -> Exchange:
    """Rank 0's events for all, through the store in which the ranks met."""

    def exchange(own: EventHandles | None) -> EventHandles:
        if own is not None:
            store.set(_KEY, encode_handles(own))
            return own
        return decode_handles(store.get(_KEY))

    return exchange


def encode_handles(handles: EventHandles) -> bytes:
    """The device's index, then the handles, which are all as long as each other."""
    return _INDEX.pack(handles.device_index) + b"".join(handles.handles)


def decode_handles(encoded: bytes) -> EventHandles:
    """What `encode_handles` was given. Raises `BackendError` for bytes of another length."""
    index, handles = encoded[: _INDEX.size], encoded[_INDEX.size :]
    if len(index) < _INDEX.size or not handles or len(handles) % _HANDLE_BYTES:
        raise BackendError(f"rank 0 gave {len(encoded)} bytes for its events, which cannot be right: start again")
    starts = range(0, len(handles), _HANDLE_BYTES)
    return EventHandles(_INDEX.unpack(index)[0], tuple(handles[at : at + _HANDLE_BYTES] for at in starts))
