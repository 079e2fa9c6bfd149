"""`ControlPlaneManager`: engines of many kinds behind one address, for programs without an event loop of their own."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

from sagellm.control_plane.base import EngineKind
from sagellm.control_plane.config import ManagerConfig
from sagellm.control_plane.fleet import Fleet
from sagellm.control_plane.found import run_folder
from sagellm.control_plane.gateway import Gateway
from sagellm.control_plane.lines import RequestLines
from sagellm.control_plane.metrics import GatewayMetrics
from sagellm.control_plane.ray_engine import join_cluster, leave_cluster, made_engine, placed
from sagellm.control_plane.registry import make_router
from sagellm.control_plane.scaler import PoolScaler
from sagellm.core.config import read_model
from sagellm.core.errors import ConfigError, EngineError
from sagellm.core.ports import listen
from sagellm.core.tasks import end_tasks

__all__ = ["ControlPlaneManager"]

logger = logging.getLogger("sagellm.control")

STOP_S = 60.0  # beyond the drain
TURN_S = 0.5


class ControlPlaneManager:
    """Owns engines, the routes to them, and the gateway. All of it runs on an event loop in a thread of its own.

    Use it as a context manager, or call `start` and `stop`. Engines end with the process, also where that is killed.

    Args:
        config: settings; None: those of `settings`, by the names of `ManagerConfig`.
        publish: whether commands and clients of this user find the manager by themselves.

    Attributes:
        url: of the gateway, without /v1.
        control_key: who sends it may start and stop engines over HTTP.
        start_s, stop_s: seconds that the last start and stop took.
    """

    def __init__(self, config: ManagerConfig | None = None, *, publish: bool = True, **settings: Any) -> None:
        self.config = config or read_model(ManagerConfig, None, settings)
        self.url = ""
        self.control_key = secrets.token_hex(16)
        self.start_s = self.stop_s = 0.0
        self._publish = publish
        self._file: Path | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._fleet: Fleet
        self._gateway: Gateway
        self._lines: RequestLines | None = None
        self._has_joined = False  # the Ray cluster

    def start(self) -> "ControlPlaneManager":
        """Open the gateway, and start the engines of the configuration side by side.

        Raises:
            ConfigError: the port is in use, no Ray cluster answers, an invalid setting, or an engine that is not what it
                should be.
            EngineError: an engine cannot start. Nothing is left running.
        """
        if self._loop is not None:
            raise ConfigError("the manager is started already.")
        begun = time.monotonic()
        kinds = {name: self._made(name, spec) for name, spec in self.config.engines.items() if name not in self.config.scaling}
        pools = self._pools(kinds)
        engines = [
            each for name in self.config.engines
            for each in (pools[name].engines() if name in pools else [(name, kinds[name])])
        ]  # fmt: skip
        router = make_router(self.config.router, **self.config.router_options)
        listener = listen(self.config.host, self.config.port)
        try:
            self._has_joined = self.config.ray_address is not None and join_cluster(self.config.ray_address)
            self._lines = RequestLines(self.config.record)
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            self.url = f"http://{host}:{listener.getsockname()[1]}"
            if self._publish:
                self._write_file()
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="sagellm-control", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

            async def start() -> None:
                metrics = GatewayMetrics()
                self._fleet = Fleet(router, metrics, self.config.check_interval_s)
                self._fleet.url = self.url
                self._gateway = Gateway(self._fleet, self.config, listener, self.control_key, self._lines)
                await self._fleet.start()
                await self._gateway.start()

            self._run(start())
            self.start_s = time.monotonic() - begun
            self._fleet.start_s = self.start_s
            self._fleet.metrics.start_s.set(self.start_s)
            self._run(self._fleet.register_all(engines))
            self._fleet.is_started = True
            self._run(self._scale(list(pools.values())))
        except BaseException:
            self.stop()
            listener.close()
            raise
        return self

    def stop(self) -> None:
        """Let requests end for `drain_timeout_s`, then end the gateway and all engines. Does nothing where it is stopped."""
        loop, self._loop = self._loop, None
        begun = time.monotonic()
        if loop is not None:

            async def stop() -> None:
                try:
                    await asyncio.gather(*(pool.stop() for pool in self._fleet.pools.values()))
                    await self._gateway.stop(self.config.drain_timeout_s)
                finally:
                    await self._fleet.stop()
                    await end_tasks()

            with contextlib.suppress(AttributeError):  # it failed before they were made
                asyncio.run_coroutine_threadsafe(stop(), loop).result(self.config.drain_timeout_s + STOP_S)
            loop.call_soon_threadsafe(loop.stop)
            assert self._thread is not None
            self._thread.join()
            loop.close()
            atexit.unregister(self.stop)
            self.stop_s = time.monotonic() - begun
            logger.info("the manager has stopped within %.2f s", self.stop_s)
        if self._has_joined:
            leave_cluster()
            self._has_joined = False
        if self._lines is not None:
            self._lines.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    def register_engine(self, name: str, engine: EngineKind | str, **options: Any) -> dict[str, Any]:
        """Start or attach an engine, and return its status when it serves.

        Args:
            engine: an engine that is not started, or the name of a kind whose options follow.

        Raises:
            ConfigError: the name is taken, an unknown kind or option, a server that is not what it should be.
            EngineError: it cannot start, or cannot be reached.
        """
        ray_address = self.config.ray_address
        made = made_engine(engine, options, ray_address) if isinstance(engine, str) else placed(engine, ray_address)
        return self._run(self._fleet_of().register(name, made)).status()

    def unregister_engine(self, name: str, drain_s: float | None = None) -> None:
        """Let its requests end, then end it. Raises ConfigError: there is no such engine."""
        self._run(self._fleet_of().unregister(name, self.config.drain_timeout_s if drain_s is None else drain_s))

    def drain_engine(self, name: str) -> None:
        """Send it no further request. Raises ConfigError: there is no such engine."""
        fleet = self._fleet_of()

        async def drain() -> None:
            fleet.drain(name)

        self._run(drain())

    def engines(self) -> list[dict[str, Any]]:
        """Return the status of each engine."""
        return self.status()["engines"]

    def health(self) -> dict[str, Any]:
        """Return whether a request could be served, why not, the state of each engine, and the share of healthy checks."""
        fleet = self._fleet_of()

        async def health() -> dict[str, Any]:
            why = await fleet.health()
            states = {one.name: one.state.value for one in fleet.engines.values()}
            return {"healthy": not why, "why": why, "engines": states, "share": fleet.metrics.health_share()}

        return self._run(health())

    def status(self) -> dict[str, Any]:
        """Return engines, models, the router and its last decisions with their reasons."""
        fleet = self._fleet_of()

        async def status() -> dict[str, Any]:
            return fleet.status() | {"url": self.url, "decisions": list(fleet.decisions)}

        return self._run(status())

    def __enter__(self) -> "ControlPlaneManager":
        return self if self._loop is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _made(self, name: str, spec: dict[str, Any]) -> EngineKind:
        spec = dict(spec)
        kind = spec.pop("kind", "sagellm")
        if not isinstance(kind, str):
            raise ConfigError(f"engine {name}: kind is {kind!r}; give a name of `sagellm list engine-kind`.")
        try:
            return made_engine(kind, spec, self.config.ray_address)
        except ConfigError as error:
            raise ConfigError(f"engine {name}: {error}") from error

    def _pools(self, kinds: dict[str, EngineKind]) -> dict[str, PoolScaler]:
        """Raises ConfigError: another engine has a name that a pool gives, or a pool is of a role and its engine no group."""
        pools = {}
        for name, config in self.config.scaling.items():
            if name in self.config.engines:
                pools[name] = PoolScaler(name, functools.partial(self._made, name, self.config.engines[name]), config)
                continue
            engine, _, role = name.rpartition("-")
            group: Any = kinds.get(engine)
            if group is None or not group.is_group:
                raise ConfigError(
                    f"scaling.{name}: {engine} is no engine of the kind group, or is scaled as a whole; name an engine, or "
                    "the role of a group."
                )
            names = [f"{name}-{number}" for number in range(1, group.numbers[role] + 1)]
            pools[name] = PoolScaler(name, functools.partial(group.member, role), config, names, role)
        names = [name for name in self.config.engines if name not in pools]
        names += [name for pool in pools.values() for name in pool.names]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"engine {twice[0]}: a pool gives this name to an engine of its own; choose another one.")
        return pools

    async def _scale(self, pools: list[PoolScaler]) -> None:
        for pool in pools:
            pool.attach(self._fleet, self._lines)
            await pool.start()

    def _fleet_of(self) -> Fleet:
        if self._loop is None:
            raise ConfigError("the manager is not started; call start() first.")
        return self._fleet

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            work.close()
            raise EngineError("the manager has stopped.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        # In turns: a signal that the system gives to another thread does not wake a thread that waits for a lock.
        while not concurrent.futures.wait([future], timeout=TURN_S).done:
            pass
        return future.result()

    def _write_file(self) -> None:
        """Leave the address and the control key where `found` looks, for this user alone."""
        file = run_folder() / f"{self.url.rpartition(':')[2]}.json"
        facts = json.dumps({"url": self.url, "pid": os.getpid(), "control_key": self.control_key})
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.unlink(missing_ok=True)
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
                out.write(facts)
        except OSError as error:
            raise ConfigError(
                f"cannot write {file}, by which commands find the manager: {error.strerror}. Make room, or set XDG_CACHE_HOME "
                "to a folder with some."
            ) from None
        self._file = file
