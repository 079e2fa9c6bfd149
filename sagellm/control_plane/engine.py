"""One engine of a manager: its state, its health, its load, and its restarts."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from sagellm.comm_backend.group_messages import Capabilities
from sagellm.control_plane.base import EngineKind, EngineState, EngineView, Queue
from sagellm.control_plane.metrics import GatewayMetrics
from sagellm.control_plane.probe import EngineFacts
from sagellm.core.errors import ConfigError, EngineError, SageError
from sagellm.core.tasks import within
from sagellm.pd.base import EngineView as NoView

__all__ = ["ManagedEngine"]

logger = logging.getLogger("sagellm.control")

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
HEALTHY_S = 10.0  # an engine that served for so long is started again at once
WORDS_S = 2.0  # the end of a process may be seen later than that of its port, and says more
FAILED_CHECKS = 2  # in a row; a single one may be an accident of the network
NOTHING = NoView("", "hybrid")  # its costs and capabilities are those of all views, since a view is made for each request


class ManagedEngine:
    """Starts its engine, looks after it, and starts it again when it ends.

    Args:
        accept: checks the facts of the engine at each start; raises ConfigError.
        changed: called when the state has changed.
        loaded: called when the engine has said its load.

    Attributes:
        hangs: is set when the engine lives and answers nothing; requests that it has end then.
        why: why it failed last; empty where it never did.
        num_running: requests of the gateway that it has.
        num_chosen: requests that came to it first, so far. `num_sent`: all that it was sent.
    """

    def __init__(
        self, name: str, kind: EngineKind, metrics: GatewayMetrics, *, interval_s: float,
        accept: Callable[["ManagedEngine", EngineFacts], None], changed: Callable[["ManagedEngine"], None],
        loaded: Callable[["ManagedEngine"], None],
    ) -> None:  # fmt: skip
        self.name, self.kind = name, kind
        self.state = EngineState.STARTING
        self.facts = EngineFacts((), ())
        self.load: dict[str, float] = {}
        self.hangs = kind.ending()
        self.why = ""
        self.num_chosen = self.num_sent = 0
        self.num_running = self.num_starts = self.num_served = self.num_failed = 0
        self.register_s = 0.0
        self._metrics, self._interval_s = metrics, interval_s
        self._accept, self._changed, self._loaded = accept, changed, loaded
        self._life: asyncio.Task | None = None
        self._ready_at = 0.0
        self._retrying = asyncio.Event()
        self._capabilities = NOTHING.capabilities
        self._num_checks = {"ok": 0, "failed": 0}

    async def start(self) -> None:
        """Start it for the first time. Raises SageError: it cannot be, and is ended again."""
        begun = time.monotonic()
        self._life = asyncio.create_task(self._start())
        try:
            await asyncio.wait({self._life})
            if self._life.cancelled():
                raise EngineError("it was stopped while it started.")
            self._life.result()
        except BaseException:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
            await self.kind.stop(0.0)
            raise
        self.register_s = time.monotonic() - begun
        self._life = asyncio.create_task(self._live())

    async def stop(self, grace_s: float) -> None:
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        await self.kind.stop(grace_s)

    def retry(self) -> None:
        """Start it again now, where it waits for that."""
        self._retrying.set()

    def words(self) -> str:
        """Return its state, for an error."""
        return f"{self.name} is {self.state}"

    def serves(self, model: str | None, path: str) -> bool:
        """Whether a router may choose it. An engine of a group is chosen by its group alone."""
        is_ready = self.state is EngineState.READY and not self.kind.group
        return is_ready and path in self.facts.routes and model in (None, *self.facts.models)

    @property
    def device(self) -> str:
        return self.kind.device or self.facts.device

    def view(self, cached_tokens: int | None = None) -> EngineView:
        """`cached_tokens`: of the request that is to be routed."""
        return EngineView(
            self.name, "hybrid", cached_tokens, num_running=self.num_running, costs=NOTHING.costs,
            capabilities=self._capabilities, kind=self.kind.name, device=self.device,
            num_waiting=int(self.load.get("waiting", 0)), kv_use=self.load.get("kv_use"), num_sent=self.num_sent,
        )  # fmt: skip

    @property
    def queue(self) -> Queue:
        """As `EngineView.queue`."""
        load = self.load
        return self.num_running + int(load.get("waiting", 0)), load.get("kv_use") or 0.0, self.num_sent, self.name

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name, "kind": self.kind.name, "group": self.kind.group, "role": self.kind.role,
            "state": self.state, "url": self.kind.url, "node": self.kind.node,
            "models": list(self.facts.models), "routes": list(self.facts.routes), "device": self.device,
            "capabilities": dict(self.facts.capabilities),
            "running": self.num_running, "load": self.load, "served": self.num_served, "failed": self.num_failed,
            "starts": self.num_starts, "why": self.why, "register_s": round(self.register_s, 3),
            "ready_s": round(time.monotonic() - self._ready_at, 1) if self.state is EngineState.READY else None,
            "healthy_checks": self._num_checks["ok"], "failed_checks": self._num_checks["failed"],
        } | self.kind.describe()  # fmt: skip

    async def _start(self) -> None:
        self.num_starts += 1
        await self.kind.start()
        facts = await self.kind.facts()
        wanted = self.kind.model
        if wanted is not None:
            if wanted not in facts.models:
                raise ConfigError(
                    f"engine {self.name} has no model {wanted!r}: its server at {self.kind.url} serves "
                    f"{', '.join(facts.models)}."
                )
            facts = replace(facts, models=(wanted,))
        self._accept(self, facts)
        self.facts = facts
        known = {name: value for name, value in facts.capabilities.items() if name in Capabilities.model_fields}
        with contextlib.suppress(ValidationError):  # of another version
            self._capabilities = Capabilities(**known)
        self.hangs = self.kind.ending()
        self._ready_at = time.monotonic()
        if self.state is not EngineState.DRAINING:
            self._become(EngineState.READY)

    async def _live(self) -> None:
        """Look after it; when it fails, start it again, later each time."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            why = await self._until_it_fails()
            if self.state is EngineState.DRAINING:  # it gets no requests any more
                self.why = why
                return
            if time.monotonic() - self._ready_at > HEALTHY_S:
                backoff_s = 0.0
            is_up = False
            while not is_up:
                self.why = why
                logger.warning("engine %s failed: %s It is tried again in %g s", self.name, why, backoff_s)
                self._become(EngineState.FAILED)
                self._retrying.clear()
                if self.kind.node:  # a lost machine closes no connection
                    self.hangs.words = why.rstrip(".")
                    self.hangs.set()
                await self.kind.reset()
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._retrying.wait(), backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S) or FIRST_BACKOFF_S
                self._become(EngineState.RESTARTING)
                try:
                    await self._start()
                    is_up = True
                except SageError as error:
                    why = str(error)
                except asyncio.TimeoutError:
                    why = "it does not answer."
            logger.info("engine %s is ready again", self.name)

    async def _until_it_fails(self) -> str:
        ended, sick = asyncio.create_task(self.kind.ended()), asyncio.create_task(self._until_it_is_sick())
        try:
            await asyncio.wait({ended, sick}, return_when=asyncio.FIRST_COMPLETED)
            if self.kind.is_ours and not ended.done() and self.state is EngineState.READY:
                self._become(EngineState.FAILED)
                await asyncio.wait({ended}, timeout=WORDS_S)
            return ended.result() if ended.done() else sick.result()
        finally:
            for task in (ended, sick):
                task.cancel()
            await asyncio.gather(ended, sick, return_exceptions=True)

    async def _until_it_is_sick(self) -> str:
        num_failed = 0
        while True:
            await asyncio.sleep(self._interval_s)
            is_silent = False
            try:
                why = await self.kind.health()
            except asyncio.TimeoutError:
                why, is_silent = "it does not answer any more.", True
            result = "failed" if why else "ok"
            self._num_checks[result] += 1
            self._metrics.checks.labels(self.name, result).inc()
            num_failed = num_failed + 1 if why else 0
            if num_failed >= FAILED_CHECKS:
                if is_silent:
                    self.hangs.set()
                return why
            if not why:
                self.load = await within(self.kind.load(), 30.0)
                self._loaded(self)

    def _become(self, state: EngineState) -> None:
        self.state = state
        self._changed(self)
