"""Find KV transfer channels by name."""

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

__all__ = ["CHANNELS", "channel_names", "find_channel", "make_channel"]

GROUP = "sagellm.kv_channels"
OWN = (ShmChannel, TcpChannel, MooncakeChannel, NixlChannel)
CHANNELS = Registry("KV channel", KVTransferChannel, TransferError, GROUP, OWN, num_given=2)
channel_names = CHANNELS.names
find_channel = CHANNELS.find


def make_channel(name: str, region: KVRegion, options: TransferOptions | Mapping[str, Any] | None = None) -> KVTransferChannel:
    """Return a channel over these KV blocks. Raises TransferError if it is unknown, cannot start, or options are invalid."""
    return CHANNELS.make(find_channel(name), name, region, TransferOptions.read(options))
