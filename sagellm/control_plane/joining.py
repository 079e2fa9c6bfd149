"""Routes of prefill/decode groups: engines that somebody else starts join a group by its key, and leave it."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sagellm.comm_backend.control import check_request
from sagellm.comm_backend.group_messages import ROLE_NUMBERS
from sagellm.control_plane.base import EngineState
from sagellm.control_plane.engine import ManagedEngine
from sagellm.control_plane.fleet import Fleet
from sagellm.control_plane.group import ManagedGroup
from sagellm.core.errors import EngineError, PeerError, SageError
from sagellm.pd.bodies import error_body
from sagellm.pd.group import NotTheOne

__all__ = ["NODES", "STATUS", "Joining"]

NODES, STATUS = "/nodes/status", "/pd/status"
MAX_BODY_BYTES = 1 << 16


class Joining:
    """Serves the registry of LMDeploy's DistServe proxy for the groups of a fleet. Requests are signed with a group's key."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def routes(self) -> list[Route]:
        """Return the routes of engines."""
        return [
            Route("/nodes/add", self._add, methods=["POST"]), Route("/nodes/remove", self._remove, methods=["POST"]),
        ]  # fmt: skip

    def nodes(self) -> dict[str, Any]:
        """Return URL -> role and models of the engines that are there, as LMDeploy's proxy does."""
        return {
            one.kind.url: {"role": ROLE_NUMBERS[one.kind.role], "models": list(one.facts.models)} for one in self._members()
        }  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Return the engines of all groups with their pairs, cached prefixes and costs, as `sagellm pd status` shows them."""
        groups = self._groups()
        policies = sorted({one.kind.router.policy.name for one in groups})
        faults = sum(one.kind.router.num_faults for one in groups)
        routes_by = "load and prefix" if all(one.kind.tokens for one in groups) else "load"
        there = {one.kind.url for one in self._members()}
        engines = [
            each for one in groups for each in one.kind.peers.status()["engines"] if each["engine_id"] in there
        ]  # fmt: skip
        return {"policy": ", ".join(policies), "policy_faults": faults, "routes_by": routes_by, "engines": engines}

    async def signer(self, request: Request) -> ManagedGroup:
        """Return the group with whose key a request is signed. Raises PeerError: no group has it."""
        body = await _body(request)
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        words = "there is no prefill/decode group here."
        for one in self._groups():
            try:
                check_request(one.kind.peers.key, request.method, path, body, dict(request.headers))
            except PeerError as error:
                words = str(error)
            else:
                return one
        raise PeerError(words)

    def _groups(self) -> list[ManagedGroup]:
        return [one for one in self._fleet.engines.values() if isinstance(one, ManagedGroup) and one.kind.peers is not None]

    def _unknown(self, request: Request, error: PeerError) -> Response:
        words = f"{request.url.path}: {error} Engines are to have the same --pd-key-file as the group."
        # The group of an engine that has come early may start yet; an engine that is refused ends.
        return JSONResponse({"error": words}, 401 if self._fleet.is_started else 503)

    def _members(self) -> list[ManagedEngine]:
        there = (EngineState.READY, EngineState.DRAINING)
        return [each for one in self._groups() for each in one.kind.members() if each.state in there]

    async def _add(self, request: Request) -> Response:
        try:
            group, url = await self.signer(request), _url(await request.body())
        except PeerError as error:
            return self._unknown(request, error)
        if url is None:
            return Response(error_body('the body must be {"url": ...}.', 400), 400, media_type="application/json")
        try:
            await group.kind.add(url)
        except SageError as error:
            # An engine that cannot be reached now asks again; one that is rejected ends.
            is_rejected = isinstance(error, NotTheOne) or not isinstance(error, PeerError | EngineError)
            return JSONResponse({"error": str(error)}, 409 if is_rejected else 503)
        return JSONResponse("Added successfully")

    async def _remove(self, request: Request) -> Response:
        try:
            group, url = await self.signer(request), _url(await request.body())
        except PeerError as error:
            return self._unknown(request, error)
        await group.kind.remove(url)
        return JSONResponse("Deleted successfully")


async def _body(request: Request) -> bytes:
    """Raises PeerError: it is larger than any message of an engine."""
    if int(request.headers.get("content-length", "0")) > MAX_BODY_BYTES or "transfer-encoding" in request.headers:
        raise PeerError(f"the body is larger than {MAX_BODY_BYTES} bytes, or does not say how large it is.")
    return await request.body()


def _url(body: bytes) -> str | None:
    try:
        url = json.loads(body)["url"]
    except (ValueError, TypeError, KeyError):
        return None
    return url if isinstance(url, str) else None
