"""LMDeploy's own DistServe protocol, so that its proxy as it is can use these engines: its messages, over our connections."""

import asyncio
import json
import logging
from typing import Any

from sagellm.core.errors import PeerError, SageError
from sagellm.engines.lmdeploy.pd.peers import Peers

__all__ = ["DistServe"]

logger = logging.getLogger("sagellm")


class DistServe:
    """The methods that LMDeploy's engine calls on its `EngineP2PConnection`.

    The addresses that are passed on are those of our control
    servers; what is to be known of KV blocks is asked there."""

    _peers: Peers
    _address: str
    _engine: Any

    async def p2p_initialize(self, request: Any) -> Any:
        """LMDeploy's `DistServeInitRequest` -> `DistServeInitResponse`."""
        from lmdeploy.pytorch.disagg.conn.protocol import (
            DistServeConnectionStatus,
            DistServeEngineEndpointInfo,
            DistServeInitResponse,
            DistServeKVTransferEndpointInfo,
        )

        where = {"control": self._address}
        endpoint = DistServeKVTransferEndpointInfo(protocol=request.protocol, endpoint_info=json.dumps(where))
        return DistServeInitResponse(
            status=DistServeConnectionStatus.SUCCESS,
            engine_endpoint_info=DistServeEngineEndpointInfo(zmq_address=f"tcp://{self._address}"),
            kvtransfer_endpoint_info=[endpoint],
        )

    def p2p_connect(self, request: Any) -> Any:
        """LMDeploy's `DistServeConnectionRequest` -> `DistServeConnectionResponse`. The engine that decodes connects, in a
        task, since LMDeploy does not await this; the other one has nothing to do. The log has the reason."""
        from lmdeploy.pytorch.disagg.conn.protocol import DistServeConnectionResponse, DistServeConnectionStatus

        if self._config.role != "prefill":
            address = request.remote_engine_endpoint_info.zmq_address.removeprefix("tcp://")
            self._peers.introduce(request.remote_engine_id)
            self._peers.keep(asyncio.get_running_loop().create_task(self._try(request.remote_engine_id, address)))
        return DistServeConnectionResponse(status=DistServeConnectionStatus.SUCCESS)

    async def _try(self, engine_id: str, address: str) -> None:
        try:
            await self._peers.connect(engine_id, address)
        except SageError as error:
            logger.error("not connected to %s: %s", engine_id, error)

    async def p2p_drop_connect(self, request: Any) -> dict[str, bool]:
        await self._peers.drop(request.remote_engine_id)
        return {"success": True}

    async def zmq_send(self, remote_engine_id: str, remote_session_id: int) -> None:
        raise PeerError("LMDeploy's migration loop does not run in this engine.")
