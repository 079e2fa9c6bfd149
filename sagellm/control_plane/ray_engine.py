"""An engine whose process runs on a node of a Ray cluster, below an actor."""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from sagellm.comm_backend.config import NODES_WAIT_S, check_ray_address
from sagellm.control_plane.base import EngineKind
from sagellm.control_plane.child_engine import ChildEngine
from sagellm.control_plane.embedded_engine import EmbeddedEngine
from sagellm.control_plane.kinds.sagellm import SageLLM
from sagellm.control_plane.registry import make_engine
from sagellm.core.errors import ConfigError, EngineError, SageError
from sagellm.core.ports import is_loopback
from sagellm.core.tasks import within

__all__ = ["GroupPlaces", "RayEngine", "join_cluster", "leave_cluster", "made_engine", "placed"]

POLL_S = 0.5
ANSWER_S = 5.0  # for an actor that lives; the node of another one may be lost


def join_cluster(address: str) -> bool:
    """Make this process a driver of the cluster. Returns False if it is one already.

    Args:
        address: host:port of the head, or auto.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, or this machine is not a node of it.
    """
    check_ray_address(address, "ray_address")
    import ray

    if ray.is_initialized():
        return False
    try:
        # On the main thread Ray would take SIGTERM for itself.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(ray.init, address, log_to_driver=False, logging_level=logging.ERROR).result()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"this machine cannot join the Ray cluster at {address}: {_one_line(error)}. Make it a node first: ray start "
            "--address HOST:PORT."
        ) from None
    return True


def leave_cluster() -> None:
    """Be no driver any more: Ray ends what this process has placed."""
    import ray

    ray.shutdown()


def made_engine(kind: str, options: Mapping[str, Any], ray_address: str | None) -> EngineKind:
    """Return an engine that is not started: in the manager's process, or placed as `placed` does.

    Args:
        options: of the kind, `resources`, and `place`.

    Raises:
        ConfigError: unknown kind, option or place, or an invalid value.
    """
    options = dict(options)
    resources, place = options.pop("resources", None), options.pop("place", "process")
    engine = make_engine(kind, **options)
    if place == "process":
        return placed(engine, ray_address, resources)
    if place != "manager":
        raise ConfigError(f"place is {place!r}; allowed are process and manager.")
    if not isinstance(engine, SageLLM) or resources is not None:
        what = "resources" if isinstance(engine, SageLLM) else f"the kind {engine.name}"
        raise ConfigError(f"place manager is not for {what}: it is an engine of the kind sagellm, in the manager's process.")
    return EmbeddedEngine(engine)


def placed(engine: EngineKind, ray_address: str | None, resources: Any = None) -> EngineKind:
    """Return an engine that runs on the cluster if there is one and the engine is a process or a group; else the engine itself.

    Args:
        resources: name -> amount that the engine, or each one of a group, needs of one node; None: those that it names itself.

    Raises:
        ConfigError: resources without a cluster, for an engine of others, or with an invalid amount.
    """
    if ray_address is not None and engine.is_group:
        engine.use_cluster(GroupPlaces(None if resources is None else _checked(resources)))
        return engine
    if ray_address is not None and isinstance(engine, ChildEngine):
        return RayEngine(engine, engine.resources() if resources is None else _checked(resources))
    if resources is not None:
        why = "needs a ray_address" if ray_address is None else f"is not for the kind {engine.name}, which is placed nowhere"
        raise ConfigError(f"resources {why}; leave it out, or change that.")
    return engine


def _checked(resources: Any) -> dict[str, float]:
    is_good = isinstance(resources, dict) and all(
        isinstance(name, str) and name and isinstance(amount, (int, float)) and 0 < amount < 1e9
        and (amount < 1 or amount == int(amount))
        for name, amount in resources.items()
    )  # fmt: skip
    if not is_good or not resources:
        raise ConfigError(
            f"resources is {resources!r}; give names and amounts, such as {{CPU: 4, GPU: 1}}. An amount is a whole number, or "
            "between 0 and 1."
        )
    return dict(resources)


class GroupPlaces:
    """The places of a prefill/decode group on the cluster.

    Ray reserves those of its first engines together, all or none, on as few nodes as it can: they send each other KV blocks.

    Args:
        resources: of each engine, name -> amount; None: those that it names itself.

    Attributes:
        count: of the engines that are placed together.
    """

    def __init__(self, resources: Mapping[str, float] | None) -> None:
        self._resources = resources
        self._group: Any = None
        self._free: list[int] = []
        self.count = 0

    @property
    def threads(self) -> int:
        """Threads of an engine that is given none."""
        return int((self._resources or {}).get("CPU", 1))

    @property
    def host(self) -> str:
        """Return the address of this machine in the cluster."""
        import ray

        return ray.util.get_node_ip_address()

    def check_gateway(self, url: str) -> None:
        """Raise ConfigError if the nodes of other machines cannot reach the gateway."""
        if is_loopback(urlsplit(url).hostname or "") and not is_loopback(self.host):
            raise ConfigError(
                f"engines of a group on a Ray cluster report to the gateway at {url}, which other machines cannot reach. Give "
                f"host: {self.host}, or 0.0.0.0."
            )

    def place(self, server: ChildEngine, count: int) -> "RayEngine":
        """Return an engine on the cluster. `count`: of those that are placed together."""
        resources = server.resources() if self._resources is None else self._resources
        self.count = max(self.count, count)
        return RayEngine(server, resources, self if count > 1 else None)

    def take(self, needs: Mapping[str, float]) -> tuple[Any, int]:
        """Return Ray's placement group, and the number of a bundle in it, which is kept until `give_back`."""
        if self._group is None:
            self._group, self._free = _reserve(needs, self.count, "PACK"), list(range(self.count))
        return self._group, self._free.pop(0)

    def give_back(self, bundle: int) -> Any:
        """Return the placement group if none of its bundles is in use any more; it is to be removed then."""
        self._free.append(bundle)
        if len(self._free) < self.count:
            return None
        group, self._group = self._group, None
        return group


class RayEngine(EngineKind):
    """Places the process of another kind, and attaches to it by its URL.

    Ray reserves the resources on one node, as a placement group, and starts an actor there, which starts the process. If the
    node is lost, Ray starts the actor on another one. Group, actor and process end with the manager, also where it is killed.

    Args:
        engine: not started; the actor gets a copy of it.
        resources: name -> amount, all of one node.
        places: of the group that it is placed with; None: it is placed alone.
    """

    is_ours = True

    def __init__(self, engine: ChildEngine, resources: Mapping[str, float], places: GroupPlaces | None = None) -> None:
        self.name, self.model, self.device, self.metrics = engine.name, engine.model, engine.device, engine.metrics
        if not engine.is_local:  # it listens where others than the gateway may reach it
            self.api_key = engine.api_key = secrets.token_hex(16)
        engine.num_cpus = max(1, int(resources.get("CPU", 1)))
        self._engine, self._resources, self._places = engine, dict(resources), places
        self._group: Any = None
        self._bundle = 0  # of this engine in the placement group
        self._actor: Any = None
        self._facts: dict[str, Any] = {}

    def take_feed_key(self, key: bytes) -> None:
        self._engine.take_feed_key(key)
        self.feed_key = self._engine.feed_key

    def model_folder(self) -> Path | None:
        return self._engine.model_folder()

    async def start(self) -> None:
        """Raises EngineError if no node has the resources free within `NODES_WAIT_S`."""
        try:
            if self._actor is None:
                await self._place()
            await self._reach()
            found = await self._started()
        except SageError:
            await self._release()
            raise
        self.url, self.model, self.device, self._facts = found.pop("url"), found.pop("model"), found.pop("device"), found

    async def stop(self, grace_s: float = 10.0) -> None:
        await self._end_process(grace_s)
        await self._release()

    async def reset(self) -> None:
        """End the process. The place is kept, and if its node is lost, Ray finds another one."""
        await self._end_process(0.0)

    async def ended(self) -> str:
        from ray.exceptions import RayError

        try:
            return await self._actor.ended.remote()
        except RayError as error:
            return f"node {self.node}, or its actor there, is lost ({type(error).__name__})."

    def describe(self) -> dict[str, Any]:
        return {"pid": self._facts.get("pid")}

    async def _place(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self._resources | (_own_node() if self._engine.is_local else {})
        end_s = time.monotonic() + NODES_WAIT_S
        # All in one bundle: Ray lets a process see the accelerators of its own bundle alone.
        if self._places is None:
            self._group, self._bundle = _reserve(needs, 1, "STRICT_PACK"), 0
        else:
            self._group, self._bundle = self._places.take(needs)
        while not await asyncio.to_thread(self._group.wait, 1):
            if time.monotonic() > end_s:
                raise EngineError(self._no_room(needs))
        others = {name: amount for name, amount in self._resources.items() if name not in ("CPU", "GPU", "memory")}
        self._actor = ray.remote(_Place).options(
            num_cpus=self._resources.get("CPU", 0), num_gpus=self._resources.get("GPU", 0),
            memory=self._resources.get("memory"), resources=others, max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, self._bundle),
        ).remote(self._engine, "GPU" in self._resources, os.getcwd())  # fmt: skip

    async def _reach(self) -> None:
        """Wait until the actor runs on a node."""
        from ray.exceptions import RayActorError

        end_s = time.monotonic() + NODES_WAIT_S
        while True:
            try:
                self.node = await within(self._actor.node.remote(), max(0.0, end_s - time.monotonic()))
                return
            except RayActorError as error:  # its node is lost, and Ray has no other one yet
                if error.actor_init_failed:
                    raise EngineError(f"a node of the cluster cannot run it: {_one_line(error)}") from None
            except asyncio.TimeoutError:
                pass
            if time.monotonic() > end_s:
                has_room = await asyncio.to_thread(self._group.wait, 0)
                silent = f"its actor has a place, and does not answer within {NODES_WAIT_S:g} s; Ray's log says more."
                raise EngineError(silent if has_room else self._no_room(self._resources))
            await asyncio.sleep(POLL_S)

    async def _started(self) -> dict[str, Any]:
        from ray.exceptions import RayError, RayTaskError

        try:
            return await self._actor.start.remote()
        except RayTaskError as error:
            if isinstance(error.cause, SageError):
                raise error.cause from None
            raise EngineError(f"on node {self.node}: {error.cause!r}") from None
        except RayError as error:
            raise EngineError(f"node {self.node} was lost while it started ({type(error).__name__}).") from None

    async def _end_process(self, grace_s: float) -> None:
        from ray.exceptions import RayError

        if self._actor is not None:
            with contextlib.suppress(RayError, asyncio.TimeoutError):
                await within(self._actor.stop.remote(grace_s), grace_s + ANSWER_S)

    async def _release(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        actor, group, self._actor, self._group = self._actor, self._group, None, None
        if group is not None and self._places is not None:
            group = self._places.give_back(self._bundle)
        self.node, self._facts = "", {}
        for end, one in ((ray.kill, actor), (remove_placement_group, group)):
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                if one is not None:
                    await asyncio.to_thread(end, one)


    def _no_room(self, needs: Mapping[str, float]) -> str:
        return _no_room(needs, 1 if self._places is None else self._places.count)


class _Place:
    """Actor: runs the engine's process on its node, in the manager's folder if it has one. The process ends with it."""

    def __init__(self, engine: ChildEngine, has_gpu: bool, folder: str) -> None:
        import ray

        with contextlib.suppress(OSError):
            os.chdir(folder)
        logging.basicConfig(level=logging.INFO)  # lines of the process go to Ray's log of this actor
        self._engine = engine
        self._node = ray.util.get_node_ip_address()
        self._starting: asyncio.Task[None] | None = None
        if not engine.is_local:
            engine.host = self._node
        if not has_gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or the device auto would take one that is another engine's

    async def node(self) -> str:
        return self._node

    async def start(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as self._engine.http:
            self._starting = asyncio.create_task(self._engine.start())
            await self._starting
        return {"url": self._engine.url, "model": self._engine.model, "device": self._engine.device, **self._engine.describe()}

    async def ended(self) -> str:
        return await self._engine.ended()

    async def stop(self, grace_s: float) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        await self._engine.stop(grace_s)


def _own_node() -> dict[str, float]:
    """Return a resource that this machine alone has."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    (found,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == own)
    return {name: 0.001 for name in found if name.startswith("node:") and "__" not in name}


def _reserve(needs: Mapping[str, float], count: int, strategy: str) -> Any:
    """Return a placement group of Ray with so many equal bundles, for which it looks for nodes."""
    from ray.util.placement_group import placement_group

    return placement_group([dict(needs)] * count, strategy=strategy)


def _no_room(needs: Mapping[str, float], count: int = 1) -> str:
    """Return the error. `count`: of the engines that need this and are placed together."""
    import ray

    def words(resources: Mapping[str, float]) -> str:
        shown = {name: amount for name, amount in resources.items() if name in needs or "CPU" in name or "GPU" in name}
        return ", ".join(f"{name} {amount:g}" for name, amount in sorted(shown.items())) or "nothing of that"

    nodes = "; ".join(f"{node['NodeManagerAddress']} with {words(node['Resources'])}" for node in ray.nodes() if node["Alive"])
    wanted = f"no node of the Ray cluster had {words(needs)} free"
    if count > 1:
        wanted = f"the nodes of the Ray cluster had no {count} times {words(needs)} free"
    return (
        f"{wanted} within {NODES_WAIT_S:g} s. There are {nodes}; free in all are "
        f"{words(ray.available_resources())}. Start a node with `ray start --address HOST:PORT`, stop an engine, or lower "
        "`resources` of this one."
    )


def _one_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1].strip().rstrip(".") if str(error).strip() else type(error).__name__
