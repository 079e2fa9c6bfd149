"""A virtual run of the strategy that a log was made with against the log itself: how far the virtual clock can be relied on."""

from dataclasses import dataclass

from sagellm.replay.schedule.base import Run
from sagellm.replay.schedule.metrics import Figures, Targets, figures
from sagellm.scheduler_ir.simulation.base import StepRun

__all__ = ["Prediction", "StepDifference", "compare"]

COMPARED = ("ttft_mean_s", "ttft_p95_s", "tpot_mean_s", "tokens_per_s")


@dataclass(frozen=True, slots=True)
class StepDifference:
    """The first step that is not the log's. None: one of the two has no step there."""

    index: int
    recorded: str | None
    predicted: str | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """`errors`: by figure, predicted / measured - 1; None where the log does not say, or measured 0."""

    errors: dict[str, float | None]
    first_difference: StepDifference | None
    num_steps_recorded: int
    num_steps_predicted: int


def compare(measured: Run, predicted: Run) -> Prediction:
    ours, theirs = figures(predicted.requests, Targets()), figures(measured.requests, Targets())
    return Prediction(
        {name: _error(ours, theirs, name) for name in COMPARED}, _first_difference(measured.steps, predicted.steps),
        len(measured.steps), len(predicted.steps),
    )  # fmt: skip


def _error(ours: Figures, theirs: Figures, name: str) -> float | None:
    predicted, measured = getattr(ours, name), getattr(theirs, name)
    return predicted / measured - 1 if predicted is not None and measured else None


def _first_difference(recorded: tuple[StepRun, ...], predicted: tuple[StepRun, ...]) -> StepDifference | None:
    for index in range(max(len(recorded), len(predicted))):
        theirs = recorded[index] if index < len(recorded) else None
        ours = predicted[index] if index < len(predicted) else None
        if theirs is None or ours is None or _content(theirs, ours) != _content(ours, theirs):
            return StepDifference(index, theirs and _text(theirs), ours and _text(ours))
    return None


def _content(step: StepRun, other: StepRun) -> tuple:
    """Fields that must agree, as far as both have them. The order of requests within a step is no matter."""
    rows = None if step.computed is None or other.computed is None else sorted(step.computed)
    return step.phase, step.num_requests, step.num_tokens, rows


def _text(step: StepRun) -> str:
    who = "" if step.computed is None else f" ({', '.join(str(request) for request, _ in sorted(step.computed))})"
    return f"{step.phase.value} of {step.num_requests} requests{who}, {step.num_tokens} tokens"
