"""Where ranks find each other: a store in their parent's process, which listens on this machine alone."""

import socket
from typing import Any

import torch.distributed

# Its stores are public, but its annotations do not say so.
_dist: Any = torch.distributed

LOOPBACK = "127.0.0.1"


def make_store() -> Any:
    """A store on a free port. Left to itself it would listen to every network."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return _dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
