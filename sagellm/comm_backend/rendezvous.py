"""Where ranks find each other: a store of torch.distributed for a rendezvous."""

import socket
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlparse

import torch.distributed as dist

from sagellm.comm_backend.config import CommConfig
from sagellm.core.errors import CommError, CommTimeoutError

__all__ = ["is_local", "open_store"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
RETRY_S = 0.02


def is_local(config: CommConfig) -> bool:
    """Whether the ranks can only be processes of one host."""
    parts = urlparse(config.rendezvous)
    return parts.scheme != "tcp" or parts.hostname in LOOPBACK


def open_store(config: CommConfig) -> dist.Store:
    """The store that all ranks share; rank 0 opens the port of a `tcp://` one.

    Raises:
        CommTimeoutError: the port was not opened.
        CommError: the file cannot be written, the port cannot be opened.
    """
    parts = urlparse(config.rendezvous)
    limit = timedelta(seconds=config.timeout_s)
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        try:
            path.open("ab").close()  # where it cannot be written, the store would try for ever
        except OSError as error:
            raise CommError(f"{config.rendezvous} cannot be written ({error.strerror}); give a file that can.") from error
        store = dist.FileStore(str(path), config.world_size)
    else:
        is_master = config.rank == 0
        if not is_master:
            _until_open(config, str(parts.hostname), int(parts.port or 0))
        try:
            store = dist.TCPStore(
                str(parts.hostname), parts.port, config.world_size, is_master, limit, wait_for_workers=False
            )
        except RuntimeError as error:
            raise CommError(f"{config.rendezvous} cannot be used: {str(error).splitlines()[0]}") from error
    store.set_timeout(limit)
    return store


def _until_open(config: CommConfig, host: str, port: int) -> None:
    """Until somebody listens there; torch would print a stack trace for each of its tries."""
    deadline = time.monotonic() + config.timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), RETRY_S)).close()
            return
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                said = f"{config.rendezvous}: rank 0 did not open it within {config.timeout_s:g} s ({error})."
                raise CommTimeoutError(said) from error
        time.sleep(RETRY_S)
