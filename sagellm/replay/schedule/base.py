"""Requests of a log, and the runs of them. Times in seconds from the first
arrival; lengths in tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sagellm.core.hooks import RequestId, ServiceLevel
from sagellm.core.scheduling import NO_SERVICE
from sagellm.scheduler_ir.simulation.base import EngineShape, StepRun

__all__ = ["ENGINE", "RecordedRequest", "RecordedRun", "RequestTimes", "Run"]

ENGINE = "engine"  # the name of the engine's own scheduler, where no strategy decides


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request that arrives: `num_generated` is how long its answer was in the log, and is in every run.

    Attributes:
        cached_tokens: of the prompt, found in the prefix cache at the first admission.
        service: `deadline_s` on this log's clock.
    """

    request_id: RequestId
    arrival_s: float
    prompt_tokens: int
    num_generated: int
    cached_tokens: int = 0
    service: ServiceLevel = NO_SERVICE
    max_new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request got its tokens. `token_s`: of each, or empty where a log says nothing but the first and the last."""

    request_id: RequestId
    arrival_s: float
    num_tokens: int
    first_token_s: float
    last_token_s: float
    token_s: tuple[float, ...] = ()
    service: ServiceLevel = NO_SERVICE

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Seconds a further token took on average; NaN where there was but one."""
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1) if self.num_tokens > 1 else math.nan


@dataclass(frozen=True, slots=True)
class Run:
    """A run of all requests, measured or virtual.

    Attributes:
        requests: by arrival.
        steps: in the order in which they ended.
        decisions: the report of `DecisionOutcomes`; empty for the log and for the engine's own choice.
    """

    name: str
    requests: tuple[RequestTimes, ...]
    steps: tuple[StepRun, ...]
    num_preempted: int = 0
    decisions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedRun:
    """A log: what arrived, at what engine, and what became of it.

    Attributes:
        requests: by arrival, those that got a token; `num_left_out` did not, or did not end.
        measured: the engine's own run of them.
        gap_s: from the end of a step to the beginning of one that had not been sent before that end.
        decided_by: whose decisions the log holds, or `ENGINE`.
        plugins: names and options of the engine's plug-ins, as its `open` line has them.
    """

    path: str
    shape: EngineShape
    requests: tuple[RecordedRequest, ...]
    measured: Run
    gap_s: float = 0.0
    num_left_out: int = 0
    num_skipped: int = 0
    decided_by: str = ENGINE
    plugins: tuple[dict, ...] = field(default_factory=tuple)
