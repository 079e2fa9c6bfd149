"""Channels by name."""

from collections.abc import Mapping
from typing import Any

from sagellm.comm_backend.kv_transfer.base import KVTransferChannel, TransferOptions
from sagellm.comm_backend.kv_transfer.layout import KVRegion
from sagellm.comm_backend.kv_transfer.mooncake import MooncakeChannel
from sagellm.comm_backend.kv_transfer.nixl import NixlChannel
from sagellm.comm_backend.kv_transfer.shm import ShmChannel
from sagellm.comm_backend.kv_transfer.tcp import TcpChannel
from sagellm.core.errors import TransferError
from sagellm.core.registry import Registry

__all__ = ["channel_names", "find_channel", "make_channel"]

GROUP = "sagellm.kv_channels"
OWN = (ShmChannel, TcpChannel, MooncakeChannel, NixlChannel)
_REGISTRY = Registry("KV channel", KVTransferChannel, TransferError, GROUP, OWN)


def channel_names() -> list[str]:
    """Those of the project, then those that installed packages offer."""
    return _REGISTRY.names()


def find_channel(name: str) -> type[KVTransferChannel]:
    """Raises TransferError: unknown, cannot be loaded, or none."""
    return _REGISTRY.find(name)


def make_channel(name: str, region: KVRegion, options: TransferOptions | Mapping[str, Any] | None = None) -> KVTransferChannel:
    """A channel over these KV blocks. Raises TransferError, as the channel does; options that are none."""
    kind = find_channel(name)
    return _REGISTRY.make(kind, name, region, TransferOptions.read(options))
