"""KV channels as LMDeploy's migration backends: its own `p2p_initialize`, `p2p_connect` and `migrate` move blocks over them.

`register` adds "sage-shm", "sage-tcp" and so on to `MIGRATION_BACKENDS`, beside LMDeploy's own DLSlime and Mooncake, which stay
as they are; where there are KV blocks of an engine of a prefill/decode group, it has been called. LMDeploy chooses one by
`cache_config.migration_backend.name`; `choice` makes such a value.

LMDeploy connects rank r of an engine with rank r of another, so both have as many ranks; block counts may differ. Its `migrate`
computes offsets as if blocks were not quantized and keys as wide as values: what does not fit is refused, not moved wrongly.

Source: LMDeploy 0.11.0, pytorch/disagg/backend/base.py (`MigrationBackendImpl`), pytorch/engine/cache_engine.py.
"""

import contextlib
import enum
import gc
import secrets
from typing import Any, NamedTuple

from lmdeploy.pytorch.disagg.backend.backend import MIGRATION_BACKENDS
from lmdeploy.pytorch.disagg.backend.base import MigrationBackendImpl
from lmdeploy.pytorch.disagg.config import DistServeEngineConfig
from lmdeploy.pytorch.disagg.conn.protocol import (
    DistServeInitRequest,
    DistServeKVTransferEndpointInfo,
    MigrationProtocol,
)
from lmdeploy.pytorch.disagg.messages import AssignmentInstruct, DistServeRegisterMRMessage, MigrationAssignment
from pydantic import ValidationError

from sagellm.comm_backend.kv_transfer.base import KVTransferChannel, TransferEndpoint, TransferOptions, TransferPlan
from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVRegion
from sagellm.comm_backend.kv_transfer.registry import channel_names, make_channel
from sagellm.core.config import PDHooks
from sagellm.core.errors import ConfigError, TransferError
from sagellm.engines.lmdeploy.pd.calls import ChannelCalls
from sagellm.engines.lmdeploy.pd.region import region_of
from sagellm.engines.lmdeploy.pd.workers import options_of

__all__ = ["ChannelBackend", "choice", "register", "register_group"]

PREFIX = "sage-"


class _Link(NamedTuple):
    """LMDeploy reads `remote_engine_config` of it."""

    remote_engine_config: DistServeEngineConfig


class ChannelBackend(MigrationBackendImpl):
    """One cache engine's; a channel over all of its blocks, to any number of peers."""

    channel_name = ""  # of the classes that `register` makes
    options = TransferOptions()
    timeout_s = 30.0

    def __init__(self) -> None:
        self.links: dict[str, _Link] = {}
        self._calls: ChannelCalls | None = None

    @property
    def channel(self) -> KVTransferChannel | None:
        return self._calls.channel if self._calls is not None else None

    def p2p_initialize(self, init_request: DistServeInitRequest) -> None:
        own, theirs = init_request.local_engine_config, init_request.remote_engine_config
        if own.tp_size != theirs.tp_size:
            raise TransferError(
                f"{own.tp_size} ranks here, {theirs.tp_size} at {init_request.remote_engine_id}; LMDeploy's migration connects "
                "engines with the same number of tensor-parallel ranks."
            )
        self.links[init_request.remote_engine_id] = _Link(theirs)

    def register_memory_region(self, register_mr_request: DistServeRegisterMRMessage) -> None:
        """The first one opens the channel, over everything that the owner of this memory holds."""
        if self.channel is None:
            region = _alone(region_of(_owner(register_mr_request.addr)))
            self._calls = ChannelCalls(make_channel(self.channel_name, region, self.options))

    def endpoint_info(self, remote_engine_id: str, protocol: MigrationProtocol) -> dict[str, Any]:
        return self._open().channel.endpoint().model_dump(mode="json")

    def p2p_connect(self, remote_engine_id: str, conn_req: DistServeKVTransferEndpointInfo) -> None:
        try:
            endpoint = TransferEndpoint.model_validate_json(conn_req.endpoint_info)
        except ValidationError as error:
            raise TransferError(f"{remote_engine_id} sent what is no endpoint of a KV channel: {error}") from None
        self._open().channel.connect(remote_engine_id, [endpoint], timeout_s=self.timeout_s)

    async def p2p_migrate(self, assignment: MigrationAssignment, async_op: bool = False) -> None:
        """Returns when the blocks are here. Raises TransferError: they are not; offsets that are not those of whole blocks."""
        calls, peer = self._open(), assignment.remote_engine_id
        if peer not in self.links:
            raise TransferError(f"{peer} is not initialized; known are: {', '.join(self.links) or 'none'}.")
        layout, num_blocks = calls.channel.region.layout, self.links[peer].remote_engine_config.num_gpu_blocks
        src, dst = _blocks(assignment.batch, layout, num_blocks)
        plan = TransferPlan(
            transfer_id=f"migrate-{secrets.token_hex(8)}", source=peer, block_ids=src, target_blocks=dst,
            num_tokens=len(src) * layout.block_size, timeout_s=self.timeout_s,
        )  # fmt: skip
        await calls.transfer(plan)

    def store(self, assignment: MigrationAssignment, async_op: bool = False) -> None:
        raise NotImplementedError("LMDeploy calls `store` nowhere; KV channels pull.")

    def load(self, assignment: MigrationAssignment, async_op: bool = False) -> None:
        raise NotImplementedError("LMDeploy calls `load` nowhere; use `p2p_migrate`.")

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()

    def _open(self) -> ChannelCalls:
        if self._calls is None:
            raise TransferError("no memory is registered; LMDeploy's `p2p_initialize` comes first.")
        return self._calls


def register(options: TransferOptions | None = None, timeout_s: float = 30.0) -> list[str]:
    """Make every KV channel a migration backend of LMDeploy; again: with other options, for engines that begin afterwards.

    Args:
        timeout_s: of a connection, and of a migration, which LMDeploy itself gives no deadline.

    Returns: the names.
    """
    names = []
    for channel in channel_names():
        values = {"channel_name": channel, "options": options or TransferOptions(), "timeout_s": timeout_s}
        backend = type(f"{channel.title()}ChannelBackend", (ChannelBackend,), values)
        MIGRATION_BACKENDS.register_module(PREFIX + channel, force=True, module=backend)
        names.append(PREFIX + channel)
    return names


def register_group(pd: PDHooks) -> None:
    """With the options of this engine's own channel, the key among them. Without a usable key there is nothing to register:
    the engine does not begin, and says why when it opens that channel."""
    with contextlib.suppress(ConfigError):
        register(options_of(pd), pd.timeout_s)


def choice(channel: str) -> enum.Enum:
    """For `cache_config.migration_backend`: LMDeploy's own enumeration has only the names of its own ones.

    Raises:
        TransferError: an unknown channel.
    """
    names = [PREFIX + name for name in channel_names()]
    if PREFIX + channel not in names:
        raise TransferError(f"KV channel {channel!r} is unknown; known are: {', '.join(channel_names())}.")
    return enum.Enum("MigrationBackend", names)[PREFIX + channel]


def _owner(address: int) -> Any:
    """LMDeploy makes a backend without saying whose memory it moves, and tells it addresses without a shape."""
    from lmdeploy.pytorch.engine.cache_engine import CacheEngine

    for found in gc.get_objects():
        # By its type: some objects warn, or load what they stand for, when asked for their class.
        if issubclass(type(found), CacheEngine) and any(tensor.data_ptr() == address for tensor in found.full_gpu_cache):
            return found
    raise TransferError(f"no cache engine of this process has KV blocks at {address:#x}.")


def _alone(region: KVRegion) -> KVRegion:
    """As if this rank were the only one: it meets only the one of its own number."""
    layout = region.layout
    change = {"total_heads": layout.parts[0].num_heads, "first_head": 0, "tp_rank": 0, "tp_size": 1}
    return KVRegion(layout.model_copy(update=change), region.tensors)


def _blocks(
    batch: list[AssignmentInstruct], layout: KVLayout, num_peer_blocks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The peer's blocks and the own ones that these byte ranges are, all layers and parts of each.

    `target_offset` is in the peer's tensor, `source_offset` in the own one; `mr_key` is the number of the tensor.
    """
    sizes = {
        str(number): layout.num_bytes(part) // (layout.num_layers * layout.num_blocks)
        for number, part in enumerate(layout.parts)
    }
    layers = range(layout.num_layers)
    pairs: dict[tuple[str, int], list[tuple[int, int]]] = {(key, layer): [] for key in sizes for layer in layers}
    for each in batch:
        size = sizes.get(each.mr_key)
        if size != each.length or each.target_offset % each.length or each.source_offset % each.length:
            raise TransferError(
                f"LMDeploy wants {each.length} bytes of tensor {each.mr_key} at {each.target_offset} of the peer's; "
                f"blocks there have {size or 'no'} bytes. Its migration is for keys and values of one width, not quantized."
            )
        layer, src = divmod(each.target_offset // each.length, num_peer_blocks)
        own_layer, dst = divmod(each.source_offset // each.length, layout.num_blocks)
        if layer != own_layer or layer not in layers:
            raise TransferError(f"LMDeploy wants layer {layer} of the peer for layer {own_layer} of {layout.num_layers}.")
        pairs[each.mr_key, layer].append((src, dst))
    wanted = next(iter(pairs.values()))
    if not wanted or any(each != wanted for each in pairs.values()):
        raise TransferError("LMDeploy wants blocks of which some layers, or keys or values, are missing; they move as a whole.")
    block_ids, target_blocks = zip(*wanted, strict=True)
    return block_ids, target_blocks
