"""A log under several strategies: the fit, the runs, and how far they can be relied on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sagellm.replay.schedule.base import RecordedRun, Run
from sagellm.replay.schedule.compare import Prediction, compare
from sagellm.replay.schedule.decisions import DecisionLine
from sagellm.replay.schedule.drift import drift_of
from sagellm.replay.schedule.metrics import Figures, Targets, figures, groups
from sagellm.replay.schedule.step_times import RecordedCosts, fit_step_times
from sagellm.replay.schedule.strategies import build_strategy, strategy_of_log
from sagellm.replay.schedule.virtual_run import virtual_run

__all__ = ["Replayed", "replay_schedule"]

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Replayed:
    """`runs`: by strategy, in the order given. `predicted_by`: what decided in the log; `prediction`: None where that is not
    known here."""

    log: RecordedRun
    times: RecordedCosts
    runs: dict[str, Run]
    decisions: dict[str, list[DecisionLine]]
    predicted_by: str
    prediction: Prediction | None
    targets: Targets = field(default_factory=Targets)
    speedup: float = 1.0

    def rows(self) -> list[tuple[str, Run, Figures]]:
        """The log first."""
        every = [("log", self.log.measured), *self.runs.items()]
        return [(name, run, figures(run.requests, self.targets, run.num_preempted)) for name, run in every]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in full."""
        shape, times = asdict(self.log.shape), asdict(self.times)
        for phase in ("prefill_error", "decode_error"):
            error = getattr(self.times, phase)
            times[phase] = None if error is None else error.model_dump()
        prediction = None if self.prediction is None else asdict(self.prediction)
        rows = []
        for name, run, found in self.rows():
            parts = [
                {"tenant": tenant, "priority": priority, **part.to_dict()}
                for tenant, priority, part in groups(run, self.targets)
            ]
            more = {"decisions": dict(run.decisions), "groups": parts}
            rows.append({"strategy": name, "steps": len(run.steps), **found.to_dict(), **more})
        about = {
            "name": self.log.path, "requests": len(self.log.requests), "left_out": self.log.num_left_out,
            "skipped": self.log.num_skipped, "decided_by": self.predicted_by, "gap_s": self.log.gap_s, "engine": shape,
        }  # fmt: skip
        return {"log": about, "speedup": self.speedup, "step_times": times, "prediction": prediction, "rows": rows}


def replay_schedule(
    log: RecordedRun, strategies: Mapping[str, Mapping[str, Any]], *, targets: Targets | None = None, speedup: float = 1.0,
    keep_decisions: bool = False, report: Report | None = None,
) -> Replayed:  # fmt: skip
    """Args: `strategies`: options by name. `report`: told a name and which part of all is done.

    Raises:
        PlanError: a strategy that cannot be built, or answers nonsense.
        TraceError: the log has too few steps for step times.
    """
    built = {name: build_strategy(name, dict(options)) for name, options in strategies.items()}
    times = fit_step_times(log.measured.steps, log.path)
    drifting = drift_of(times, log.measured.steps)
    # Arrivals that come faster are at other times: only the average speed of the machine is known of these.
    costs = drifting if speedup == 1.0 else times
    own, own_options = strategy_of_log(log)
    runs, decisions = {}, {}
    names: Sequence[str] = list(built)
    for number, name in enumerate(names):
        lines: list[DecisionLine] = []
        runs[name] = virtual_run(
            log.requests, log.shape, costs, built[name], name=name, gap_s=log.gap_s, speedup=speedup,
            decisions=lines if keep_decisions else None,
            progress=_part(report, name, number, len(names), len(log.requests)),
        )  # fmt: skip
        decisions[name] = lines
    prediction = None
    if speedup == 1.0 and dict(strategies.get(own, {})) == own_options and own in runs:
        prediction = compare(log.measured, runs[own])
    elif (strategy := _known(own, own_options)) is not _UNKNOWN:
        # Also where arrivals come faster in the rows: what can be checked is the log as it was.
        again = virtual_run(log.requests, log.shape, drifting, strategy, name=own, gap_s=log.gap_s)
        prediction = compare(log.measured, again)
    return Replayed(log, times, runs, decisions, own, prediction, targets or Targets(), speedup)


_UNKNOWN = object()


def _known(name: str, options: dict[str, Any]) -> Any:
    """Build what decided in the log, if possible: a log may come from a machine with other plug-ins."""
    try:
        return build_strategy(name, options)
    except Exception:
        return _UNKNOWN


def _part(report: Report | None, name: str, number: int, of: int, num_requests: int) -> Callable[[int], None] | None:
    if report is None:
        return None
    return lambda done: report(name, (number + done / num_requests) / of)
