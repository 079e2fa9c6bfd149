"""KV blocks over Mooncake's transfer engine, the library itself, by TCP.

Its sockets have no authentication: a client that reaches them may read and write registered memory. With a loopback
`host` they are kept to this machine; with another one, keep the network between the engines closed to others. Endpoints
carry a proof of the group's key, so a peer of another group is refused before anything is read.

A read cannot be taken back, and a read from a peer that stands still never ends; hence `staged`. Connecting to such a peer
blocks the whole transfer engine, so each link has a transfer engine of its own. RDMA goes through LMDeploy's own backend.

Source: Mooncake 0.3.13.post1, mooncake-integration/transfer_engine/transfer_engine_py.cpp and
mooncake-transfer-engine/src/transport/tcp_transport.
"""

import importlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from sagellm.comm_backend.kv_transfer.layout import Model
from sagellm.comm_backend.kv_transfer.library_settings import library_settings
from sagellm.comm_backend.kv_transfer.listeners import kept_to_loopback
from sagellm.comm_backend.kv_transfer.plan import TransferEndpoint
from sagellm.comm_backend.kv_transfer.staged import RemoteReads, Span, StagedChannel, Staging
from sagellm.core.errors import TransferError, TransferTimeoutError
from sagellm.core.ports import is_loopback

__all__ = ["MooncakeChannel"]

PACKAGE = "mooncake-transfer-engine-non-cuda"
TOKEN_BYTES = 16
# Only TCP, also where there is RDMA; and only errors on stderr, where it otherwise tells of each step.
SETTINGS = {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR"}


class Address(Model):
    """`bases`: addresses of the parts in the owner's process; `token_at`: that of a token of this instance."""

    session: str = Field(pattern=r"^[^\s]+:\d{1,5}$", max_length=255)
    bases: tuple[int, ...]
    token_at: int = Field(ge=0, lt=1 << 63)
    token: str = Field(pattern=rf"^[0-9a-f]{{{2 * TOKEN_BYTES}}}$")
    proof: str


class _Engine:
    """A transfer engine of the library, until `close`."""

    def __init__(self, host: str) -> None:
        with library_settings(SETTINGS), kept_to_loopback("mooncake") if is_loopback(host) else nullcontext():
            self.library: Any = _load().TransferEngine()
            code = self.library.initialize(host, "P2PHANDSHAKE", "tcp", "")
        if code:
            raise TransferError(f"mooncake cannot begin at {host} (it says {code}; its own words are on stderr).")
        self.session = f"{host}:{self.library.get_rpc_port()}"

    def register(self, address: int, num_bytes: int) -> None:
        if code := self.library.register_memory(address, num_bytes):
            raise TransferError(f"mooncake does not register {num_bytes} bytes (it says {code}).")

    def close(self) -> None:
        """Reads that are under way end here, having failed. It takes up to a second, in which this process stands still."""
        self.library = None


class _Reads(RemoteReads):
    """A ticket is a list of reads that have not ended; the last one is None where not all could be begun."""

    def __init__(self, engine: _Engine, session: str) -> None:
        self._library, self._session = engine, session

    def submit(self, spans: Sequence[Span]) -> list[int | None]:
        library, begun = self._library.library, []
        if library is None:
            raise TransferError("the KV channel is closed.")
        for span in spans:  # one each: the library says how one read is, not how several are, without waiting for them
            number = library.batch_transfer_async_read(self._session, [span.dst], [span.src], [span.num_bytes])
            begun.append(number or None)
            if not number:
                break
        return begun

    def poll(self, ticket: list[int | None]) -> bool:
        library = self._library.library
        if library is None:
            raise TransferError("the KV channel is closed.")
        has_failed = ticket[-1] is None
        for number in [number for number in ticket if number is not None]:
            status = library.transfer_check_status(number)  # 1: done, -1: failed, 0: under way; the first two are said once
            if status in (1, -1):
                ticket.remove(number)
                if status == -1 and None not in ticket:
                    ticket.append(None)
                has_failed = has_failed or status == -1
        if ticket and ticket != [None]:
            return False
        if has_failed:
            raise TransferError(f"mooncake could not read from {self._session}: the peer has gone, or refuses.")
        return True


class _Contact:
    """A call on a thread of its own. `cleanup`: called when it ends after somebody has stopped waiting for it."""

    def __init__(self, call: Callable[[], bytes], cleanup: Callable[[], None]) -> None:
        self._call, self._cleanup = call, cleanup
        self._changed = threading.Condition()
        self._found: bytes | Exception | None = None
        self._is_given_up = False
        threading.Thread(target=self._run, name="mooncake-connect", daemon=True).start()

    def wait(self, deadline: float) -> bytes | Exception | None:
        """Result or exception of the call; None: it lasts."""
        with self._changed:
            self._changed.wait_for(lambda: self._found is not None, max(deadline - time.monotonic(), 0))
            self._is_given_up = self._found is None
            return self._found

    def _run(self) -> None:
        found: bytes | Exception
        try:
            found = self._call()
        except Exception as error:
            found = error
        with self._changed:
            self._found = found
            self._changed.notify_all()
            is_given_up = self._is_given_up
        if is_given_up:
            self._cleanup()


class _Link(NamedTuple):
    engine: _Engine
    reads: _Reads
    bases: tuple[int, ...]


class MooncakeChannel(StagedChannel):
    """Over Mooncake's transfer engine by TCP, between hosts too."""

    name = "mooncake"
    Address = Address

    @classmethod
    def missing(cls) -> str:
        try:
            _load()
        except ModuleNotFoundError:
            return f"it needs Mooncake's transfer engine; pip install {PACKAGE}."
        except ImportError as error:
            hint = "; on Debian and Ubuntu: apt install libibverbs1" if "libibverbs" in str(error) else ""
            return f"Mooncake's transfer engine is installed but does not load ({error}){hint}."
        return ""

    def _open(self) -> dict[str, Any]:
        host = self.options.host
        self._staging = Staging()
        self._idle: list[_Engine] = []  # of links that are no more
        self._engines_lock = threading.Lock()
        self._token = np.frombuffer(secrets.token_bytes(TOKEN_BYTES), np.uint8).copy()
        self._engine = _Engine(host)
        bases = tuple(tensor.data_ptr() for tensor in self.region.tensors)
        for base, part in zip(bases, self.region.layout.parts, strict=True):
            self._engine.register(base, self.region.layout.num_bytes(part))
        self._engine.register(self._token.ctypes.data, TOKEN_BYTES)
        address: dict[str, Any] = {
            "session": self._engine.session, "bases": list(bases), "token_at": self._token.ctypes.data,
            "token": self._token.tobytes().hex(),
        }  # fmt: skip
        return self._proved(address)

    def _connect(self, endpoint: TransferEndpoint, deadline: float) -> _Link:
        address = self._address_of(endpoint)
        with self._engines_lock:
            engine = self._idle.pop() if self._idle else None
        engine = engine or _Engine(self.options.host)
        link = _Link(engine, _Reads(engine, address.session), address.bases)
        # The first contact blocks, for a minute where a peer listens but stands still: on a separate thread.
        contact = _Contact(lambda: self._token_of(link, address, deadline), lambda: self._put_back(engine))
        found = contact.wait(deadline)
        if found is None:
            raise TransferTimeoutError(f"{address.session} does not answer in time.")
        if found != bytes.fromhex(address.token):
            self._put_back(engine)
            if isinstance(found, Exception):
                raise found
            raise TransferError(f"{address.session} is another process than the endpoint says; ask the peer for its endpoint.")
        return link

    def _token_of(self, link: _Link, address: Address, deadline: float) -> bytes:
        return self._first_bytes(link.reads, address.token_at, TOKEN_BYTES, address.session, deadline)

    def _disconnect(self, link: _Link) -> None:
        self._put_back(link.engine)

    def _put_back(self, engine: _Engine) -> None:
        """For the next link: to end one takes long, and what is under way in it may still end."""
        with self._engines_lock:
            if not self._closed and engine not in self._idle:
                self._idle.append(engine)
                return
        engine.close()

    def _close(self) -> None:
        with self._engines_lock:
            engines, self._idle = [self._engine, *self._idle], []
        for engine in engines:
            engine.close()
        self._staging.close()


def _load() -> ModuleType:
    with library_settings(SETTINGS):
        return importlib.import_module("mooncake.engine")

