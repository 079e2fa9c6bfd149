"""The input and the answer of a routing policy."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from sagellm.comm_backend.group_messages import Capabilities
from sagellm.scheduler_ir.pd_costs import PDCosts

__all__ = ["EngineView", "RouteDecision", "RouteKind", "RouteRequest", "RoutingPolicy"]


class RouteKind(str, Enum):
    """`split`: the prompt is computed on another engine. `load`: that engine has all of it cached, so that it is only loaded
    from there. `stay`: the engine that decodes computes the prompt too."""

    SPLIT = "split"
    LOAD = "load"
    STAY = "stay"


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """`num_tokens`: of the prompt; guessed from its length where `is_estimate`. `max_tokens`: of the answer, None where the
    client does not say. `can_split`: a request of several prompts, or without a token before the last one, cannot be."""

    num_tokens: int
    max_tokens: int | None = None
    can_split: bool = True
    is_estimate: bool = False
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine, at this moment.

    Attributes:
        engine_id: the URL of its server.
        role: prefill, decode or hybrid; the latter two decode, and may compute prompts themselves.
        cached_tokens: of this request's prompt, in its prefix cache.
        waiting_tokens: of prompts that are not computed yet.
        num_running: requests that decode.
        costs: as measured there, or the best guess (`OnlineCosts`); `links` are by "prefill id->decode id".
        sources: prefill engines whose keys and values it can read.
        timeout_s: it waits no longer for them, from when the request comes, and computes the prompt itself after that.
        capabilities: as the engine found them out on its machine, for policies of groups whose engines differ.
    """

    engine_id: str
    role: str
    cached_tokens: int = 0
    waiting_tokens: int = 0
    num_running: int = 0
    free_blocks: int = 2**31
    block_size: int = 64
    token_bytes: int = 1
    costs: PDCosts = field(default_factory=PDCosts)
    sources: frozenset[str] = frozenset()
    timeout_s: float = math.inf
    capabilities: Capabilities = field(default_factory=Capabilities)

    @property
    def load_s(self) -> float:
        """Seconds of work that wait there."""
        if not self.waiting_tokens:
            return 0.0
        return self.costs.prefill_step_s + self.costs.prefill_token_s * self.waiting_tokens


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """`prefill_on`: None where the prompt stays. `expected_s`: seconds to the answer's first token, None where not known."""

    kind: RouteKind
    decode_on: str
    prefill_on: str | None
    reason: str
    expected_s: float | None = None


class RoutingPolicy(ABC):
    """Chooses the engines of a request. It is called on the proxy's event loop: one that waits holds up all requests.

    One that raises, or names engines that it was not offered, is replaced by `pd`, with one line in the log; the request
    goes on.
    """

    name: ClassVar[str]

    @abstractmethod
    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> RouteDecision:
        """`engines`: those that live; at least one of them decodes. A split is allowed between an engine that decodes and one
        of its `sources`, where the request `can_split`."""
