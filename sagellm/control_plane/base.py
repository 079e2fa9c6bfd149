"""The contracts of the control plane: services, kinds of engines, and routers."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import aiohttp

from sagellm.control_plane import probe
from sagellm.control_plane.probe import EngineFacts
from sagellm.core.devices import NO_REPORT
from sagellm.core.enums import StrEnum
from sagellm.core.service import NOTHING_ASKED, ServiceRequest
from sagellm.pd import base as pd

__all__ = ["BaseService", "EngineKind", "EngineState", "EngineView", "RouteChoice", "RouteRequest", "Router"]


class EngineState(StrEnum):
    """`failed`: it has ended or does not answer, and is tried again after a pause; `restarting`: that is happening."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    RESTARTING = "restarting"


class BaseService(ABC):
    """A manager's engines, its gateway and each engine are started, asked and ended in the same way."""

    @abstractmethod
    async def start(self) -> None:
        """Return when it serves. Raises SageError: it cannot, in words for the user."""

    @abstractmethod
    async def stop(self, grace_s: float = 10.0) -> None:
        """End it, by force after `grace_s` seconds. It may be started again."""

    @abstractmethod
    async def health(self) -> str:
        """Return why it does not serve, or nothing."""


class EngineKind(BaseService):
    """One engine behind an OpenAI server: how it is started or reached, asked and ended.

    A subclass is built with options and starts nothing before `start`. `start` may be called again after `stop`, and after
    the engine has ended by itself.

    Attributes:
        name: of the kind.
        url: of the server, without /v1; empty before the first start.
        model: name of a model that the server must have; None: whatever it has.
        device: type of its device; empty where it is not known.
        api_key: key that the server wants.
        metrics: our name of a figure -> name of the sample in the server's /metrics.
        is_ours: whether it is a process below the manager.
    """

    name: ClassVar[str]
    url: str = ""
    model: str | None = None
    device: str = ""
    api_key: str | None = None
    metrics: ClassVar[Mapping[str, str]] = {}
    is_ours: ClassVar[bool] = False
    http: aiohttp.ClientSession  # the manager's; set before `start`

    @abstractmethod
    async def ended(self) -> str:
        """Wait until the engine has ended by itself, and return why. An engine of others is waited for without end."""

    async def health(self) -> str:
        """Raises asyncio.TimeoutError: it does not answer, though it can be reached."""
        return await probe.health(self.http, self.url, self.api_key)

    async def facts(self) -> EngineFacts:
        """Ask the server for its abilities. Raises ConfigError: it is no OpenAI server."""
        return await probe.facts(self.http, self.url, self.api_key)

    async def load(self) -> dict[str, float]:
        """Return figures of `metrics`: running, waiting, kv_use."""
        return await probe.load(self.http, self.url, self.metrics)

    def describe(self) -> dict[str, Any]:
        """Return facts for `status` beside those that every engine has."""
        return {}


async def forever() -> str:
    """`EngineKind.ended` of an engine that is not ours."""
    await asyncio.get_running_loop().create_future()
    return ""


@dataclass(frozen=True, slots=True)
class RouteRequest(pd.RouteRequest):
    """A request, as a router sees it. `num_tokens` is a guess from the length of the prompt.

    Attributes:
        model: name of the model.
        path: of the API.
        service: the client's wishes: priority, tenant, deadline, targets.
        prompt: bytes of the prompt, in the order in which engines cache it.
    """

    model: str = ""
    path: str = "/v1/chat/completions"
    service: ServiceRequest = NOTHING_ASKED
    prompt: bytes = b""


@dataclass(frozen=True, slots=True)
class EngineView(pd.EngineView):
    """An engine at this moment. `engine_id` is its name in the manager; `role` is hybrid.

    Attributes:
        kind: name of its `EngineKind`.
        device: type of its device; empty where it is not known.
        num_running: requests that the gateway has sent there and that are not answered yet.
        num_waiting: requests that wait in the engine, as it last said.
        kv_use: share of its KV pool in use, as it last said; None: it does not say.
    """

    kind: str = ""
    device: str = ""
    num_waiting: int = 0
    kv_use: float | None = None

    @property
    def is_checked(self) -> bool:
        """Whether its device can be relied on: one that a package brings has passed its check."""
        return NO_REPORT not in self.capabilities.missing

    @property
    def queue(self) -> tuple[int, float, str]:
        """Orders engines by load; the name decides among equals."""
        return self.num_running + self.num_waiting, self.kv_use or 0.0, self.engine_id


class RouteChoice(NamedTuple):
    """`reason`: a few words that are the same for each choice of the kind; `detail`: its figures."""

    engine: str
    reason: str
    detail: str = ""


class Router(ABC):
    """Chooses the engine of a request. It is called on the event loop of the gateway: one that waits holds up all requests.

    A router that raises, or names an engine that it was not offered, is replaced by `least-load`, with one line in the log.
    """

    name: ClassVar[str]

    @abstractmethod
    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> RouteChoice:
        """`engines`: at least one; each serves the model and the path of the request."""

    def forget(self, engine: str) -> None:  # noqa: B027
        """The engine has ended, and all that it had cached with it."""
