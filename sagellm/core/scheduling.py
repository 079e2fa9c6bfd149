"""The scheduler's part of the hook contract: what it is told of requests and steps, and what it may decide."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

from sagellm.core.collectives import CommRule

__all__ = [
    "Phase", "RequestId", "RequestMetadata", "RequestView", "ScheduleDecision", "ServiceLevel", "StepResult", "StepView",
]  # fmt: skip

RequestId = NewType("RequestId", int)


class Phase(str, Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class ServiceLevel(NamedTuple):
    """Wishes of a request to the scheduler, or of its operator. An engine's own scheduler ignores them.

    Attributes:
        priority: lower is more urgent, as in vLLM's API; from -100 to 100, 0 where nothing was said.
        tenant_id: tenant that it runs for; empty if none was named.
        deadline_s: when its last token should be there, on the clock of `time.perf_counter`.
        ttft_s: seconds from its arrival within which the first token should be there.
        tpot_s: seconds a further token may take on average.
    """

    priority: int = 0
    tenant_id: str = ""
    deadline_s: float = math.inf
    ttft_s: float = math.inf
    tpot_s: float = math.inf


NO_SERVICE = ServiceLevel()


class RequestMetadata(NamedTuple):
    """A request, whatever engine runs it and however that keeps keys and values. The fields are those of `RequestView`."""

    request_id: RequestId
    phase: Phase
    num_tokens: int
    num_generated: int
    arrival_s: float
    adapter: str = ""
    service: ServiceLevel = NO_SERVICE
    max_new_tokens: int = 0
    first_token_s: float = math.inf
    last_token_s: float = math.inf
    group_id: RequestId | None = None


class RequestView(NamedTuple):  # as StepView and StepResult: made in every step, cheaper than a frozen dataclass
    """A request in the queue, as a strategy sees it. Lengths in tokens; times on the clock of `time.perf_counter`.

    Attributes:
        phase: PREFILL while prompt tokens are left to compute, also where some are computed.
        num_tokens: of the prompt and of what was generated.
        num_computed: tokens of these whose keys and values are computed.
        num_blocks: KV blocks that it holds.
        max_new_tokens: limit of generated tokens; 0 if unknown.
        first_token_s, last_token_s: when its first and its last token so far were there; infinity before the first.
        group_id: the same for a request and its branches: the first one's id; None for others.
    """

    request_id: RequestId
    phase: Phase
    num_tokens: int
    num_computed: int
    num_generated: int
    num_blocks: int
    arrival_s: float
    adapter: str = ""
    service: ServiceLevel = NO_SERVICE
    max_new_tokens: int = 0
    first_token_s: float = math.inf
    last_token_s: float = math.inf
    group_id: RequestId | None = None

    @property
    def metadata(self) -> RequestMetadata:
        """The request without what belongs to this engine's cache."""
        return RequestMetadata(*self[:3], self.num_generated, *self[6:])


class _StepFields(NamedTuple):
    step: int
    phase: Phase
    requests: tuple[RequestView, ...]
    free_blocks: int
    token_budget: int
    max_batch_size: int
    num_in_flight: int
    now_s: float


class StepView(_StepFields):
    """The engine is about to choose among `requests`, given in its own order: who waits for a prefill step, then who decodes.

    Attributes:
        phase: what the engine would do next by itself. On an engine that computes prompts and decodes in one step:
            PREFILL if any request has prompt tokens left.
        free_blocks: leaves out what the prefix cache would give up: `EngineHandle.block_counts` tells that too, and costs more.
        token_budget: the engine's limit of new tokens in a step with prompts; a plug-in may lower it, not raise it.
        max_batch_size: requests that can decode together, or be in flight; 0 if unknown.
        num_in_flight: requests whose step is on the device still, so that they are not among `requests`.
        now_s: on the clock of `time.perf_counter`.
    """

    __slots__ = ()

    def __new__(
        cls, *, step: int, phase: Phase, requests: tuple[RequestView, ...], free_blocks: int, token_budget: int,
        max_batch_size: int = 0, num_in_flight: int = 0, now_s: float = 0.0,
    ) -> "StepView":  # fmt: skip
        return tuple.__new__(cls, (step, phase, requests, free_blocks, token_budget, max_batch_size, num_in_flight, now_s))

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, object]]:
        return (), self._asdict()

    @property
    def waiting(self) -> tuple[RequestView, ...]:
        return tuple([request for request in self.requests if request.phase is Phase.PREFILL])

    @property
    def running(self) -> tuple[RequestView, ...]:
        return tuple([request for request in self.requests if request.phase is Phase.DECODE])


@dataclass(frozen=True, slots=True)
class ScheduleDecision:
    """How to go on.

    Attributes:
        order: every request id of the step once, most urgent first; None keeps the engine's order. Under memory
            pressure requests are preempted from the end.
        hold: ids that take no part in this step. A held request keeps its blocks, so holding one until another, which
            needs those blocks, has ended waits in vain.
        token_budget: new tokens in this step, at least 1; None for the engine's limit. The first request always runs.
        phase: what to do next; None for the engine's choice. PREFILL decodes if there is no prompt, or no room for one.
            An engine that does both in one step ignores it.
        chunk_tokens: request id -> at most so many of its prompt tokens in this step, at least 1; the rest waits for a later
            step, and the request keeps its blocks. Only the first request of a step may be cut. Where the engine cannot cut
            one, it computes all of it, and `StepResult.refused` says why.
        reasons: request id -> why it is where it is, for the record.
        draft_tokens: request id -> at most so many guesses of a decode step, from 0 on; other requests get as many as the
            engine's speculative strategy proposes. An engine without one ignores it.
        collectives: how the workers do collectives of these sorts in this step. The step after it has rules of its own, or
            none. One of a backend that the engine lacks (`EngineHandle.comm_backends`) makes the decision invalid.
    """

    order: Sequence[int] | None = None
    hold: frozenset[int] = field(default_factory=frozenset)
    token_budget: int | None = None
    reason: str = ""
    phase: Phase | None = None
    chunk_tokens: Mapping[int, int] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    draft_tokens: Mapping[int, int] = field(default_factory=dict)
    collectives: Sequence[CommRule] = ()


class StepResult(NamedTuple):
    """A step is done: one of prompts, or one decode step of those that were sent together.

    Attributes:
        num_tokens: computed in it.
        end_s: when, on the clock of `time.perf_counter`.
        duration_s: of the step alone, from when it was sent or the step before it had ended; 0 if not measured.
        num_context_tokens: tokens that were computed before, summed over its requests.
        bytes_in, bytes_out: of blocks copied from the host tier to the pool, and back, at its beginning.
        swap_s: seconds of these copies; 0 if not measured.
        computed: (request id, new tokens) of each request in it; empty where the engine does not say.
        refused: (request id, why) of what a decision asked for this step and the engine could not do.
    """

    step: int
    phase: Phase
    num_requests: int
    num_tokens: int
    end_s: float
    duration_s: float = 0.0
    num_context_tokens: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    swap_s: float = 0.0
    computed: tuple[tuple[RequestId, int], ...] = ()
    refused: tuple[tuple[RequestId, str], ...] = ()
