"""A prefill/decode group in a manager: its state follows from its engines, and its requests go to them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection
from typing import Any, NamedTuple

from sagellm.control_plane.base import EngineState, RouteChoice, RouteRequest
from sagellm.control_plane.engine import ManagedEngine
from sagellm.core.errors import PolicyError
from sagellm.pd.answers import Failed
from sagellm.pd.bodies import Body
from sagellm.pd.sending import Route, Sending, find_route

__all__ = ["GroupAttempt", "ManagedGroup"]

logger = logging.getLogger("sagellm.control")


class GroupAttempt(NamedTuple):
    """`engines`: that have the request: the prefill engine of a split, and the one that decodes. `sending`: their requests.
    `line`: the decision, for the record."""

    engines: list[ManagedEngine]
    sending: Sending
    line: dict[str, Any]


class ManagedGroup(ManagedEngine):
    """Is ready while one of its engines decodes. Its engines are looked after, and started again, as all others."""

    def serves(self, model: str | None, path: str) -> bool:
        return super().serves(model, path) and bool(self.kind.decoders(model))

    def words(self) -> str:
        why = self.kind.lacks()
        return f"{super().words()}: {why.rstrip('.')}" if why else super().words()

    async def _live(self) -> None:
        while True:
            facts, why = await self.kind.facts(), await self.kind.health()
            if facts != self.facts:
                self.facts = facts
                self.kind.fleet.note_change()
            if self.state is not EngineState.DRAINING:
                self.why = why or self.why
                state = EngineState.FAILED if why else EngineState.READY
                if state is not self.state:
                    self._become(state)
            self.load = await self.kind.load()
            self._loaded(self)
            await self.kind.fleet.changed(self._interval_s)

    def has_other_than(self, names: Collection[str], model: str | None) -> bool:
        """Whether another engine of the group than these decodes the model."""
        return bool(self.kind.decoders(model, names))

    async def tokens(self, path: str, body: Body) -> list[list[int]] | None:
        """Return the tokens of each prompt; None where they are not known."""
        tokens = self.kind.tokens
        return None if tokens is None else await asyncio.to_thread(tokens.of, path, body.raw)

    @contextlib.asynccontextmanager
    async def attempt(
        self, request: RouteRequest, body: Body, headers: dict[str, str], tokens: list[list[int]] | None,
        failed: Collection[str],
    ) -> AsyncIterator[GroupAttempt]:  # fmt: skip
        """Choose the engines of a request, and keep the choice as a decision of the fleet.

        Args:
            failed: names of engines that have failed with it. They are taken where there is no other.

        Raises:
            Failed: no engine decodes now.
        """
        fleet, group = self.kind.fleet, self.kind.peers
        members = {one.kind.url: one for one in self.kind.members()}
        without = {url for url in group.engines if url not in members or members[url].state is not EngineState.READY}
        if failed and self.has_other_than(failed, body.model):
            without |= {url for url, one in members.items() if one.name in failed}
        gone = [one.facts.instance for url, one in group.engines.items() if url in without]
        try:
            route = find_route(group, self.kind.router, body, tokens, request.attempt, gone)
        except PolicyError as error:
            raise Failed("no engine", str(error)) from None
        fleet.metrics.router_faults.inc(route.num_faults)
        engines = [members[one.url] for one in (route.first, route.second) if one is not None]
        line = self._note(request, route, engines, len(members) - len(without))

        def on_prefill(cause: str, words: str) -> None:
            if not cause:
                engines[0].num_served += 1
                return
            engines[0].num_failed += 1
            fleet.metrics.prefill_failures.labels(engines[0].name, cause).inc()
            logger.warning("prefill on engine %s failed, its prompt is computed again: %s", engines[0].name, words)

        async with Sending(group, route, request.path, body, headers, on_prefill) as sending:
            yield GroupAttempt(engines, sending, line)

    def _note(self, request: RouteRequest, route: Route, engines: list[ManagedEngine], num: int) -> dict[str, Any]:
        """Keep the decision, and return it for the record, by the URLs of the engines."""
        choice = RouteChoice(engines[-1].name, route.decision.kind.value, self.kind.named(route.decision.reason))
        more: dict[str, Any] = {"group": self.name, "prefill_on": engines[0].name if len(engines) > 1 else None}
        policy, decision, seen = self.kind.router.policy.name, route.decision, route.request
        self.kind.fleet.note_choice(request, choice, policy, num, **more)
        return {
            "group": self.name, "engine": choice.engine, "attempt": request.attempt, "kind": choice.reason,
            "decode_on": decision.decode_on, "prefill_on": decision.prefill_on, "tokens": seen.num_tokens,
            "is_estimate": seen.is_estimate, "cached": {url: cached for url, cached in route.cached.items() if cached},
            "policy": policy, "expected_s": decision.expected_s, "reason": decision.reason,
        }  # fmt: skip
