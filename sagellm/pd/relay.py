"""One request of a client: to the engines that are to serve it, again where they fail, and their answer back."""

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from sagellm.comm_backend.control import sign_request
from sagellm.core.errors import ConfigError
from sagellm.pd.answers import Failed, ProxiedResponse, cause_of, relay_answer, send_whole, unless_hanging, words_of
from sagellm.pd.base import RouteDecision, RouteRequest
from sagellm.pd.bodies import Body, error_body, relayed_headers
from sagellm.pd.engine import Engine
from sagellm.pd.group import Group
from sagellm.pd.proxy_metrics import ProxyMetrics, RequestLines
from sagellm.pd.routing import Router
from sagellm.pd.tokens import PromptTokens, guess_tokens

__all__ = ["Relay", "RelayOptions", "RelayedResponse"]

logger = logging.getLogger("sagellm.pd")

MAX_BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """`wait_s`: longest wait for an engine that decodes. `max_attempts`: a request that ends every engine it meets must
    not meet them all. `registry`: LMDeploy's node manager, told of the beginning and the end of each request, or None."""

    wait_s: float = 30.0
    max_attempts: int = 5
    registry: Any = None


class Relay:
    """The state that all requests share."""

    def __init__(
        self, group: Group, router: Router, metrics: ProxyMetrics, lines: RequestLines, tokens: PromptTokens | None,
        options: RelayOptions | None = None,
    ) -> None:  # fmt: skip
        self.group, self.router, self.metrics, self.lines, self.tokens = group, router, metrics, lines, tokens
        self.options = options or RelayOptions()
        self._number = 0

    def response(self, path: str) -> "RelayedResponse":
        self._number += 1
        return RelayedResponse(self, path, self._number)


class RelayedResponse(ProxiedResponse):
    """Serves one request from its arrival to its end. A client that leaves ends it, at both engines."""

    def __init__(self, relay: Relay, path: str, number: int) -> None:
        super().__init__()
        self._relay, self._path, self._number = relay, path, number
        self._kind = ""
        self._attempts = 0
        self._waited_s = 0.0

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        self._relay.metrics.running.inc()
        await super().__call__(scope, receive, send)

    def ended(self, outcome: str) -> None:
        self._relay.metrics.running.dec()
        self._relay.metrics.requests.labels(outcome).inc()
        self._relay.lines.write(
            "end", request=self._number, outcome=outcome, attempts=self._attempts, first_byte_s=self.first_byte_s,
            seconds=round(time.monotonic() - self.arrived, 6),
        )  # fmt: skip

    async def serve(self, body: Body, scope: dict, send: Any) -> str:
        relay = self._relay
        headers = relayed_headers(scope["headers"])
        tokens = await self._tokens(body)
        failed: set[str] = set()
        last: Failed | None = None
        while self._attempts < relay.options.max_attempts:
            refusal = await self._wait_for_decoder(body, failed)
            if refusal is not None:
                status, words = refusal
                extra = [(b"retry-after", b"5")] if status == 503 else []
                await send_whole(send, status, error_body(words, status), extra=extra)
                return "no engine" if status == 503 else "refused"
            self._attempts += 1
            decision = self._route(body, tokens, failed)
            second = relay.group.engines[decision.decode_on]
            first = relay.group.engines.get(decision.prefill_on) if decision.prefill_on else None
            try:
                return await self._attempt(body, headers, decision, first, second, send)
            except Failed as error:
                last = error
                failed.add(second.facts.instance)
                relay.metrics.failures.labels("decode", error.cause).inc()
                logger.warning("request %d, attempt %d: %s failed: %s", self._number, self._attempts, second.url, error)
                if self._attempts < relay.options.max_attempts:
                    relay.metrics.retries.labels(error.cause).inc()
        assert last is not None
        if last.answer is not None:  # an engine's own words, whatever they are
            status, content, media = last.answer
            await send_whole(send, status, content, media)
        else:
            words = f"{self._attempts} engines in turn failed with this request, the last one so: {last}"
            await send_whole(send, 502, error_body(words, 502))
        return "failed"

    async def _tokens(self, body: Body) -> list[list[int]] | None:
        relay = self._relay
        return None if relay.tokens is None else await relay.tokens.of(self._path, body.raw, len(body.content))

    async def _wait_for_decoder(self, body: Body, failed: set[str]) -> tuple[int, str] | None:
        """Until there is one that has not failed with this request, or, after a while, any; else (status, why not). However
        many die one after the other, a request waits without any no longer than `wait_s` in all."""
        group, wait_s, backoff_s = self._relay.group, self._relay.options.wait_s, 0.05
        while True:
            found = group.decoders(body.model)
            if any(one.facts.instance not in failed for one in found):
                return None
            if not found and (others := {one.info.model for one in group.decoders()}):
                return 404, f"The model {body.model!r} does not exist; served are {', '.join(sorted(others))}."
            if found and backoff_s >= MAX_BACKOFF_S:
                failed.clear()  # one that failed and lives may have been at the end of its drain, or short of something
                return None
            if not found and self._waited_s >= wait_s:
                rest = [one.url for one in group.engines.values()]
                what = f"only prefill engines have joined ({', '.join(rest)})" if rest else "no engine has joined"
                return 503, f"no engine that decodes came within {wait_s:g} s: {what}. Try again later."
            begun = time.monotonic()
            await group.changed(backoff_s if found else min(backoff_s, wait_s - self._waited_s))
            self._waited_s += 0.0 if found else time.monotonic() - begun
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _route(self, body: Body, tokens: list[list[int]] | None, failed: set[str]) -> RouteDecision:
        relay = self._relay
        num_tokens = sum(map(len, tokens)) if tokens else guess_tokens(body.raw)
        one = tokens[0] if tokens and len(tokens) == 1 else None
        can_split = body.num_prompts == body.num_answers == 1 and num_tokens > 1 and "sot" not in body.raw
        request = RouteRequest(num_tokens, body.max_tokens, can_split, tokens is None, self._attempts)
        faults = relay.router.num_faults
        views = relay.group.views(body.model, one, failed)
        decision = relay.router.choose(request, views)
        relay.metrics.policy_faults.inc(relay.router.num_faults - faults)
        relay.metrics.decisions.labels(decision.kind.value).inc()
        self._kind = decision.kind.value
        cached = {view.engine_id: view.cached_tokens for view in views if view.cached_tokens}
        relay.lines.write(
            "route", request=self._number, attempt=self._attempts, kind=self._kind, decode_on=decision.decode_on,
            prefill_on=decision.prefill_on, tokens=num_tokens, is_estimate=request.is_estimate, cached=cached,
            policy=relay.router.policy.name, expected_s=decision.expected_s, reason=decision.reason,
        )  # fmt: skip
        self._num_tokens = num_tokens
        self._cached = {view.engine_id: view.cached_tokens for view in views}
        return decision

    async def _attempt(
        self, body: Body, headers: dict[str, str], decision: RouteDecision, first: Engine | None, second: Engine, send: Any
    ) -> str:
        """Raises Failed."""
        transfer_id = secrets.randbits(63)
        content = body.content if first is None else body.for_decode(first.url, transfer_id)
        prefill, served = None, False
        computes = first or second
        computes.sent(transfer_id, max(1, self._num_tokens - self._cached.get(computes.url, 0)))
        registry = self._relay.options.registry
        begun = registry.begin(second.url) if registry else None
        second.num_streams += 1
        try:
            if first is not None:
                copy = body.for_prefill(second.url, transfer_id)
                prefill = asyncio.create_task(self._prefill(first, copy, headers, transfer_id))
            outcome = await unless_hanging(second.hangs, self._decode(second, content, headers, transfer_id, body.stream, send))
            served = outcome == "served"
            return outcome
        finally:
            second.num_streams -= 1
            computes.computed(transfer_id)
            if registry:
                registry.end(second.url, begun)
            if prefill is not None:
                prefill.cancel()  # it is of no use after the request
                await asyncio.gather(prefill, return_exceptions=True)
            if first is not None and not served:  # the decoding engine may not live to do it
                self._relay.group.give_up(first, transfer_id)

    async def _prefill(self, first: Engine, content: bytes, headers: dict[str, str], transfer_id: int) -> None:
        """Its answer says nothing: the decoding engine fetches the keys and values, or computes them where that fails."""
        cause = words = ""
        try:
            async with self._post(first, content, headers) as answer:
                text = await answer.text()
                if answer.status != 200:
                    cause, words = f"status {answer.status}", text[:300]
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            cause, words = cause_of(error), words_of(error)
        finally:
            first.computed(transfer_id)
        if cause:
            self._relay.group.give_up(first, transfer_id)  # or the decoding engine would wait until its deadline
            self._relay.metrics.failures.labels("prefill", cause).inc()
            logger.warning("request %d: prefill on %s failed, its prompt is computed again: %s", self._number, first.url, words)

    async def _decode(
        self, second: Engine, content: bytes, headers: dict[str, str], transfer_id: int, stream: bool, send: Any
    ) -> str:
        def on_first() -> None:
            second.computed(transfer_id)
            self.note_first_byte()
            self._relay.metrics.first_byte.labels(self._kind).observe(self.first_byte_s)

        outcome, words = await relay_answer(
            self._post(second, content, headers), stream, send, who="the engine that decodes", hangs=second.hangs,
            on_first=on_first,
        )  # fmt: skip
        if words:
            self._relay.metrics.failures.labels("decode", "mid-stream").inc()
            logger.warning("request %d: %s failed in the middle of its answer: %s", self._number, second.url, words)
        return outcome

    def _post(self, engine: Engine, content: bytes, headers: dict[str, str]) -> Any:
        http = self._relay.group.http
        if http is None:
            raise ConfigError("the group of the proxy is not started.")
        signed = headers | sign_request(self._relay.group.key, "POST", self._path, content)
        return http.post(engine.url + self._path, data=content, headers=signed)
