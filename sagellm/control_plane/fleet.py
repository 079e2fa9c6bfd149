"""The engines of a manager: registered, looked after, chosen, ended. Everything runs on one event loop."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import aiohttp

from sagellm.control_plane.base import (
    BaseService,
    Candidates,
    EngineKind,
    EngineState,
    EngineView,
    RouteChoice,
    Router,
    RouteRequest,
)
from sagellm.control_plane.cached import CachedPrefixes
from sagellm.control_plane.engine import ManagedEngine
from sagellm.control_plane.group import ManagedGroup
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
        check_choice(answer, Candidates.of(engines))

    def last_resort(self, engines: Sequence[EngineView], error: Exception) -> RouteChoice:
        return RouteChoice(engines[0].engine_id, "the decision failed", str(error))


def check_choice(choice: RouteChoice, engines: Candidates) -> None:
    """Raises PolicyError: no choice, or an engine that was not offered."""
    if not isinstance(choice, RouteChoice) or not isinstance(choice.reason, str):
        raise PolicyError(f"got {choice!r}; give a RouteChoice with a reason.")
    if not engines.has(choice.engine):
        raise PolicyError(f"engine {choice.engine!r} was not offered; allowed are {', '.join(engines.names)}.")


class Fleet(BaseService):
    """Registers engines and chooses among them.

    Args:
        interval_s: seconds between two health checks of an engine.

    Attributes:
        decisions: the last ones, the newest at the end.
        start_s: seconds that the manager took to start.
        is_started: whether the engines of the configuration serve.
        url: of the gateway; empty without one.
        pools: name -> `PoolScaler` of engines whose number changes.
        prefixes: what engines have cached; None where the router does not ask.
    """

    def __init__(self, router: Router, metrics: GatewayMetrics, interval_s: float = 1.0) -> None:
        self.router = _Guarded(router)
        self.metrics = metrics
        self.decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)
        self.engines: dict[str, ManagedEngine] = {}
        self.http: aiohttp.ClientSession
        self.start_s, self.url, self.is_started = 0.0, "", False
        self.pools: dict[str, Any] = {}
        self.prefixes = CachedPrefixes(self._forget_sent) if router.reads_caches else None
        self._interval_s = interval_s
        self._candidates: dict[tuple[str | None, str], Candidates] = {}  # as they are until an engine changes its state
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
        await asyncio.gather(*(one.stop(grace_s) for one in self.engines.values() if not one.kind.group))
        self.engines.clear()
        if self.prefixes is not None:
            await self.prefixes.close()
        await self.http.close()

    async def health(self) -> str:
        """Return why a request could not be served now, or nothing."""
        if any(one.state is EngineState.READY for one in self.engines.values() if not one.kind.group):
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
        kind.attach(self, name)
        engine = (ManagedGroup if kind.is_group else ManagedEngine)(
            name, kind, self.metrics, interval_s=self._interval_s, accept=self._accept, changed=self._note_change,
            loaded=self._note_figures,
        )  # fmt: skip
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

    async def register_all(self, engines: Sequence[tuple[str, EngineKind]]) -> None:
        """Start engines side by side; where one cannot be, the others are ended again. Raises as `register`."""
        tasks = [asyncio.create_task(self.register(name, kind)) for name, kind in engines]
        done: set[asyncio.Task] = set()
        try:
            if tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

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
            for model in one.facts.models if not one.kind.group else ():
                found.setdefault(model, []).append(one.name)
        return found

    def candidates(self, model: str | None, path: str) -> Candidates:
        """Return the engines that serve a model on a path now."""
        found = self._candidates.get((model, path))
        if found is None:
            engines = {one.name: one for one in self.engines.values() if one.serves(model, path)}
            found = Candidates(engines, ManagedEngine.view, attrgetter("queue"))
            if engines:  # a client may name any model, and each would be kept
                self._candidates[model, path] = found
        return found

    def choose(self, request: RouteRequest, candidates: Candidates) -> ManagedEngine:
        if (cached := request.cached) is not None:
            candidates = candidates.seen_by(lambda engine: engine.view(cached.tokens_on(engine.name)))
        choice = self.router.choose(request, candidates)
        if self.router.num_faults != self._num_faults:
            self.metrics.router_faults.inc(self.router.num_faults - self._num_faults)
            self._num_faults = self.router.num_faults
        self.note_choice(request, choice, self.router.policy.name, len(candidates))
        return self.engines[choice.engine]

    def note_choice(self, request: RouteRequest, choice: RouteChoice, router: str, num: int, **more: Any) -> None:
        """Keep a choice among `num` engines. `more`: further fields of the decision."""
        self.metrics.choice[choice.engine, router, choice.reason].inc()
        self.decisions.append({
            "t_s": round(time.time(), 3), "model": request.model, "path": request.path, "engine": choice.engine,
            "router": router, "reason": choice.reason, "detail": choice.detail, "attempt": request.attempt, "of": num, **more,
        })  # fmt: skip

    async def changed(self, timeout_s: float) -> None:
        """Wait until an engine has changed or lost a request, at most so long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._changed.wait(), timeout_s)

    def note_begin(self, engine: ManagedEngine, request: RouteRequest | None = None) -> None:
        """A request goes to the engine. Without `request` it is counted only."""
        engine.num_running += 1
        engine.num_sent += 1
        self._note_load(engine)
        if request is not None and request.cached is not None:
            request.cached.sent(engine.name)

    def note_end(self, engine: ManagedEngine, request: RouteRequest | None = None) -> None:
        """A request has left the engine."""
        if request is not None and request.cached is not None:
            request.cached.ended(engine.name)
        engine.num_running -= 1
        self._note_load(engine)
        if engine.state is EngineState.DRAINING:
            self._note_change(engine)

    def status(self) -> dict[str, Any]:
        return {
            "engines": [self.engine_status(one) for one in self.engines.values()], "models": self.models(),
            "router": self.router.policy.name, "health_share": self.metrics.health_share(),
            "start_s": round(self.start_s, 3), "scaling": {name: pool.status() for name, pool in self.pools.items()},
        }  # fmt: skip

    def engine_status(self, engine: ManagedEngine) -> dict[str, Any]:
        return engine.status() | (self.prefixes.status(engine.name) if self.prefixes is not None else {})

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

    def _note_load(self, engine: ManagedEngine) -> None:
        for candidates in self._candidates.values():
            candidates.note(engine.name)

    def _note_figures(self, engine: ManagedEngine) -> None:
        """The engine has said its load."""
        self._note_load(engine)
        for figure, value in engine.load.items():
            self.metrics.load.labels(engine.name, engine.kind.group, engine.kind.role, figure).set(value)

    def note_change(self) -> None:
        """Look at all engines again: one can serve more or less than before."""
        self._candidates.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    def _note_change(self, engine: ManagedEngine) -> None:
        if engine.state in (EngineState.FAILED, EngineState.DRAINING):
            self._forget_sent(engine.name)
        if self.prefixes is not None:
            if engine.state is EngineState.READY and self.engines.get(engine.name) is engine:
                self.prefixes.follow(engine)
            else:
                self.prefixes.leave(engine.name)
        states = [one.state for one in self.engines.values()]
        for state in EngineState:
            self.metrics.engines.labels(state).set(states.count(state))
        self.note_change()

    def _forget_sent(self, name: str) -> None:
        """Drop what the engine was sent: it has ended, or tells from now on what it has cached."""
        self.router.policy.forget(name)

    def _remove(self, engine: ManagedEngine) -> None:
        self.engines.pop(engine.name, None)
        with contextlib.suppress(KeyError):  # it never served
            self.metrics.register_s.remove(engine.name)
        for figure in engine.load:
            with contextlib.suppress(KeyError):
                self.metrics.load.remove(engine.name, engine.kind.group, engine.kind.role, figure)
        self._note_change(engine)
