"""A prefill/decode group: engines of the fleet that compute prompts and tokens for each other, as one engine."""

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from sagellm.comm_backend.control import new_key, read_key
from sagellm.comm_backend.group_info import engine_info
from sagellm.comm_backend.topology import TopologyInfo, TopologyManager
from sagellm.comm_backend.topology.placement import Place, available_cores, place_engines, place_workers
from sagellm.control_plane.base import EngineKind, EngineState, forever
from sagellm.control_plane.child_engine import HOST
from sagellm.control_plane.growth import Growth
from sagellm.control_plane.members import JoiningMember, RoleServer, StartedMember
from sagellm.control_plane.probe import EngineFacts
from sagellm.core.config import ROLES
from sagellm.core.errors import CommError, ConfigError, EngineError, SageError
from sagellm.core.ports import free_ports
from sagellm.core.run_folder import RunFolder
from sagellm.models import find_model, prepare_model
from sagellm.pd.engine import CALL_S
from sagellm.pd.group import SILENT_S, Group
from sagellm.pd.routing import Router, find_policy
from sagellm.pd.tokens import PromptTokens

__all__ = ["PDGroup"]

logger = logging.getLogger("sagellm.control")

FOLDER = "sagellm-pd-"
POLL_S = 0.5
LEAVE_S = 10.0  # for the requests of an engine that leaves
# Set for each engine by its group; a second value would make them another group.
OURS = (
    "--role", "--proxy-url", "--pd-key-file", "--pd-trust-proxy", "--port", "--host", "--json", "--model", "--api-key",
)  # fmt: skip
URL = re.compile(r"https?://[^/\s]+?:\d+")
NOW = ("running", "waiting", "kv_use")  # figures of a moment; the others are sums


class PDGroup(EngineKind):
    """Prompts on some engines, decoding on others. Its engines are engines of the manager, by names such as NAME-decode-1.

    It starts engines, and others join it by its key. With `key_file` it may have only such ones.

    Args:
        model: name, folder, .gguf file or hub id; None: the default model. Without it a group that starts no engine has no
            tokenizer, and routes by load alone.
        prefill, decode, hybrid: how many engines of each role it starts.
        policy: routing policy of the group.
        flags: flags of `sagellm serve` for each engine.
        pin: whether each engine gets cores of its own; not on a cluster.
        silent_s: an engine that answers nothing for so long is started again; longer than its longest step.
        ready_timeout_s: longest time in which the engines get ready and connected.
        key_file: secret of the group, for engines that others start; None: a new one, which the engines of the group get.
        nodes_file: keeps the URLs of engines that have joined. The group attaches them when it is started again.

    Raises:
        ConfigError: no engine decodes, an invalid number, an unknown model, a flag that the group sets, too few cores, or a
            file that cannot be read.
        PolicyError: an unknown policy.
    """

    name = "group"
    is_ours = True
    is_group = True
    engine: ClassVar[Sequence[str]] = (sys.executable, "-m", "sagellm.serve")

    def __init__(
        self, model: str | None = None, prefill: int = 1, decode: int = 1, hybrid: int = 0, policy: str = "pd",
        flags: Sequence[str] = (), pin: bool = False, silent_s: float = SILENT_S, ready_timeout_s: float = 600.0,
        key_file: str | None = None, nodes_file: str | None = None,
    ) -> None:  # fmt: skip
        self.numbers = dict(zip(ROLES, (prefill, decode, hybrid), strict=True))
        for role, num in self.numbers.items():
            if type(num) is not int or not 0 <= num <= 64:
                raise ConfigError(f"{role} is {num!r}; give a number of engines from 0 to 64.")
        if decode + hybrid == 0 and key_file is None:
            raise ConfigError("no engine decodes: decode and hybrid are both 0; give one of them, or key_file for others.")
        if not isinstance(silent_s, int | float) or not 1 <= silent_s <= 86400:
            raise ConfigError(f"silent_s is {silent_s!r}; give seconds from 1 to 86400.")
        self._flags = list(map(str, flags))
        for word in self._flags:
            if (name := word.partition("=")[0]) in OURS:
                raise ConfigError(f"{name} is set for each engine by its group; leave it out.")
        num = sum(self.numbers.values())
        self._source = find_model(None if model is None else Path(model)) if num or model else None
        self._places, self._is_pinned = _places(max(1, num), pin), pin
        self._cluster: Any = None
        self._key, self._has_own_key = (new_key(), True) if key_file is None else (read_key(key_file), False)
        self._nodes_file = None if nodes_file is None else Path(nodes_file)
        self._known = _read_urls(self._nodes_file)
        self._attaching: list[asyncio.Task] = []
        self.router = Router(find_policy(policy))
        self._silent_s, self.ready_timeout_s = silent_s, ready_timeout_s
        self.title = self.name
        self.fleet: Any = None
        self.peers: Group | None = None
        self.tokens: PromptTokens | None = None
        self.key_file = Path(key_file or "")
        self._model, self._folder = Path(), RunFolder(FOLDER)
        self._is_started = False
        self._sums: dict[str, float] = {}
        self._growth = Growth()

    def attach(self, fleet: Any, name: str) -> None:
        super().attach(fleet, name)
        self.fleet, self.title = fleet, name

    def use_cluster(self, cluster: Any) -> None:
        """Start the engines on the nodes of a cluster, a `GroupPlaces`. Raises ConfigError: they are to be pinned."""
        if self._is_pinned:
            raise ConfigError("pin keeps engines on cores of this machine; leave it out where a Ray cluster has them.")
        self._cluster = cluster

    def names(self, role: str) -> list[str]:
        """Return the names of the engines of a role that the group begins with."""
        return [f"{self.title}-{role}-{number}" for number in range(1, self.numbers[role] + 1)]

    def member(self, role: str) -> StartedMember:
        """Return a further engine, which is not started. Its threads are as many as each other one's.

        Raises:
            ConfigError: the group has no model.
        """
        if self._source is None:
            raise ConfigError("a group that starts engines needs a model; give model.")
        return self._member(role, free_ports(1, HOST)[0], self._places[-1], is_further=True)

    async def start(self) -> None:
        """Start the engines side by side, and return when all are connected. Engines of others may join later.

        Raises:
            ConfigError: no tokenizer can be loaded from the model.
            EngineError: an engine cannot start, or refuses another.
        """
        self._is_started = True
        if self._has_own_key:
            self.key_file = self._folder.write_key(self._key)
        else:
            self.fleet.metrics.show_proxy_names(self.fleet)
        if self._source is not None:
            self._model = await asyncio.to_thread(prepare_model, self._source)
        self.peers = Group(self._key, self.fleet.note_change, self._silent_s)
        await self.peers.start()
        begun = [(name, role) for role in ROLES for name in self.names(role)]
        members = []
        for (name, role), port, place in zip(begun, free_ports(len(begun), HOST), self._places[: len(begun)], strict=True):
            members.append((name, self._member(role, port, place)))
        await self.fleet.register_all(members)
        if self._source is None:
            logger.warning("no tokenizer (model): requests are routed by load alone, not by what engines have cached")
        else:
            self.tokens = await asyncio.to_thread(PromptTokens, self._model)  # LMDeploy's parts take seconds to load
        if begun:
            await self._until_connected()
            self.model = next(one.info.model for one in self.peers.engines.values())
        self._attaching = [asyncio.create_task(self._attach(url)) for url in self._known]

    async def stop(self, grace_s: float = 10.0) -> None:
        if not self._is_started:
            return
        for task in self._attaching:
            task.cancel()
        end = time.monotonic() + grace_s
        stops = (self.fleet.unregister(one.name, max(0.0, end - time.monotonic())) for one in self.members())
        await asyncio.gather(*stops, return_exceptions=True)  # one that is stopped already is unknown
        if self.peers is not None:
            await self.peers.close()
        self._folder.remove()
        self._is_started = False

    async def ended(self) -> str:
        return await forever()  # its engines are started again

    async def health(self) -> str:
        return self.lacks()

    def lacks(self) -> str:
        """Return why no request can be served now, or nothing."""
        if self.decoders():
            return ""
        members = self.members()
        states = ", ".join(one.words() for one in members if one.kind.role != "prefill")
        none = "only prefill engines have joined" if members else "no engine has joined"
        return f"no engine of the group decodes: {states or none}."

    def members(self) -> list[Any]:
        """Return the engines of the group, as the fleet has them."""
        return [one for one in self.fleet.engines.values() if one.kind.group == self.title]

    def named(self, words: str) -> str:
        """Return a text with the names of the engines for their URLs."""
        names = {one.kind.url: one.name for one in self.members()}
        return URL.sub(lambda found: names.get(found[0], found[0]), words)

    def decoders(self, model: str | None = None, without: Collection[str] = ()) -> list[str]:
        """Return the URLs of engines that decode a model now; `without`: names of some that do not count."""
        there = [] if self.peers is None else self.peers.decoders(model)
        ready = {one.kind.url for one in self.members() if one.state is EngineState.READY and one.name not in without}
        return [one.url for one in there if one.url in ready]

    async def facts(self) -> EngineFacts:
        """Return the facts of an engine that decodes, with the models of all that do."""
        found = [one for one in self.members() if one.kind.role != "prefill" and one.facts.models]
        if not found:
            return EngineFacts((), ())
        models = tuple(dict.fromkeys(model for one in found for model in one.facts.models))
        tokens = found[0].facts.tokens if len(models) == 1 else None
        return replace(found[0].facts, models=models, tokens=tokens, device=found[0].device)

    async def add(self, url: str) -> None:
        """Let an engine join that others have started. One that has failed is tried again at once.

        Raises:
            SageError: it cannot be reached, or is not who it says it is.
        """
        info = None if self._at(url) else await engine_info(self.fleet.http, url, self.peers.key, CALL_S)
        known = self._at(url)  # it may have come by another way meanwhile
        if known is None:
            await self.fleet.register(self._free_name(info.role), JoiningMember(self, info.role, url))
            self._known[url] = info.role
            self._keep_urls()
        elif not known.kind.is_ours and known.state is not EngineState.READY:
            await self.peers.join(url)
            known.retry()

    async def remove(self, url: str) -> None:
        """Send an engine nothing more: it leaves. One of ours is started again."""
        known = self._at(url)
        if known is None:
            return
        self.peers.dismiss(url, "it has said so")
        if not known.kind.is_ours:
            self._known.pop(url, None)
            self._keep_urls()
            await self.fleet.unregister(known.name, LEAVE_S)

    async def load(self) -> dict[str, float]:
        """Return requests and sums of the engines that decode, each request being on one of these, and the use of all pools."""
        members = self.members()
        loads = {one.name: one.load for one in members if one.kind.role != "prefill"}
        sums = {name: {key: value for key, value in load.items() if key not in NOW} for name, load in loads.items()}
        for name, value in self._growth.more(sums).items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        found = dict(self._sums)
        for name in NOW[:2]:
            if values := [load[name] for load in loads.values() if name in load]:
                found[name] = sum(values)
        blocks = {one.kind.url: engine.facts.num_blocks for one in members if (engine := self.peers.engines.get(one.kind.url))}
        used = [(one.load["kv_use"], blocks[one.kind.url]) for one in members
                if one.kind.url in blocks and "kv_use" in one.load]  # fmt: skip
        if used:
            found["kv_use"] = sum(share * num for share, num in used) / sum(num for _, num in used)
        return found

    def describe(self) -> dict[str, Any]:
        return {"engines": [one.name for one in self.members()], "policy": self.router.policy.name}

    def _at(self, url: str) -> Any:
        return next((one for one in self.members() if one.kind.url == url), None)

    def _free_name(self, role: str) -> str:
        number = 1
        while (name := f"{self.title}-{role}-{number}") in self.fleet.engines:
            number += 1
        return name

    async def _attach(self, url: str) -> None:
        try:
            await self.add(url)
        except SageError as error:
            logger.info("an engine of the group before this one does not join: %s", error)

    def _keep_urls(self) -> None:
        if self._nodes_file is None:
            return
        try:
            self._nodes_file.write_text(json.dumps(self._known))
        except OSError as error:  # no reason to send engines away
            logger.error("cannot write %s, which keeps the URLs of engines: %s", self._nodes_file, error.strerror)

    async def _until_connected(self) -> None:
        """Raises EngineError: an engine refuses another, or it takes too long."""
        end = time.monotonic() + self.ready_timeout_s
        while True:
            engines = self.peers.status()["engines"]
            for one in engines:
                for source, why in one["refused"].items():
                    raise EngineError(self.named(f"{one['engine_id']} does not load from {source}: {why}"))
            num_prefill = sum(one["role"] == "prefill" for one in engines)
            apart = [one["engine_id"] for one in engines if one["role"] != "prefill" and len(one["connected"]) < num_prefill]
            if not apart:
                return
            if time.monotonic() > end:
                raise EngineError(self.named(f"not connected within {self.ready_timeout_s:g} s: {', '.join(apart)}."))
            await self.peers.changed(POLL_S)

    def _member(self, role: str, port: int, place: Place, is_further: bool = False) -> StartedMember:
        """Return an engine of the group. `is_further`: beyond those that it begins with, so that it has no cores of its own."""
        return StartedMember(self, role, partial(self._process, role, port, place, is_further))

    def _process(self, role: str, port: int, place: Place, is_further: bool) -> EngineKind:
        """Return what runs an engine of the group. Raises ConfigError: a node of a cluster cannot reach the manager."""
        flags = ["--model", str(self._model)]
        flags += [] if "--model-name" in self._flags else ["--model-name", self._source.name]
        if "--threads" not in self._flags:  # together no more than there are cores, or all wait for each other
            threads = len(place.cores) // self._places.count(place) if self._cluster is None else self._cluster.threads
            flags += ["--threads", str(max(1, threads))]
        cores = () if is_further or self._cluster is not None else place.cores
        host = HOST if self._cluster is None else self._cluster.host
        gateway = self.fleet.url.replace("//0.0.0.0:", f"//{host}:").replace("//[::]:", f"//{host}:")
        server = RoleServer(role, self.engine, [*flags, *self._flags], self._key, port, cores, gateway)
        server.ready_timeout_s = self.ready_timeout_s
        if self._cluster is None:
            return server
        self._cluster.check_gateway(gateway)
        return self._cluster.place(server, 1 if is_further else sum(self.numbers.values()))


def _places(num: int, pin: bool) -> list[Place]:
    """Place `num` engines by the topology of this machine: on cores of their own with `pin`, else on whole NUMA nodes."""
    cores = available_cores()
    try:
        info = TopologyManager().info
    except CommError:  # no sysfs: the cores are taken for one node
        info = TopologyInfo()
    return place_engines(info, cores, num) if pin else place_workers(info, cores, num)


def _read_urls(file: Path | None) -> dict[str, Any]:
    """Raises ConfigError: it is no JSON object whose keys are URLs."""
    try:
        found = json.loads(file.read_text()) if file is not None and file.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the nodes file {file}: {error}. Remove it, or name another one.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"the nodes file {file} holds no JSON object of URLs. Remove it, or name another one.")
    return found
