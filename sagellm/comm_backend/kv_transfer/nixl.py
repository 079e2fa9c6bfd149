"""KV blocks over NVIDIA's NIXL and its UCX backend, which takes shared memory or CMA within a host, and TCP or InfiniBand.

Bytes of a released transfer may still arrive later, hence `staged`. Only memory of the host: NIXL's reads of GPU memory
have not been tried. Endpoints carry a proof of the group's key, which is checked before NIXL is given what a peer sent; 
NIXL itself has no keys.

Source: NIXL 1.5.1, its Python API (nixl._api).
"""

import base64
import importlib
import logging
import secrets
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from types import ModuleType
from typing import Any, NamedTuple

from pydantic import Field

from sagellm.comm_backend.kv_transfer.layout import Model
from sagellm.comm_backend.kv_transfer.library_settings import library_settings
from sagellm.comm_backend.kv_transfer.listeners import kept_to_loopback
from sagellm.comm_backend.kv_transfer.plan import TransferEndpoint
from sagellm.comm_backend.kv_transfer.staged import RemoteReads, Span, StagedChannel, Staging
from sagellm.core.errors import TransferError
from sagellm.core.ports import is_loopback

__all__ = ["NixlChannel"]

# `nixl` chooses one of the others by the CUDA that is there, and needs it installed; each of them works without CUDA too.
MODULES = ("nixl", "nixl_cu13", "nixl_cu12", "nixl_rocm")
PACKAGE = "nixl-cu12"
BACKEND = "UCX"
LOOPBACK = {"UCX_NET_DEVICES": "lo"}


class Address(Model):
    """`agent`: name of the peer's agent. `metadata`: what NIXL tells of it, base64. `bases`: addresses of the parts."""

    agent: str = Field(min_length=1, max_length=64)
    metadata: str = Field(max_length=1 << 20)
    bases: tuple[int, ...]
    proof: str


class Options(Model):
    """`transports`: those of UCX that may be used, as its UCX_TLS has them ("tcp", "sm,tcp"); empty: UCX chooses."""

    transports: str = Field(default="", pattern=r"^[\w,^]*$")


class _Reads(RemoteReads):
    """A ticket is NIXL's handle of a transfer, or None once that has ended."""

    def __init__(self, agent: Any, peer: str) -> None:
        self._agent, self._peer = agent, peer

    def submit(self, spans: Sequence[Span]) -> list[Any]:
        own = self._agent.get_xfer_descs([(span.dst, span.num_bytes, 0) for span in spans], "DRAM")
        theirs = self._agent.get_xfer_descs([(span.src, span.num_bytes, 0) for span in spans], "DRAM")
        try:
            handle = self._agent.initialize_xfer("READ", own, theirs, self._peer)
            self._agent.transfer(handle)
        except Exception as error:  # NIXL's are of no common class
            raise self._failed(error) from error
        return [handle]

    def poll(self, ticket: list[Any]) -> bool:
        if not ticket:
            return True
        try:
            state = self._agent.check_xfer_state(ticket[0])
        except Exception as error:
            state, reason = "ERR", error
        else:
            reason = None
        if state == "PROC":
            return False
        try:
            ticket[0].release()
        except Exception:  # it is under way still, in part
            return False
        ticket.clear()
        if state == "DONE":
            return True
        raise self._failed(reason)

    def _failed(self, error: Exception | None) -> TransferError:
        words = f" ({type(error).__name__}: {error})" if error else ""
        return TransferError(f"NIXL could not read from {self._peer}: the peer has gone, or refuses{words}.")


class _Link(NamedTuple):
    reads: _Reads
    bases: tuple[int, ...]
    agent: str


class NixlChannel(StagedChannel):
    """Over NIXL with UCX."""

    name = "nixl"
    Address = Address
    Options = Options

    @classmethod
    def missing(cls) -> str:
        try:
            _api()
        except ModuleNotFoundError:
            return f"it needs NIXL; pip install {PACKAGE} (works without CUDA too), or nixl where there is CUDA."
        except ImportError as error:
            return f"NIXL is installed but does not load ({error})."
        return ""

    def _open(self) -> dict[str, Any]:
        api = _api()
        name = f"sagellm-{secrets.token_hex(8)}"
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        settings = dict(LOOPBACK) if is_loopback(self.options.host) else {}
        if self.own_options.transports:
            settings["UCX_TLS"] = self.own_options.transports
        # UCX listens when the agent is made, and answers from each device that it listens at.
        with library_settings(settings), kept_to_loopback("NIXL") if is_loopback(self.options.host) else nullcontext():
            agent = api.nixl_agent(name, api.nixl_agent_config(backends=[BACKEND], sync_mode=sync))
        if BACKEND not in agent.backends:
            raise TransferError(f"NIXL has no backend {BACKEND} here; it has {', '.join(agent.plugin_list)}.")
        self._agent = agent
        self._registered: list[Any] = []
        self._peers_lock = threading.Lock()
        self._num_links: dict[str, int] = {}
        bases = tuple(tensor.data_ptr() for tensor in self.region.tensors)
        sizes = [self.region.layout.num_bytes(part) for part in self.region.layout.parts]
        for base, size in zip(bases, sizes, strict=True):
            self._register(base, size)
        metadata = base64.b64encode(agent.get_agent_metadata()).decode()
        self._staging = Staging(lambda memory: self._register(memory.ctypes.data, memory.nbytes))
        address = {"agent": name, "metadata": metadata, "bases": list(bases)}
        return self._proved(address)

    def _register(self, address: int, num_bytes: int) -> None:
        self._registered.append(self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM"))

    def _connect(self, endpoint: TransferEndpoint, deadline: float) -> _Link:
        address = self._address_of(endpoint)
        with self._peers_lock:
            if not self._num_links.get(address.agent):
                try:
                    found = self._agent.add_remote_agent(base64.b64decode(address.metadata, validate=True))
                except Exception as error:
                    raise TransferError(
                        f"NIXL cannot connect ({error}): the peer has gone, or what it tells of itself is wrong."
                    ) from error
                if (found.decode() if isinstance(found, bytes) else found) != address.agent:
                    raise TransferError(f"address of the peer: NIXL calls it {found!r}, the endpoint {address.agent!r}.")
            self._num_links[address.agent] = self._num_links.get(address.agent, 0) + 1
        link = _Link(_Reads(self._agent, address.agent), address.bases, address.agent)
        try:
            self._probe(link, endpoint, deadline)
        except BaseException:
            self._disconnect(link)
            raise
        return link

    def _probe(self, link: _Link, endpoint: TransferEndpoint, deadline: float) -> None:
        """NIXL says that it could not connect when the first bytes are read."""
        self._first_bytes(link.reads, link.bases[0], 1, link.agent, deadline)

    def _disconnect(self, link: _Link) -> None:
        with self._peers_lock:
            left = self._num_links[link.agent] = self._num_links[link.agent] - 1
            if left == 0:
                del self._num_links[link.agent]
                with suppress(Exception):  # it has gone, and NIXL has forgotten it
                    self._agent.remove_remote_agent(link.agent)

    def _close(self) -> None:
        for each in self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(each)
        self._registered.clear()
        self._staging.close()
        del self._agent


def _api() -> ModuleType:
    """Raises ModuleNotFoundError: none is installed; ImportError: one is, and does not load."""
    broken: ImportError | None = None
    for name in MODULES:
        try:
            found = importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("nixl"):
                broken = ImportError(str(error))
        except ImportError as error:
            broken = error
        else:
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of each agent on stdout
            return found
    raise broken or ModuleNotFoundError("nixl")
