"""How long a step takes on the machine that recorded a log: fitted on the log's own steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.core.errors import PolicyError, TraceError
from sagellm.core.hooks import Phase
from sagellm.core.step_times import FitError, fit_held_out
from sagellm.scheduler_ir.simulation.base import LinearCosts, StepRun

__all__ = ["RecordedCosts", "fit_step_times"]


@dataclass(frozen=True, slots=True)
class RecordedCosts(LinearCosts):
    """Costs of a log's steps. Errors: of steps that the fit had not seen; None where nothing was fitted."""

    prefill_error: FitError | None = None
    decode_error: FitError | None = None


def fit_step_times(steps: Sequence[StepRun], name: str) -> RecordedCosts:
    """Steps without seconds take no part. `name`: of the log, for messages.

    Raises:
        TraceError: fewer than 5 steps of prompts were timed, or fewer than 5 decode steps though there were any.
    """
    prefill, prefill_error = _fit(steps, Phase.PREFILL, name)
    decode, decode_error = (0.0, 0.0, 0.0), None
    if any(step.phase is Phase.DECODE for step in steps):
        decode, decode_error = _fit(steps, Phase.DECODE, name)
    return RecordedCosts(prefill, decode, prefill_error, decode_error)


def _fit(steps: Sequence[StepRun], phase: Phase, name: str) -> tuple[tuple[float, float, float], FitError]:
    rows = [
        ((1.0, step.num_tokens if phase is Phase.PREFILL else step.num_requests, step.attention), step.seconds)
        for step in steps
        if step.phase is phase and step.seconds > 0
    ]
    try:
        found, error = fit_held_out(f"{phase.value} steps", rows)
    except PolicyError as problem:
        raise TraceError(f"{name}: step times cannot be fitted: {problem} Record a longer run.") from None
    # Least squares of relative errors lean to what is quick, the more the times scatter. Delays add up, so the sum must hold.
    predicted = math.fsum(sum(c * term for c, term in zip(found, terms, strict=True)) for terms, _ in rows)
    scale = math.fsum(seconds for _, seconds in rows) / predicted if predicted > 0 else 1.0
    fixed, each, looked_at = (scale * value for value in found)
    return (fixed, each, looked_at), error
