"""Which runs are judged against which, and what is refused because no verdict on it could be trusted."""

import math
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from benchmarks.config import BenchmarkConfig
from benchmarks.errors import BenchmarkError
from benchmarks.gate.base import Rule
from benchmarks.result import Result, Run

CONTROL = "control"
SERVED = "serve"
MACHINE = ("processor", "cores")
MAY_DIFFER = {"contestants", "rounds", "launches"}


class Side(NamedTuple):
    """One contestant of one result. `label` names it in messages."""

    result: Result
    contestant: str
    label: str

    def runs(self, scenario: str) -> list[Run]:
        return [run for run in self.result.runs if (run.contestant, run.scenario) == (self.contestant, scenario)]

    def values(self, rule: Rule) -> dict[int, float]:
        """Round -> value, of valid runs. Raises BenchmarkError for one that is no number."""
        values = self.result.of(self.contestant, rule.scenario, rule.metric)
        for number, value in values.items():
            if not math.isfinite(value):
                raise BenchmarkError(f"{self.label}: {rule.name} of {self.contestant!r} is {value} in round {number}")
        return values

    def num_launches(self) -> int:
        """Times that the servers were started."""
        runs = [run for run in self.result.runs if run.scenario.split("@")[0] == SERVED and run.contestant == self.contestant]
        return len({run.launch for run in runs})

    def absent(self, rule: Rule) -> str:
        """Why the metric is missing, as the runs say it; empty when they do not."""
        reasons = [run.absent.get(rule.metric, "") for run in self.runs(rule.scenario) if run.status == "valid"]
        return next(filter(None, reasons), "")

    def count(self) -> tuple[int, int]:
        """Valid and void runs."""
        states = [run.status for run in self.result.runs if run.contestant == self.contestant]
        return states.count("valid"), states.count("void")


class Sides(NamedTuple):
    """`paired`: base, control and head were interleaved in one result."""

    base: Side
    head: Side
    control: Side | None
    paired: bool


def choose(
    current: Result, baseline: Result | None, base_name: str | None, head_name: str | None, control_name: str = CONTROL
) -> Sides:
    """Raises BenchmarkError for results that cannot be compared."""
    if baseline is not None and baseline == current:
        baseline = None
    older = baseline if baseline is not None else current
    # First of all: what died early may hold no contestants, and that is not what its reader must be told.
    for result, label in ((older, "baseline" if baseline is not None else "current"), (current, "current")):
        _whole(result, label)
    base = Side(older, _name(older, base_name, "base", "baseline"), "baseline")
    head = Side(current, _name(current, head_name, "head", "current"), "current")
    if baseline is None and base.contestant == head.contestant:
        raise BenchmarkError(f"both sides are the runs of {base.contestant!r} in one result; name two contestants")
    for side in (base, head):
        _unbroken(side)
    if baseline is not None:
        _same_machine(baseline, current)
        _same_config(baseline, current)
        _same_unit(base, head)
        return Sides(base, head, None, paired=False)
    control = None
    if control_name in current.contestants() and control_name not in (base.contestant, head.contestant):
        control = Side(current, control_name, "control")
        _unbroken(control)
    return Sides(base, head, control, paired=True)


def scenarios(sides: Sides) -> list[str]:
    """The scenarios that were run. Raises BenchmarkError when a side has no valid run of one."""
    names = list(dict.fromkeys([*sides.base.result.scenarios(), *sides.head.result.scenarios()]))
    for name in names:
        for side in filter(None, (sides.base, sides.head, sides.control)):
            runs = side.runs(name)
            if any(run.status == "valid" for run in runs):
                continue
            reasons = sorted({" ".join(run.reason.split()) for run in runs if run.reason})
            found = f"{len(runs)} void ({'; '.join(reasons)})" if runs else "none at all"
            raise BenchmarkError(f"{side.label}: {side.contestant!r} has no valid run of {name!r}: {found}")
    return names


def _name(result: Result, wanted: str | None, usual: str, label: str) -> str:
    names = result.contestants()
    if wanted is None:
        wanted = names[0] if len(names) == 1 else usual
    if wanted not in names:
        known = ", ".join(names) or "none"
        raise BenchmarkError(f"{label}: no contestant {wanted!r}; the result has {known}: choose with --{label}-name")
    return wanted


def _whole(result: Result, label: str) -> None:
    if result.status != "complete":
        why = f" ({' '.join(result.reason.split())})" if result.reason else ""
        raise BenchmarkError(
            f"{label}: the result is {result.status}{why}; only a complete one is judged, run it again"
        )


def _unbroken(side: Side) -> None:
    for run in side.result.runs:
        if run.contestant == side.contestant and run.status == "failed":
            why = " ".join(run.reason.split()) or "no reason given"
            raise BenchmarkError(
                f"{side.label}: {run.contestant!r} failed in round {run.round} of {run.scenario!r} ({why}); run it again"
            )


def _same_machine(baseline: Result, current: Result) -> None:
    older, newer = _machine(baseline, "baseline"), _machine(current, "current")
    if older != newer:
        raise BenchmarkError(
            f"the baseline is from another machine: {_describe(older)}; current is from {_describe(newer)}:"
            " renew the baseline here, or use --ab"
        )


def _machine(result: Result, label: str) -> dict[str, Any]:
    machine = result.environment.get("machine")
    if not isinstance(machine, dict) or not all(key in machine for key in MACHINE):
        raise BenchmarkError(f"{label}: the result does not say which machine it is from ({' and '.join(MACHINE)})")
    return {key: machine[key] for key in MACHINE}


def _describe(machine: dict[str, Any]) -> str:
    return f"{machine['processor']}, {machine['cores']} cores"


def _with_new_settings(config: dict[str, Any], model: type[BaseModel] = BenchmarkConfig) -> dict[str, Any]:
    """A setting that came after the result was made acted as its default does."""
    known = {}
    for name, field in model.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        part = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        if part is not None and isinstance(config.get(name), dict):
            known[name] = _with_new_settings(config[name], part)
        elif name not in config and not field.is_required():
            known[name] = to_jsonable_python(field.get_default(call_default_factory=True))
    return config | known


def _same_config(baseline: Result, current: Result) -> None:
    older, newer = _with_new_settings(baseline.config), _with_new_settings(current.config)
    keys = sorted((set(older) | set(newer)) - MAY_DIFFER)
    different = [key for key in keys if older.get(key) != newer.get(key)]
    if different:
        shown = "; ".join(f"{key}: {_short(older.get(key))} and {_short(newer.get(key))}" for key in different)
        raise BenchmarkError(f"baseline and current ran different configs: {shown}; only rounds and launches may differ")


def _same_unit(base: Side, head: Side) -> None:
    """Raises BenchmarkError when a start of the servers is one value on one side and a round on the other."""
    base_launches, head_launches = base.num_launches(), head.num_launches()
    if (base_launches > 1) != (head_launches > 1):
        raise BenchmarkError(
            f"the servers of the baseline were started {base_launches} times, those of current {head_launches}: start both"
            " several times (launches), or both once"
        )


def peak_ratio(sides: Sides) -> float:
    """Peak of head / peak of base where both were measured: of one machine, so that their difference is an error."""
    peaks = [side.result.environment.get("peak", {}).get(side.contestant, {}) for side in (sides.head, sides.base)]
    if all(str(peak.get("name", "")).startswith("measured") and peak.get("flops") for peak in peaks):
        return peaks[0]["flops"] / peaks[1]["flops"]
    return 1.0


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
