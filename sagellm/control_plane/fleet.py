"""The engines of a manager: registered, looked after, chosen, ended. Everything runs on one event loop."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import aiohttp

from sagellm.control_plane.base import (
    BaseService,
    EngineKind,
    EngineState,
    EngineView,
    RouteChoice,
    Router,
    RouteRequest,
)
from sagellm.control_plane.engine import ManagedEngine
from sagellm.control_plane.metrics import GatewayMetrics
from sagellm.control_plane.probe import EngineFacts
from sagellm.control_plane.routers.least_load import LeastLoad
from sagellm.core.errors import ConfigError, EngineError, PolicyError
from sagellm.core.tasks import within
from sagellm.pd.guarded import GuardedRouting

__all__ = ["Fleet"]

KEPT_DECISIONS = 200


class _Guarded(GuardedRouting):
    what, default = "router", LeastLoad

    def check(self, answer: RouteChoice, request: RouteRequest, engines: Sequence[EngineView]) -> None:
        check_choice(answer, engines)

    def last_resort(self, engines: Sequence[EngineView], error: Exception) -> RouteChoice:
        return RouteChoice(engines[0].engine_id, "the decision failed", str(error))


def check_choice(choice: RouteChoice, engines: Sequence[EngineView]) -> None:
    """Raises PolicyError: no choice, or an engine that was not offered."""
    known = [one.engine_id for one in engines]
    if not isinstance(choice, RouteChoice) or not isinstance(choice.reason, str):
        raise PolicyError(f"got {choice!r}; give a RouteChoice with a reason.")
    if choice.engine not in known:
        raise PolicyError(f"engine {choice.engine!r} was not offered; allowed are {', '.join(known)}.")


class Fleet(BaseService):
    """Registers engines and chooses among them.

    Args:
        interval_s: seconds between two health checks of an engine.

    Attributes:
        decisions: the last ones, the newest at the end.
        start_s: seconds that the manager took to start.
        pools: name -> `PoolScaler` of engines whose number changes.
    """

    def __init__(self, router: Router, metrics: GatewayMetrics, interval_s: float = 1.0) -> None:
        self.router = _Guarded(router)
        self.metrics = metrics
        self.decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)
        self.engines: dict[str, ManagedEngine] = {}
        self.http: aiohttp.ClientSession
        self.start_s = 0.0
        self.pools: dict[str, Any] = {}
        self._interval_s = interval_s
        self._changed = asyncio.Event()
        self._num_faults = 0

    async def start(self) -> None:
        # No limit of connections: each running request has one.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        # Answers are passed on as they are, so they must not be compressed.
        plain = {"accept-encoding": "identity"}
        self.http = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=plain)

    async def stop(self, grace_s: float = 10.0) -> None:
        await asyncio.gather(*(one.stop(grace_s) for one in self.engines.values()))
        self.engines.clear()
        await self.http.close()

    async def health(self) -> str:
        """Return why a request could not be served now, or nothing."""
        if any(one.state is EngineState.READY for one in self.engines.values()):
            return ""
        return "no engine is ready" if self.engines else "no engine is registered"

    async def register(self, name: str, kind: EngineKind) -> ManagedEngine:
        """Start an engine and return when it serves.

        Raises:
            ConfigError: the name is taken, the server is not what it should be, or it tokenizes otherwise than another engine
                of its model.
            EngineError: it does not start or answer.
        """
        if not name or not name.isprintable() or "/" in name:
            raise ConfigError(f"{name!r} is no name of an engine; give printable characters without /.")
        if name in self.engines:
            raise ConfigError(f"an engine {name} is registered already; choose another name, or unregister it first.")
        kind.http = self.http
        engine = ManagedEngine(
            name, kind, self.metrics, interval_s=self._interval_s, accept=self._accept, changed=self._note_change
        )
        self.engines[name] = engine
        try:
            await engine.start()
        except BaseException as error:
            self._remove(engine)
            if isinstance(error, EngineError):
                raise EngineError(f"engine {name} cannot start: {error}") from error
            raise
        self.metrics.register_s.labels(name).set(engine.register_s)
        return engine

    async def unregister(self, name: str, drain_s: float = 10.0) -> None:
        """Let its requests end for `drain_s` seconds, then end it. Raises ConfigError: there is no such engine."""
        engine = self.find(name)
        self.drain(name)
        end = time.monotonic() + drain_s
        while engine.num_running and time.monotonic() < end:
            await self.changed(end - time.monotonic())
        await engine.stop(max(1.0, end - time.monotonic()))
        self._remove(engine)

    def drain(self, name: str) -> None:
        """Send it no further request. Raises ConfigError: there is no such engine."""
        engine = self.find(name)
        engine.state = EngineState.DRAINING
        self._note_change(engine)

    def find(self, name: str) -> ManagedEngine:
        if name not in self.engines:
            raise ConfigError(f"there is no engine {name!r}; registered are {', '.join(self.engines) or 'none'}.")
        return self.engines[name]

    def models(self) -> dict[str, list[str]]:
        """Return model -> engines that have it, also those that do not serve now."""
        found: dict[str, list[str]] = {}
        for one in self.engines.values():
            for model in one.facts.models:
                found.setdefault(model, []).append(one.name)
        return found

    def candidates(self, model: str | None, path: str, without: Collection[str] = ()) -> list[ManagedEngine]:
        return [one for one in self.engines.values() if one.name not in without and one.serves(model, path)]

    def choose(self, request: RouteRequest, candidates: Sequence[ManagedEngine]) -> ManagedEngine:
        choice = self.router.choose(request, [one.view() for one in candidates])
        self.metrics.router_faults.inc(self.router.num_faults - self._num_faults)
        self._num_faults = self.router.num_faults
        router = self.router.policy.name
        self.metrics.choices.labels(choice.engine, router, choice.reason).inc()
        self.decisions.append({
            "t_s": round(time.time(), 3), "model": request.model, "path": request.path, "engine": choice.engine,
            "router": router, "reason": choice.reason, "detail": choice.detail, "attempt": request.attempt,
            "of": len(candidates),
        })  # fmt: skip
        return self.engines[choice.engine]

    async def changed(self, timeout_s: float) -> None:
        """Wait until an engine has changed or lost a request, at most so long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._changed.wait(), timeout_s)

    def note_end(self, engine: ManagedEngine) -> None:
        """A request has left the engine."""
        if engine.state is EngineState.DRAINING:
            self._note_change(engine)

    def status(self) -> dict[str, Any]:
        return {
            "engines": [one.status() for one in self.engines.values()], "models": self.models(),
            "router": self.router.policy.name, "health_share": self.metrics.health_share(),
            "start_s": round(self.start_s, 3), "scaling": {name: pool.status() for name, pool in self.pools.items()},
        }  # fmt: skip

    def _accept(self, engine: ManagedEngine, facts: EngineFacts) -> None:
        """Raises ConfigError: another engine tokenizes the model otherwise, so answers would depend on the route."""
        for other in self.engines.values():
            common = set(facts.models) & set(other.facts.models)
            if other is engine or not common or None in (facts.tokens, other.facts.tokens):
                continue
            if facts.tokens != other.facts.tokens:
                raise ConfigError(
                    f"engines {engine.name} and {other.name} both serve {', '.join(sorted(common))}, with different "
                    "tokenizers; give one of them another model name."
                )

    def _note_change(self, engine: ManagedEngine) -> None:
        if engine.state in (EngineState.FAILED, EngineState.DRAINING):
            self.router.policy.forget(engine.name)
        states = [one.state for one in self.engines.values()]
        for state in EngineState:
            self.metrics.engines.labels(state).set(states.count(state))
        self._changed.set()
        self._changed = asyncio.Event()

    def _remove(self, engine: ManagedEngine) -> None:
        self.engines.pop(engine.name, None)
        with contextlib.suppress(KeyError):  # it never served
            self.metrics.register_s.remove(engine.name)
        self._note_change(engine)
