"""One request of a client at the gateway: to an engine, to another one where that fails, and the answer back."""

import contextlib
import json
import logging
import time
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from sagellm.control_plane.base import RouteRequest
from sagellm.control_plane.engine import ManagedEngine
from sagellm.control_plane.probe import key_header
from sagellm.core.service import NOTHING_ASKED, ServiceRequest
from sagellm.pd.answers import Answer, Failed, ProxiedResponse, relay_answer, send_whole, unless_hanging
from sagellm.pd.bodies import Body, error_body, relayed_headers
from sagellm.pd.tokens import guess_tokens

__all__ = ["GatewayResponse", "as_openai"]

logger = logging.getLogger("sagellm.control")

MAX_ATTEMPTS = 5  # a request that ends every engine it meets must not meet them all
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
JSON = "application/json"


class GatewayResponse(ProxiedResponse):
    """Serves one request from its arrival to its end. A client that leaves ends it, at the engine too.

    Args:
        gateway: the `Gateway`.
        key: API key of the client, if the gateway has keys.
    """

    def __init__(self, gateway: Any, path: str, key: str | None) -> None:
        super().__init__()
        self._gateway, self._fleet, self._path, self._key = gateway, gateway.fleet, path, key
        self._engine = "none"
        self._attempts = 0
        self._waited_s = 0.0
        gateway.begin(key)

    def ended(self, outcome: str) -> None:
        self._gateway.end(self._key)
        self._fleet.metrics.requests.labels(self._engine, outcome).inc()
        if self._gateway.lines is not None:
            self._gateway.lines.write(
                "end", path=self._path, engine=self._engine, outcome=outcome, attempts=self._attempts,
                first_byte_s=self.first_byte_s, seconds=round(time.monotonic() - self.arrived, 6),
            )  # fmt: skip

    async def serve(self, body: Body, scope: dict, send: Any) -> str:
        headers = relayed_headers(scope["headers"])
        headers.pop("authorization", None)
        request = self._route_request(body)
        failed: set[str] = set()
        last: Failed | None = None
        while self._attempts < MAX_ATTEMPTS:
            found = await self._candidates(body.model, failed)
            if isinstance(found, tuple):
                status, words = found
                extra = [(b"retry-after", b"5")] if status == 503 else []
                await send_whole(send, status, error_body(words, status), extra=extra)
                return "no engine" if status == 503 else "refused"
            self._attempts += 1
            request = replace(request, attempt=self._attempts) if self._attempts > 1 else request
            engine = self._fleet.choose(request, found)
            self._engine = engine.name
            engine.num_chosen += self._attempts == 1
            if self._gateway.lines is not None:
                self._gateway.lines.write("route", **self._fleet.decisions[-1])
            try:
                return await self._attempt(engine, body, headers, send)
            except Failed as error:
                last = error
                failed.add(engine.name)
                engine.num_failed += 1
                logger.warning("attempt %d: engine %s failed: %s", self._attempts, engine.name, error)
                if self._attempts < MAX_ATTEMPTS:
                    self._fleet.metrics.retries.labels(error.cause).inc()
        assert last is not None
        if last.answer is not None:
            await send_whole(send, *last.answer)
        else:
            words = f"{self._attempts} engines in turn failed with this request, the last one so: {last}"
            await send_whole(send, 502, error_body(words, 502))
        return "failed"

    async def _attempt(self, engine: ManagedEngine, body: Body, headers: dict[str, str], send: Any) -> str:
        """Raises Failed."""

        def on_first() -> None:
            self.note_first_byte()
            self._fleet.metrics.first_byte.observe(self.first_byte_s)

        hangs = engine.hangs
        own = headers | key_header(engine.kind.api_key)
        posting = self._fleet.http.post(engine.kind.url + self._path, data=body.content, headers=own)
        engine.num_running += 1
        try:
            outcome, words = await unless_hanging(
                hangs,
                relay_answer(
                    posting, body.stream, send, who=f"engine {engine.name}", hangs=hangs, on_first=on_first, reworded=as_openai
                ),
            )
        finally:
            engine.num_running -= 1
            self._fleet.note_end(engine)
        if words:
            engine.num_failed += 1
            logger.warning("engine %s failed in the middle of an answer: %s", engine.name, words)
        elif outcome == "served":
            engine.num_served += 1
        return outcome

    async def _candidates(self, model: str | None, failed: set[str]) -> list[ManagedEngine] | tuple[int, str]:
        """Engines that may serve the request and have not failed with it; or, where none comes, a status and the reason.

        However many engines fail one after the other, a request waits without any no longer than `wait_s` in all.
        """
        fleet, wait_s, backoff_s = self._fleet, self._gateway.config.wait_s, FIRST_BACKOFF_S
        while True:
            if self._gateway.is_closing:
                return 503, "the gateway is ending; try again later."
            found = fleet.candidates(model, self._path)
            if model is None and (refusal := self._refusal(model)):
                return refusal
            if fresh := [one for one in found if one.name not in failed]:
                return fresh
            if refusal := self._refusal(model):
                return refusal
            if found and backoff_s >= MAX_BACKOFF_S:
                return found  # one that failed and lives may have been short of something
            if not found and self._waited_s >= wait_s:
                states = ", ".join(f"{one.name} is {one.state}" for one in fleet.engines.values()) or "none is registered"
                return 503, f"no engine became ready within {wait_s:g} s ({states}). Try again later."
            begun = time.monotonic()
            await fleet.changed(backoff_s if found else min(MAX_BACKOFF_S, wait_s - self._waited_s))
            self._waited_s += 0.0 if found else time.monotonic() - begun
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _refusal(self, model: str | None) -> tuple[int, str] | None:
        """A status and the reason, where waiting would not help."""
        models = self._fleet.models()
        if not models:
            return None
        known = ", ".join(sorted(models))
        if model is None and len(models) > 1:
            return 400, f"the request names no model; served are {known}."
        if model is not None and model not in models:
            return 404, f"The model {model!r} does not exist; served are {known}."
        engines = [self._fleet.engines[name] for name in (models[model] if model is not None else self._fleet.engines)]
        if not any(self._path in one.facts.routes for one in engines):
            return 404, f"no engine of the model {model or known} has {self._path}."
        return None

    def _route_request(self, body: Body) -> RouteRequest:
        raw = body.raw
        service = NOTHING_ASKED
        if asked := {name: raw[name] for name in ServiceRequest.model_fields if raw.get(name) is not None}:
            with contextlib.suppress(ValidationError):  # the engine says what is wrong with it
                service = ServiceRequest(**asked)
        prompt = raw.get("messages") or raw.get("prompt") or raw.get("input") or ""
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        return RouteRequest(
            guess_tokens(raw), body.max_tokens, is_estimate=True, model=body.model or "", path=self._path, service=service,
            prompt=text.encode(errors="replace"),
        )  # fmt: skip


def as_openai(status: int, content: bytes, media: str) -> Answer:
    """Reword an error of an engine: OpenAI's and vLLM's form, LMDeploy's flat one, FastAPI's `detail`, or text."""
    words, known = content.decode(errors="replace").strip()[:2000], {}
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if isinstance(found, dict):
        inner = found["error"] if isinstance(found.get("error"), dict) else found
        detail = inner.get("message") or inner.get("detail") or inner.get("error")
        if isinstance(detail, list):  # of a request that FastAPI cannot read
            detail = "; ".join(
                f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" if isinstance(one, dict) else str(one)
                for one in detail
            )
        words = str(detail) if detail else words
        known = {name: inner[name] for name in ("type", "param", "code") if inner.get(name) is not None}
    return status, error_body(words or f"the engine answered {status}", status, **known), JSON


