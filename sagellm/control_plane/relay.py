"""One request of a client at the gateway: to an engine, to another one where that fails, and the answer back."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from sagellm.control_plane.base import Candidates, RouteRequest
from sagellm.control_plane.engine import ManagedEngine
from sagellm.control_plane.group import ManagedGroup
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
        self._engine, self._kind = "none", ""
        self._attempts = 0
        self._waited_s = 0.0
        self._tokens: dict[str, list[list[int]] | None] = {}  # of the prompts, by the group that has cut them
        self._number = gateway.begin(key)

    def ended(self, outcome: str) -> None:
        self._gateway.end(self._key)
        self._fleet.metrics.requests.labels(self._engine, outcome).inc()
        self._gateway.lines.write(
            "end", request=self._number, path=self._path, engine=self._engine, outcome=outcome, attempts=self._attempts,
            first_byte_s=self.first_byte_s, seconds=round(time.monotonic() - self.arrived, 6),
        )  # fmt: skip

    async def serve(self, body: Body, scope: dict, send: Any) -> str:
        headers = relayed_headers(scope["headers"])
        request = self._route_request(body)
        if self._fleet.prefixes is not None and len(self._fleet.candidates(body.model, self._path)) > 1:
            request = replace(request, cached=await self._fleet.prefixes.prompt(self._path, body))
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
            self._engine, self._kind = engine.name, ""
            if not isinstance(engine, ManagedGroup) or len(found) > 1:  # a group alone leaves no choice
                self._write_route(self._fleet.decisions[-1])
            try:
                return await self._attempt(engine, request, body, headers, failed, send)
            except Failed as error:
                last = error
                failed.add(self._engine)
                self._fleet.metrics.failures.labels(self._engine, error.cause).inc()
                for one in {engine, self._fleet.engines.get(self._engine, engine)}:
                    one.num_failed += 1
                logger.warning("attempt %d: engine %s failed: %s", self._attempts, self._engine, error)
                if self._attempts < MAX_ATTEMPTS:
                    self._fleet.metrics.retries.labels(error.cause).inc()
        assert last is not None
        if last.answer is not None:
            await send_whole(send, *last.answer)
        else:
            words = f"{self._attempts} engines in turn failed with this request, the last one so: {last}"
            await send_whole(send, 502, error_body(words, 502))
        return "failed"

    async def _attempt(
        self, engine: ManagedEngine, request: RouteRequest, body: Body, headers: dict[str, str], failed: set[str], send: Any
    ) -> str:
        """Raises Failed."""
        if not isinstance(engine, ManagedGroup):
            given = {name: value for name, value in headers.items() if name != "authorization"}  # that key is the gateway's
            own = given | key_header(engine.kind.api_key)
            posting = self._fleet.http.post(engine.kind.url + self._path, data=body.content, headers=own)
            with self._counted(engine, request):
                return await self._answer(engine, posting, body, send, lambda: None)
        if engine.name not in self._tokens:
            self._tokens[engine.name] = await engine.tokens(self._path, body)
        async with engine.attempt(request, body, headers, self._tokens[engine.name], failed) as (engines, sending, line):
            self._write_route(line)
            *first, second = engines
            self._engine, self._kind = second.name, line["kind"]
            with contextlib.ExitStack() as prompt, self._counted(engine, request), self._counted(second, request):
                for one in first:
                    prompt.enter_context(self._counted(one, request))

                def on_first() -> None:
                    sending.note_first_byte()
                    prompt.close()  # the keys and values are fetched

                outcome = await self._answer(second, sending.post(), body, send, on_first)
                sending.is_served = outcome == "served"
            if sending.is_served:
                engine.num_served += 1
            return outcome

    @contextlib.contextmanager
    def _counted(self, engine: ManagedEngine, request: RouteRequest) -> Iterator[None]:
        """The request runs on the engine."""
        engine.num_chosen += self._attempts == 1
        self._fleet.note_begin(engine, request)
        try:
            yield
        finally:
            self._fleet.note_end(engine, request)

    async def _answer(
        self, engine: ManagedEngine, posting: Any, body: Body, send: Any, on_first: Callable[[], None]
    ) -> str:
        """Pass the answer of an engine on, and return the outcome. Raises Failed."""

        def first() -> None:
            on_first()
            self.note_first_byte()
            self._fleet.metrics.first_byte.labels(self._kind).observe(self.first_byte_s)

        hangs = engine.hangs
        outcome, words = await unless_hanging(
            hangs,
            relay_answer(
                posting, body.stream, send, who=f"engine {engine.name}", hangs=hangs, on_first=first, reworded=as_openai
            ),
        )
        if words:
            engine.num_failed += 1
            self._fleet.metrics.failures.labels(engine.name, "mid-stream").inc()
            logger.warning("engine %s failed in the middle of an answer: %s", engine.name, words)
        elif outcome == "served":
            engine.num_served += 1
        return outcome

    def _write_route(self, decision: dict[str, Any]) -> None:
        self._gateway.lines.write("route", **{"request": self._number} | decision)

    async def _candidates(self, model: str | None, failed: set[str]) -> Candidates | tuple[int, str]:
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
            if fresh := found.without(self._spent(model, failed)) if failed else found:
                return fresh
            if refusal := self._refusal(model):
                return refusal
            if found and backoff_s >= MAX_BACKOFF_S:
                return found  # one that failed and lives may have been short of something
            if not found and self._waited_s >= wait_s:
                states = ", ".join(one.words() for one in fleet.engines.values()) or "none is registered"
                return 503, f"no engine became ready within {wait_s:g} s ({states}). Try again later."
            begun = time.monotonic()
            await fleet.changed(backoff_s if found else min(MAX_BACKOFF_S, wait_s - self._waited_s))
            self._waited_s += 0.0 if found else time.monotonic() - begun
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _spent(self, model: str | None, failed: set[str]) -> set[str]:
        """Engines that have failed with the request, and groups without another one."""
        groups = (one for one in self._fleet.engines.values() if isinstance(one, ManagedGroup))
        return failed | {one.name for one in groups if not one.has_other_than(failed, model)}

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


