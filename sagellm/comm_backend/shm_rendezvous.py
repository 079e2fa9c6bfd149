"""How the ranks of a group of `shm` find the memory of rank 0: through a store of torch.distributed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlparse

from torch import distributed

from sagellm._core import ShmSegment
from sagellm.comm_backend.config import CommConfig
from sagellm.core.errors import CommError, CommTimeoutError

__all__ = ["Found", "find_segment"]

KEY = "sagellm/shm"


@dataclass(frozen=True)
class Found:
    """`complaint`: why this rank does not fit the group, which the others are to hear."""

    segment: ShmSegment
    complaint: str = ""


@contextmanager
def find_segment(config: CommConfig, sizes: dict[str, int]) -> Iterator[Found]:
    """The segment of the group, which others can open as long as the context lasts.

    Raises:
        CommTimeoutError: rank 0 did not come.
        CommPeerError: it came, and went.
        CommError: not this rendezvous, or no shared memory here.
    """
    store = _open_store(config)
    if config.rank == 0:
        segment = ShmSegment.create(config.world_size, **sizes)
        told = {"pid": os.getpid(), "fd": segment.fd, "token": segment.token, "world_size": config.world_size, **sizes}
        _ask(config, lambda: store.set(KEY, json.dumps(told)))
        yield Found(segment)
        segment.release_fd()
        return
    found = json.loads(_ask(config, lambda: store.get(KEY)))
    segment = ShmSegment.open(found.pop("pid"), found.pop("fd"), found.pop("token"))
    own = {"world_size": config.world_size, **sizes}
    complaint = f"rank {config.rank} has {own}, rank 0 has {found}; give all ranks the same." if own != found else ""
    yield Found(segment, complaint)


def _open_store(config: CommConfig) -> distributed.Store:
    parts = urlparse(config.rendezvous)
    timeout = timedelta(seconds=config.timeout_s)
    if parts.scheme == "file":
        store: distributed.Store = distributed.FileStore(parts.path, config.world_size)
        store.set_timeout(timeout)
        return store
    if parts.scheme == "tcp":
        return _ask(
            config,
            lambda: distributed.TCPStore(
                parts.hostname, parts.port, config.world_size, config.rank == 0, timeout, wait_for_workers=False
            ),
        )
    raise CommError(f"shm cannot meet at {config.rendezvous}; give file:///path or tcp://127.0.0.1:port.")


def _ask(config, call):
    try:
        return call()
    except RuntimeError as error:
        text = f"rank {config.rank} of shm found no other rank at {config.rendezvous} in {config.timeout_s:g} s: {error}"
        raise CommTimeoutError(text) from None
