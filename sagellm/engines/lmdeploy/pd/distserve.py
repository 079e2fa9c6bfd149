"""LMDeploy's own DistServe protocol, so that its proxy as it is can use these engines: its messages, over our connections."""

import json
from typing import Any

from sagellm.core.errors import PeerError
from sagellm.engines.lmdeploy.pd.peers import Peers

__all__ = ["DistServe"]


class DistServe:
    """What LMDeploy's engine calls on its `EngineP2PConnection`. The addresses that are passed on are those of our control
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

    async def p2p_connect(self, request: Any) -> Any:
        """LMDeploy's `DistServeConnectionRequest` -> `DistServeConnectionResponse`. The engine that decodes connects; the other
        one has nothing to do. Raises PeerError: as `Peers.connect`."""
        from lmdeploy.pytorch.disagg.conn.protocol import DistServeConnectionResponse, DistServeConnectionStatus

        if self._config.role != "prefill":
            address = request.remote_engine_endpoint_info.zmq_address.removeprefix("tcp://")
            await self._peers.connect(request.remote_engine_id, address)
        return DistServeConnectionResponse(status=DistServeConnectionStatus.SUCCESS)

    async def p2p_drop_connect(self, request: Any) -> dict[str, bool]:
        await self._peers.drop(request.remote_engine_id)
        return {"success": True}

    async def zmq_send(self, remote_engine_id: str, remote_session_id: int) -> None:
        raise PeerError("LMDeploy's migration loop does not run in this engine.")
