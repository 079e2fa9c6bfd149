"""An engine of a group makes itself known to its proxy, again after the proxy was started anew, and takes its leave."""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from typing import Any

from sagellm.comm_backend.control import sign_request
from sagellm.comm_backend.group_messages import ROLE_NUMBERS
from sagellm.serve.group import Membership

__all__ = ["Registration"]

PERIOD_S = 2.0
JOIN_S = 60.0  # the proxy asks this engine who it is, and connects to it, before it answers
LOOK_S = 5.0

logger = logging.getLogger("sagellm")


class _NoProxy(Exception):
    """No proxy answered; the message says what is there."""


class Registration:
    """Lives on the server's loop, from `start` to `end`. Requests have LMDeploy's form, and are signed.

    Args:
        api_key: that the proxy may ask for; empty: none.
        on_refused: called when a proxy that this engine was never registered at refuses it; `refusal` then says why.
            After that, what refuses is a proxy that was started anew, which may be right the next time.
    """

    def __init__(self, member: Membership, api_key: str, on_refused: Callable[[], None]) -> None:
        self._member, self._api_key, self._on_refused = member, api_key, on_refused
        self.refusal = ""
        self._was_known = False
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None
        self._http: Any = None

    async def start(self) -> None:
        import aiohttp

        self._http = aiohttp.ClientSession()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def end(self) -> None:
        """Take leave, so that the proxy sends nothing more. A second call does nothing."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        try:
            if self._was_known:
                await self._ask("POST", "/nodes/remove", {"url": self._member.hooks.engine_id}, LOOK_S)
        except _NoProxy:
            pass  # a proxy that has gone needs no message
        finally:
            await self._http.close()

    async def _run(self) -> None:
        while not self.refusal:
            try:
                await self._look()
            except _NoProxy as error:
                self._note(f"{error}; trying again every {PERIOD_S:g} s")
            except Exception:
                logger.exception("registering at the proxy failed")
            await asyncio.sleep(PERIOD_S)

    async def _look(self) -> None:
        status, nodes = await self._ask("GET", "/nodes/status", None, LOOK_S)
        is_there = status == 200 and isinstance(nodes, dict) and self._member.hooks.engine_id in nodes
        # LMDeploy's proxy connects engines once. Where it knows one that was killed, that has to be added anew.
        if is_there and (self._was_known or not self._member.trusts_proxy):
            self._note("")
            return
        role = ROLE_NUMBERS[self._member.hooks.role]
        node = {"url": self._member.hooks.engine_id, "status": {"models": [self._member.model], "role": role}}
        status, answer = await self._ask("POST", "/nodes/add", node, JOIN_S)
        words = _words(answer)
        # LMDeploy's own proxy says so with status 200.
        if status == 200 and not words.startswith("Failed"):
            self._was_known = True
            self._note("")
        elif 400 <= status < 500 and not self._was_known:
            self.refusal = f"the proxy at {self._member.proxy_url} refuses this engine (status {status}): {words}"
            self._on_refused()
        else:
            self._note(f"the proxy at {self._member.proxy_url} does not take this engine (status {status}): {words}")

    async def _ask(self, method: str, path: str, document: Any, timeout_s: float) -> tuple[int, Any]:
        """Status and JSON, or text. Raises _NoProxy: no answer."""
        import aiohttp

        body = b"" if document is None else json.dumps(document).encode()
        headers = {"Content-Type": "application/json", **sign_request(self._member.key, method, path, body)}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            asked = self._http.request(
                method, self._member.proxy_url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            )
            async with asked as answer:
                text = (await answer.content.read(1 << 20)).decode(errors="replace")
                return answer.status, _parsed(text)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            why = f"no answer within {timeout_s:g} s" if isinstance(error, asyncio.TimeoutError) else _reason(error)
            raise _NoProxy(f"the proxy at {self._member.proxy_url} cannot be reached ({why})") from None

    def _note(self, trouble: str) -> None:
        """A line where something has changed, not every two seconds."""
        if trouble and trouble != self._trouble:
            logger.warning("%s", trouble)
        elif self._trouble and not trouble:
            logger.warning("registered at the proxy at %s", self._member.proxy_url)
        self._trouble = trouble


def _reason(error: Exception) -> str:
    """aiohttp and asyncio wrap the system's words in their own."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number and number > 0 else str(error) or type(error).__name__


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _words(answer: Any) -> str:
    """Return the message of an error as OpenAI's API, FastAPI or LMDeploy's proxy give it."""
    while isinstance(answer, dict):
        answer = next((answer[name] for name in ("error", "message", "detail", "text") if answer.get(name)), str(answer))
    return str(answer)[:500]
