"""Where an engine's control connections are: its server is asked, with the key of the group."""

import asyncio
from typing import Any

import aiohttp
from pydantic import ValidationError

from sagellm.comm_backend import control
from sagellm.comm_backend.group_messages import Role
from sagellm.comm_backend.kv_transfer.layout import Model
from sagellm.core.errors import PeerError

__all__ = ["EngineAddress", "engine_info"]

PATH = "/sage/pd/info"


class EngineAddress(Model):
    """The answer of an engine's server to `GET /sage/pd/info`."""

    engine_id: str
    role: Role
    control: str
    model: str


async def engine_info(http: Any, url: str, key: bytes, timeout_s: float) -> EngineAddress:
    """`http`: aiohttp's session. Raises PeerError if no engine of this group answers."""
    try:
        headers = control.sign_request(key, "GET", PATH, b"")
        async with http.get(url + PATH, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s)) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise PeerError(f"{url}{PATH} answers {answer.status}: {text[:200]}")
            return EngineAddress.model_validate_json(text)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
        if isinstance(error, ValidationError):
            error = ValueError(error.errors()[0]["msg"])
        raise PeerError(f"engine {url} cannot be asked who it is: {error or type(error).__name__}.") from None
