"""Inputs and outputs of a virtual engine: its limits, costs of steps, its steps, a strategy's fault. Times in
seconds on its own clock, which begins at 0; lengths in tokens."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from sagellm.core.errors import ConfigError, PlanError
from sagellm.core.hooks import Phase, RequestId

__all__ = ["EngineShape", "FaultKind", "LinearCosts", "StepCosts", "StepRun", "StrategyFault"]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Limits of an engine. `decode_round`: decode steps that are sent together. Raises ConfigError: a limit below 1."""

    block_size: int
    num_blocks: int
    max_prefill_tokens: int
    max_batch_size: int
    decode_round: int = 1
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_prefill_tokens", "max_batch_size", "decode_round"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of an engine is {getattr(self, name)}; give at least 1.")

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class StepCosts(Protocol):
    """How long a step takes."""

    def seconds(self, phase: Phase, num_requests: int, num_tokens: int, attention: float, now_s: float) -> float:
        """Return the seconds of a step of prompts, or of one decode step, that begins at `now_s`. `attention`: as in
        `StepRun`."""


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """Seconds. `prefill`: one step, a token, a token times one that it looks at. `decode`: one step, a request, a token that
    they look at."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]

    def seconds(
        self, phase: Phase, num_requests: int, num_tokens: int, attention: float, now_s: float = 0.0
    ) -> float:
        fixed, each, looked_at = self.prefill if phase is Phase.PREFILL else self.decode
        return fixed + each * (num_tokens if phase is Phase.PREFILL else num_requests) + looked_at * attention


@dataclass(frozen=True, slots=True)
class StepRun:
    """A step of prompts, or one decode step.

    Attributes:
        seconds: of the step alone.
        attention: pairs of a new token and one that it reads, summed over the requests (`num_pairs`).
        computed: (request id, new tokens) of each of them; None where a log does not say.
    """

    step: int
    phase: Phase
    end_s: float
    seconds: float
    num_requests: int
    num_tokens: int
    attention: float
    computed: tuple[tuple[RequestId, int], ...] | None = None


class FaultKind(Enum):
    RAISED = "raised"  # the strategy's own error is the `__cause__`
    ANSWER = "answer"  # what it answered makes no sense
    HELD = "held"  # it keeps a request waiting for too long


class StrategyFault(PlanError):
    """Fault of a strategy. An engine would go on without it, with figures of another strategy.

    Attributes:
        request_id: the one that is held, or None.
    """

    def __init__(self, kind: FaultKind, message: str, step: int, now_s: float, request_id: RequestId | None = None) -> None:
        super().__init__(message)
        self.kind, self.step, self.now_s, self.request_id = kind, step, now_s, request_id
