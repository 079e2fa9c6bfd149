"""`sagellm pd up`: a proxy and engines on this host, started, watched and ended together."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import aiohttp
from pydantic import Field

from sagellm.comm_backend.config import RENDEZVOUS
from sagellm.comm_backend.control import new_key, sign_request
from sagellm.comm_backend.topology import TopologyInfo, TopologyManager
from sagellm.comm_backend.topology.placement import Place, available_cores, place_engines, place_workers
from sagellm.core.config import Model
from sagellm.core.early import STOP_SIGNALS
from sagellm.core.errors import CommError, ConfigError, EngineError
from sagellm.core.ports import SagePorts, free_ports, listen
from sagellm.core.run_folder import hold, remove_abandoned
from sagellm.models import find_model, prepare_model
from sagellm.pd.child import Child

__all__ = ["UpConfig", "run_up"]

HOST = "127.0.0.1"
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
HEALTHY_S = 10.0  # a process that was ready for so long is started again at once
POLL_S = 0.2
KILL_S = 10.0  # beyond the drain
STILL_S = 10.0  # between two lines of progress


class UpConfig(Model):
    """A group of one host. `serve_flags`: for every engine, as `sagellm serve` takes them. `engine`: the command that starts an
    engine, before its flags; for tests."""

    prefill: int = Field(1, ge=0)
    decode: int = Field(1, ge=0)
    hybrid: int = Field(0, ge=0)
    port: int = Field(SagePorts.proxy, ge=1, le=65535)
    model: Path | None = None
    api_key: tuple[str, ...] = ()
    policy: str = "pd"
    wait_s: float = Field(30.0, ge=0, le=3600)
    silent_s: float = Field(60.0, ge=1, le=86400)
    record: Path | None = None
    pin: bool = False
    no_restart: bool = False
    ready_timeout_s: float = Field(600.0, gt=0)
    drain_timeout_s: float = Field(10.0, ge=0)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    serve_flags: tuple[str, ...] = ()
    engine: tuple[str, ...] = (sys.executable, "-m", "sagellm.serve")


# Set for each engine by this command; a second value would make them another group.
OURS = (
    "--role", "--proxy-url", "--pd-key-file", "--pd-trust-proxy", "--port", "--host", "--json", "--model", "--api-key",
    "--drain-timeout-s",
)  # fmt: skip


def run_up(config: UpConfig, as_json: bool = False) -> int:
    """Until SIGINT or SIGTERM, or until a process ends that is not started again; returns the exit code.

    Raises:
        ConfigError: what can be known before anything is started: port in use, too few engines, an unknown policy, no such
            folder, flags of ours.
        EngineError: a process could not start, in its own words, or an engine refuses another.
    """
    _check(config)
    listener = listen(HOST, config.port)
    run_dir = Path(tempfile.mkdtemp(prefix="sagellm-pd-"))  # mode 700
    hold(run_dir)
    remove_abandoned("sagellm-pd-*")
    try:
        source = find_model(config.model)
        model = prepare_model(source)
        names = () if "--model-name" in config.serve_flags else ("--model-name", source.name)
        key_file = run_dir / "key"
        key_file.touch(0o600)
        key_file.write_bytes(new_key())
        group = _Supervisor(config, listener, key_file, model, names, as_json)
        return asyncio.run(group.run())
    finally:
        listener.close()
        shutil.rmtree(run_dir, ignore_errors=True)


def _check(config: UpConfig) -> None:
    from sagellm.pd.routing import find_policy

    if config.decode + config.hybrid == 0:
        raise ConfigError("no engine decodes: --decode and --hybrid are both 0; give at least one of them.")
    if config.prefill and config.decode + config.hybrid and config.policy == "never-split":
        print("note: with --policy never-split the prefill engines have nothing to do", file=sys.stderr, flush=True)
    find_model(config.model)
    for word in config.serve_flags:
        if (name := word.partition("=")[0]) in OURS:
            raise ConfigError(f"{name} is set for each engine by pd up; leave it out behind --.")
    if config.pin:
        place_engines(TopologyInfo(), available_cores(), config.prefill + config.decode + config.hybrid)
    find_policy(config.policy)


def _places(num: int, pin: bool) -> list[Place]:
    """Place `num` engines by the topology of this machine: on cores of their own with `pin`, else on whole NUMA nodes."""
    cores = available_cores()
    try:
        info = TopologyManager().info
    except CommError:  # no sysfs: the cores are taken for one node
        info = TopologyInfo()
    return place_engines(info, cores, num) if pin else place_workers(info, cores, num)


class _Supervisor:
    def __init__(
        self, config: UpConfig, listener: Any, key_file: Path, model: Path, names: tuple[str, ...], as_json: bool
    ) -> None:
        self._config, self._listener, self._as_json = config, listener, as_json
        self._key = key_file.read_bytes()
        self.url = f"http://{HOST}:{config.port}"
        self._stop = asyncio.Event()
        self._num_stops = 0
        self._is_ready = False
        self._failed: BaseException | None = None
        roles = [role for role in ("prefill", "decode", "hybrid") for _ in range(getattr(config, role))]
        places = _places(len(roles), config.pin)
        keys = [word for key in config.api_key for word in ("--api-key", key)]
        proxy = [sys.executable, "-m", "sagellm.pd", "proxy", "--host", HOST, "--port", str(config.port), "--json",
                 "--listen-fd", str(listener.fileno()), "--pd-key-file", str(key_file), "--model", str(model),
                 "--policy", config.policy, "--wait-s", str(config.wait_s), "--silent-s", str(config.silent_s),
                 "--nodes-file", str(key_file.with_name("nodes.json")), "--log-level",
                 config.log_level, "--drain-timeout-s", str(config.drain_timeout_s), *keys]  # fmt: skip
        if config.record is not None:
            proxy += ["--record", str(config.record)]
        self._proxy = Child("proxy", proxy, pass_fds=[listener.fileno()], say=self._pass_on)
        self._engines: list[Child] = []
        numbers: dict[str, int] = {}
        # The workers of each engine meet at an address of their own, also where ours was started with one.
        env = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
        for role, port, place in zip(roles, free_ports(len(roles), HOST), places, strict=True):
            number = numbers[role] = numbers.get(role, -1) + 1
            flags = ["--role", role, "--proxy-url", self.url, "--pd-key-file", str(key_file), "--host", HOST, "--port",
                     str(port), "--json", "--model", str(model), *names, "--drain-timeout-s",
                     str(config.drain_timeout_s), *keys]  # fmt: skip
            if "--threads" not in config.serve_flags:  # together no more than there are cores, or all wait for each other
                flags += ["--threads", str(max(1, len(place.cores) // places.count(place)))]
            command = [*config.engine, *flags, *config.serve_flags]
            self._engines.append(Child(f"{role}{number}", command, cores=place.cores, env=env, say=self._pass_on))
            if len(place.cores) < len(available_cores()):
                self._say(f"{role}{number}: {place}")

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        watchers: list[asyncio.Task] = []
        try:
            for child in self._children:
                await self._start(child)
                watchers.append(asyncio.create_task(self._watch(child)))
            starting = asyncio.create_task(self._until_ready())
            stopping = asyncio.create_task(self._stop.wait())
            watchers += [starting, stopping]
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                await starting  # raises where it could not be done
                self._is_ready = True
                self._announce(starting.result())
                await self._stop.wait()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await self._end()
        if self._failed is not None:
            if not self._is_ready:
                raise self._failed
            print(f"error: {self._failed}", file=sys.stderr, flush=True)
            return 1
        return 0

    @property
    def _children(self) -> list[Child]:
        return [self._proxy, *self._engines]

    def _on_signal(self) -> None:
        self._num_stops += 1
        if self._num_stops > 1:  # somebody is in a hurry
            for child in self._children:
                child.kill()
        self._stop.set()

    def _fail(self, error: BaseException) -> None:
        if self._failed is None:
            self._failed = error
        self._stop.set()

    async def _start(self, child: Child) -> None:
        try:
            await child.start()
        except EngineError as error:
            raise EngineError(f"{child.name} could not start: {error}") from error

    async def _watch(self, child: Child) -> None:
        """Start it again when it ends, later each time; before the group is ready, or with --no-restart, that is the end."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            code = await child.wait()
            words = child.words(code)
            if not self._is_ready:
                self._fail(EngineError(f"{child.name} could not start: {words}"))
                return
            if self._config.no_restart:
                self._fail(EngineError(f"{child.name} has gone: {words}"))
                return
            if child.served_s > HEALTHY_S:  # it was killed, say; what ends at its start would end there again
                backoff_s = FIRST_BACKOFF_S
            self._say(f"{child.name} has gone: {words} It is started again in {backoff_s:g} s")
            is_started = False
            while not is_started:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                try:
                    await child.start()
                    is_started = True
                except EngineError as error:  # the machine is short of processes or memory, which passes
                    self._say(f"{child.name}: {error} It is tried again in {backoff_s:g} s")

    async def _until_ready(self) -> dict[str, Any]:
        """Raises EngineError: an engine refuses another, or it takes too long."""
        begun, said = time.monotonic(), 0.0
        for child in self._children:
            self._say(f"{child.name}: starting, process {child.pid}")
        waiting = {child.name for child in self._children}
        models: set[str] = set()
        async with aiohttp.ClientSession() as http:
            while True:
                for child in self._children:
                    if child.name in waiting and child.ready.done() and (ready := child.ready.result()) is not None:
                        waiting.discard(child.name)
                        models.update([ready["model"]] if "model" in ready else [])
                        self._say(f"{child.name}: ready at {ready['url']}")
                missing = "ready: " + ", ".join(sorted(waiting))
                if not waiting:
                    missing = await self._missing(http)
                    if not missing:
                        return {"model": min(models, default="")}
                spent_s = time.monotonic() - begun
                if spent_s > self._config.ready_timeout_s:
                    raise EngineError(f"not ready within {self._config.ready_timeout_s:g} s; not yet {missing}.")
                if spent_s - said > STILL_S:
                    said = spent_s
                    self._say(f"{spent_s:.0f} s; not yet {missing}")
                await asyncio.sleep(POLL_S)

    async def _missing(self, http: aiohttp.ClientSession) -> str:
        """Engines that the proxy does not see yet. Raises EngineError: an engine refuses another."""
        path = "/pd/status"
        try:
            headers = sign_request(self._key, "GET", path, b"")
            async with http.get(self.url + path, headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as answer:
                if answer.status != 200:
                    raise EngineError(f"the proxy answers {answer.status} to {path}: {(await answer.text())[:200]}")
                found = (await answer.json())["engines"]
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            return f"reachable: the proxy ({error or type(error).__name__})"
        for one in found:
            for source, why in one["refused"].items():
                raise EngineError(f"{one['engine_id']} does not load from {source}: {why}")
        if len(found) < len(self._engines):
            return f"joined: {len(self._engines) - len(found)} of {len(self._engines)} engines"
        apart = [one["engine_id"] for one in found if one["role"] != "prefill" and len(one["connected"]) < self._config.prefill]
        return f"connected: {', '.join(apart)}" if apart else ""

    def _announce(self, facts: dict[str, Any]) -> None:
        engines = [{"name": one.name, "pid": one.pid, "url": one.ready.result()["url"]} for one in self._engines]
        if self._as_json:
            line = {"ready": True, "url": f"{self.url}/v1", "model": facts["model"], "pid": os.getpid()}
            print(json.dumps(line | {"proxy_pid": self._proxy.pid, "engines": engines}), flush=True)
            return
        key = " -H 'Authorization: Bearer KEY'" if self._config.api_key else ""
        message = [{"role": "user", "content": "Write a function `add`."}]
        body = json.dumps({"model": facts["model"], "stream": True, "messages": message})
        url = f"{self.url}/v1"
        print(f"\nReady: {facts['model']} at {url}, {len(engines)} engines, policy {self._config.policy}")
        print(f"Try:\n  curl -N {url}/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n", flush=True)

    async def _end(self) -> None:
        """The proxy first, so that running requests can end; then the engines."""
        self._listener.close()
        grace_s = self._config.drain_timeout_s + KILL_S if self._is_ready and self._num_stops < 2 else KILL_S
        if self._proxy.is_running:
            self._say("ending: the proxy, when its requests are done")
        await self._proxy.end(grace_s)
        await asyncio.gather(*(child.end(grace_s) for child in self._engines))

    def _pass_on(self, line: str) -> None:
        with contextlib.suppress(OSError):  # its reader may be gone
            print(line, file=sys.stderr, flush=True)

    def _say(self, line: str) -> None:
        self._pass_on(f"pd up: {line}")
