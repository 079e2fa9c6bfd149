"""The contracts of the control plane: services, kinds of engines, routers, and scaling policies."""

import asyncio
import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import aiohttp

from sagellm.control_plane import probe
from sagellm.control_plane.probe import EngineFacts
from sagellm.core.devices import NO_REPORT
from sagellm.core.enums import StrEnum
from sagellm.core.service import NOTHING_ASKED, ServiceRequest
from sagellm.pd import base as pd
from sagellm.pd.answers import Ending

__all__ = [
    "BaseService", "CachedPrompt", "Candidates", "EngineKind", "EngineState", "EngineView", "PoolView", "Queue", "RouteChoice",
    "RouteRequest", "Router", "ScalingDecision", "ScalingPolicy", "totals",
]  # fmt: skip


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
        metrics: our name of a figure -> name of the sample in the server's /metrics. Scaling needs those of `totals`.
        is_ours: whether the manager starts it.
        is_group: whether it consists of engines of the fleet; it starts them, and routes its requests to them.
        group: name of the group that it is an engine of; empty where it is on its own.
        role: phase that it computes: hybrid, prefill or decode.
        node: address of the node of a cluster that it runs on; empty where it was not placed.
        feed_key: key by which the engine tells which prefixes it has cached; None: it does not.
    """

    name: ClassVar[str]
    url: str = ""
    model: str | None = None
    device: str = ""
    api_key: str | None = None
    metrics: ClassVar[Mapping[str, str]] = {}
    is_ours: ClassVar[bool] = False
    is_group: ClassVar[bool] = False
    group: str = ""
    role: str = "hybrid"
    node: str = ""
    feed_key: bytes | None = None
    http: aiohttp.ClientSession  # the manager's; set before `start`

    def attach(self, fleet: Any, name: str) -> None:
        """Take what the engine needs of its `Fleet`, in which it has this name. Called before `start`."""
        self.http = fleet.http
        if fleet.prefixes is not None:
            self.take_feed_key(fleet.prefixes.key)

    def take_feed_key(self, key: bytes) -> None:
        """Tell which prefixes the engine has cached, by this key, if it can. Then set `feed_key`."""

    def ending(self) -> Ending:
        """Return the event that ends the requests of the engine, after each start."""
        return Ending()

    async def reset(self) -> None:
        """End what is left of an engine that has failed, before it is started again."""
        await self.stop(0.0)

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

    def model_folder(self) -> Path | None:
        """Return where the tokenizer of its model is; None: not on this machine. Called in a thread, after the start."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return facts for `status` beside those that every engine has."""
        return {}


def totals(prefix: str) -> dict[str, str]:
    """Return our names of the sums since the start, which scaling reads, as LMDeploy and vLLM name their samples.

    Requests that ended, their tokens and their seconds from the first token to the last; first tokens, and seconds until them.
    """
    names = {
        "ended": "request_generation_tokens_count", "prompt_tokens": "request_prompt_tokens_sum",
        "output_tokens": "request_generation_tokens_sum", "decode_s": "request_decode_time_seconds_sum",
        "first_tokens": "time_to_first_token_seconds_count", "first_token_s": "time_to_first_token_seconds_sum",
    }  # fmt: skip
    return {name: f"{prefix}:{sample}" for name, sample in names.items()}


async def forever() -> str:
    """`EngineKind.ended` of an engine that is not ours."""
    await asyncio.get_running_loop().create_future()
    return ""


class CachedPrompt(ABC):
    """Cached beginnings of one prompt on all engines, as their events tell. `num_tokens`: of the prompt."""

    num_tokens: int

    @abstractmethod
    def tokens_on(self, engine: str) -> int | None:
        """Return how many of the first tokens an engine has cached; None: it does not tell."""

    @abstractmethod
    def longest(self, among: "Candidates") -> tuple[int, str, bool]:
        """Return how many of the first tokens an engine has, of those with most of them the one with the least load, and
        whether they are cached. The name is empty if no engine has any.

        Tokens count from when a request with them goes to an engine, since its events come later; they are not cached then.
        """

    @abstractmethod
    def sent(self, engine: str) -> None:
        """The request goes to the engine. The fleet calls it, and `ended`."""

    @abstractmethod
    def ended(self, engine: str) -> None:
        """The request has left the engine."""


@dataclass(frozen=True, slots=True)
class RouteRequest(pd.RouteRequest):
    """A request, as a router sees it. `num_tokens` is a guess from the length of the prompt.

    Attributes:
        model: name of the model.
        path: of the API.
        service: the client's wishes: priority, tenant, deadline, targets.
        prompt: bytes of the prompt, in the order in which engines cache it.
        cached: what engines have cached of it; None: the router does not ask, or the model's tokenizer is not known here.
    """

    model: str = ""
    path: str = "/v1/chat/completions"
    service: ServiceRequest = NOTHING_ASKED
    prompt: bytes = b""
    cached: CachedPrompt | None = None


@dataclass(frozen=True, slots=True)
class EngineView(pd.EngineView):
    """An engine at this moment. `engine_id` is its name in the manager; `role` is hybrid.

    Attributes:
        kind: name of its `EngineKind`.
        device: type of its device; empty where it is not known.
        num_running: requests that the gateway has sent there and that are not answered yet.
        num_waiting: requests that wait in the engine, as it last said.
        kv_use: share of its KV pool in use, as it last said; None: it does not say.
        num_sent: requests that it was sent so far.
        cached_tokens: of this request's prompt, as the engine's events tell; None: it does not tell, or `cached` is None.
    """

    cached_tokens: int | None = None
    kind: str = ""
    device: str = ""
    num_waiting: int = 0
    kv_use: float | None = None
    num_sent: int = 0

    @property
    def is_checked(self) -> bool:
        """Whether its device can be relied on: one that a package brings has passed its check."""
        return NO_REPORT not in self.capabilities.missing

    @property
    def queue(self) -> "Queue":
        """Orders engines by load; among equals the one that was sent least comes first."""
        return self.num_running + self.num_waiting, self.kv_use or 0.0, self.num_sent, self.engine_id


Queue = tuple[int, float, int, str]  # requests there, share of the KV pool in use, requests sent so far, name


class Candidates(Sequence[EngineView]):
    """The engines that may take a request, in the order of their names. Views are made when they are asked for, and the engine
    with the least load is known at once, however many there are.

    Args:
        engines: name -> engine.
        view: makes the view of an engine.
        queue: `EngineView.queue` of an engine. Call `note` after each change of it.
    """

    def __init__(self, engines: Mapping[str, Any], view: Callable[[Any], EngineView], queue: Callable[[Any], Queue]) -> None:
        self._engines, self._view, self._queue = engines, view, queue
        self.names = sorted(engines)
        self._queues = {name: queue(engine) for name, engine in engines.items()}
        self._heap: list[Queue] = []  # has the queue of each engine, and some that were true before
        self._sort()

    def seen_by(self, view: Callable[[Any], EngineView]) -> "Candidates":
        """Return the same engines, with another view of them."""
        other = Candidates.__new__(Candidates)  # which `copy.copy` takes four times as long for
        vars(other).update(vars(self), _view=view)
        return other

    @classmethod
    def of(cls, engines: Sequence[EngineView]) -> "Candidates":
        """Return the same engines."""
        if isinstance(engines, cls):
            return engines
        return cls({one.engine_id: one for one in engines}, lambda one: one, lambda one: one.queue)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self.view(name) for name in self.names[place]]
        return self.view(self.names[place])

    def has(self, name: str) -> bool:
        return name in self._engines

    def view(self, name: str) -> EngineView:
        return self._view(self._engines[name])

    def queue(self, name: str) -> Queue:
        """Return `EngineView.queue` of an engine, without its view."""
        return self._queues[name]

    def note(self, name: str) -> None:
        """The queue of an engine has changed."""
        if (engine := self._engines.get(name)) is not None:
            self._queues[name] = queue = self._queue(engine)
            heapq.heappush(self._heap, queue)
            if len(self._heap) > 4 * len(self._engines) + 64:
                self._sort()

    def least(self) -> EngineView:
        """Return the engine with the least load."""
        return self.view(self.least_name())

    def least_name(self) -> str:
        """Return the name of the engine with the least load. A view of it takes longer."""
        heap, queues = self._heap, self._queues
        while queues[heap[0][-1]] is not heap[0]:
            heapq.heappop(heap)
        return heap[0][-1]

    def without(self, names: Collection[str]) -> "Candidates":
        left = {name: engine for name, engine in self._engines.items() if name not in names}
        return Candidates(left, self._view, self._queue)

    def _sort(self) -> None:
        self._heap[:] = self._queues.values()
        heapq.heapify(self._heap)


class RouteChoice(NamedTuple):
    """`reason`: a few words that are the same for each choice of the kind; `detail`: its figures."""

    engine: str
    reason: str
    detail: str = ""


class Router(ABC):
    """Chooses the engine of a request. It is called on the event loop of the gateway: one that waits holds up all requests.

    A router that raises, or names an engine that it was not offered, is replaced by `least-load`, with one line in the log.

    Attributes:
        reads_caches: whether it uses `RouteRequest.cached`. Engines tell what they have cached only then.
    """

    name: ClassVar[str]
    reads_caches: ClassVar[bool] = False

    @abstractmethod
    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> RouteChoice:
        """Return the engine of a request.

        Args:
            engines: at least one; each serves the model and the path of the request. `Candidates.of(engines)` knows the one
                with the least load without a look at all of them.
        """

    def forget(self, engine: str) -> None:  # noqa: B027
        """The engine has ended, and all that it had cached with it."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool of equal engines at the end of an interval, as a scaling policy sees it.

    Attributes:
        now_s: seconds since the pool began.
        interval_s: length of the interval that the figures are of.
        rate: requests that arrived in a second.
        num_ended: requests that ended in the interval; the means below are of these.
        prompt_tokens, output_tokens: mean of a request; None where none ended, or the engines do not tell.
        itl_s: seconds from a token to the next; None where it is not known.
        ttft_s: seconds until a first token; None where it is not known.
        num_running, num_waiting: requests on the engines now, and those of them that wait there.
        num_ready, num_starting, num_draining: engines. One that failed and is tried again counts as starting.
        min_engines, max_engines: bounds.
        start_s: seconds that an engine takes to start, the mean so far; None before any.
        role: phase that the engines compute: hybrid, prefill or decode.
    """

    now_s: float
    interval_s: float
    rate: float
    num_ended: int = 0
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    itl_s: float | None = None
    ttft_s: float | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_ready: int = 1
    num_starting: int = 0
    num_draining: int = 0
    min_engines: int = 1
    max_engines: int = 1
    start_s: float | None = None
    role: str = "hybrid"

    @property
    def present(self) -> int:
        """Engines that serve, or will."""
        return self.num_ready + self.num_starting


class ScalingDecision(NamedTuple):
    """`target`: number of engines; bounds and pauses are not the policy's concern. `reason`: with its figures."""

    target: int
    reason: str


class ScalingPolicy(ABC):
    """Says how many engines a pool should have. It is called once in an interval, on the event loop of the gateway.

    It must decide by its views alone, without a clock or chance: its record is replayed and compared. A policy that raises, or
    answers no number, is replaced by `fixed`, with one line in the log.
    """

    name: ClassVar[str]

    @abstractmethod
    def decide(self, view: PoolView) -> ScalingDecision:
        """`view`: of the last interval. Views come in the order of time."""

    def recorded(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return options that build this policy again in another place. `options`: those that it was built with."""
        return options
