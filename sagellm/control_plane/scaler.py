"""A pool of a manager: measures its engines, lets the loop decide, and starts, drains and stops engines."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sagellm.control_plane.base import BaseService, EngineKind, EngineState, PoolView
from sagellm.control_plane.config import ScalingConfig
from sagellm.control_plane.embedded_engine import EmbeddedEngine
from sagellm.control_plane.engine import ManagedEngine
from sagellm.control_plane.fleet import Fleet
from sagellm.control_plane.growth import Growth
from sagellm.control_plane.lines import RequestLines
from sagellm.control_plane.registry import make_scaler
from sagellm.control_plane.scaling import OPEN, STEP, ScalingLoop, ScalingStep, open_fields, step_fields
from sagellm.core.errors import ConfigError, SageError

__all__ = ["PoolScaler"]

logger = logging.getLogger("sagellm.control")

KEPT_DECISIONS = 50


class PoolScaler(BaseService):
    """Changes the number of equal engines of one manager.

    Args:
        name: of the first engine; the further ones are NAME-2, NAME-3 and so on.
        make: returns an engine that is not started.
        names: of the first engines, where a group starts them; further ones count from there.
        role: phase that they compute.

    Raises SageError: engines of this kind cannot be started, or the policy cannot be built.
    """

    def __init__(
        self, name: str, make: Callable[[], EngineKind], config: ScalingConfig, names: Sequence[str] | None = None,
        role: str = "hybrid",
    ) -> None:  # fmt: skip
        if not (kind := make()).is_ours:
            raise ConfigError(f"scaling.{name}: engines of the kind {kind.name} are not started by the manager; leave it out.")
        if isinstance(kind, EmbeddedEngine):
            raise ConfigError(f"scaling.{name}: a process has one engine with place manager; leave place out, or scaling.")
        self.name, self.config, self._make = name, config, make
        self._loop = ScalingLoop(make_scaler(config.policy, **config.options), config)
        self._opening = open_fields(name, config, self._loop.policy)
        own = [name if number == 1 else f"{name}-{number}" for number in range(1, config.min + 1)]
        self.names, self._is_own, self._role = own if names is None else list(names), names is None, role
        self._fleet: Fleet
        self._lines: RequestLines | None = None
        self._work: set[asyncio.Task] = set()
        self._beginning: set[str] = set()  # engines that start
        self._begun = self._told = 0.0
        self._num = self._num_faults = 0
        self._growth = Growth(kept=("chosen",))
        self._start_s: list[float] = []
        self._decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)

    def engines(self) -> list[tuple[str, EngineKind]]:
        """Return the first engines, which the manager registers; those of a group are registered by it."""
        return [(name, self._make()) for name in self.names] if self._is_own else []

    def attach(self, fleet: Fleet, lines: RequestLines | None) -> None:
        self._fleet, self._lines = fleet, lines
        fleet.pools[self.name] = self

    async def start(self) -> None:
        """Begin to decide. The first engines serve."""
        self._begun = self._told = time.monotonic()
        self._start_s = [self._fleet.engines[name].register_s for name in self.names]
        self._differences(self._members())
        self._write(OPEN, **self._opening)
        self._spawn(self._decide_always())

    async def stop(self, grace_s: float = 10.0) -> None:
        """Decide no more. Engines that drain are left to the fleet."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    async def health(self) -> str:
        return "" if self._work else f"pool {self.name} does not decide"

    def status(self) -> dict[str, Any]:
        return {
            "policy": self._loop.policy.name, "faults": self._loop.num_faults, "engines": list(self.names),
            "min": self.config.min, "max": self.config.max, "dry_run": self.config.dry_run,
            "start_s": self._mean_start_s(), "decisions": list(self._decisions)[::-1],
        }  # fmt: skip

    async def _decide_always(self) -> None:
        while True:
            await asyncio.sleep(self.config.interval_s)
            try:
                self._decide()
            except Exception:  # of ours: the next interval may be better
                logger.exception("pool %s could not decide", self.name)

    def _decide(self) -> None:
        view = self._view()
        step = self._loop.step(view)
        self._num += 1
        line = step_fields(self.name, self._num, view, step)
        self._decisions.append({"t_s": round(time.time(), 3), **line})
        self._write(STEP, **line)
        metrics = self._fleet.metrics
        metrics.scaling_target.labels(self.name).set(step.target)
        metrics.scaling_decisions.labels(self.name, step.action).inc()
        metrics.scaling_faults.labels(self.name).inc(self._loop.num_faults - self._num_faults)
        self._num_faults = self._loop.num_faults
        if not self.config.dry_run:
            self._apply(step)

    def _apply(self, step: ScalingStep) -> None:
        for _ in range(step.target - step.present):
            name = self._free_name()
            self.names.append(name)
            self._beginning.add(name)
            self._spawn(self._start_engine(name))
        # The last ones go first; before them those that do not serve.
        staying = [one for one in self._members() if one.state is not EngineState.DRAINING]
        going = sorted(reversed(staying), key=lambda one: one.state is EngineState.READY)
        for one in going[: max(0, step.present - step.target)]:
            self._fleet.drain(one.name)
            self._spawn(self._stop_engine(one.name))

    async def _start_engine(self, name: str) -> None:
        begun = time.monotonic()
        try:
            engine = await self._fleet.register(name, self._make())
            self._start_s.append(engine.register_s)
            self._write("scaled", pool=self.name, engine=name, what="started", seconds=round(engine.register_s, 3))
        except SageError as error:
            logger.error("pool %s: %s", self.name, error)
            seconds = round(time.monotonic() - begun, 3)
            self._write("scaled", pool=self.name, engine=name, what="failed", seconds=seconds, why=str(error))
        finally:
            self._beginning.discard(name)

    async def _stop_engine(self, name: str) -> None:
        begun = time.monotonic()
        with contextlib.suppress(ConfigError):  # somebody else has stopped it
            await self._fleet.unregister(name, self.config.drain_timeout_s)
        self._write("scaled", pool=self.name, engine=name, what="stopped", seconds=round(time.monotonic() - begun, 3))

    def _view(self) -> PoolView:
        now = time.monotonic()
        interval_s, self._told = now - self._told, now
        members = self._members()
        more = self._differences(members)
        states = [one.state for one in members]
        ended, steps = more.get("ended", 0.0), more.get("output_tokens", 0.0) - more.get("ended", 0.0)
        num_draining, num_ready = states.count(EngineState.DRAINING), states.count(EngineState.READY)
        return PoolView(
            now - self._begun, interval_s, more.get("chosen", 0.0) / interval_s, int(ended),
            prompt_tokens=more["prompt_tokens"] / ended if ended > 0 else None,
            output_tokens=more["output_tokens"] / ended if ended > 0 else None,
            itl_s=more["decode_s"] / steps if ended > 0 and steps > 0 else None,
            ttft_s=more["first_token_s"] / more["first_tokens"] if more.get("first_tokens") else None,
            num_running=sum(one.num_running for one in members),
            num_waiting=int(sum(one.load.get("waiting", 0) for one in members)),
            num_ready=num_ready, num_starting=len(self.names) - num_draining - num_ready, num_draining=num_draining,
            min_engines=self.config.min, max_engines=self.config.max, start_s=self._mean_start_s(),
            role=self._role,
        )  # fmt: skip

    def _members(self) -> list[ManagedEngine]:
        """Return the engines of the pool that the fleet has, in the order of their start; forget those that have gone."""
        engines = self._fleet.engines
        self.names = [name for name in self.names if name in engines or name in self._beginning]
        return [engines[name] for name in self.names if name in engines]

    def _differences(self, members: list[ManagedEngine]) -> dict[str, float]:
        """Return by how much the sums of the engines have grown."""
        return self._growth.more({one.name: one.load | {"chosen": one.num_chosen} for one in members})

    def _mean_start_s(self) -> float | None:
        return sum(self._start_s) / len(self._start_s) if self._start_s else None

    def _free_name(self) -> str:
        number = 2 if self._is_own else 1
        while (name := f"{self.name}-{number}") in self._fleet.engines or name in self.names:
            number += 1
        return name

    def _write(self, event: str, **fields: Any) -> None:
        if self._lines is not None:
            self._lines.write(event, **fields)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
