"""Rules and answers of the gate: frozen values, no arithmetic beyond reading them."""

import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

PASSED, REGRESSED, MISUSED, UNDECIDED = 0, 1, 2, 3


class Verdict(str, Enum):
    PASS = "pass"
    IMPROVED = "improved"
    REGRESSION = "regression"
    CANNOT_TELL = "cannot tell"
    NOT_GATED = "not gated"


class Rule(BaseModel):
    """One metric of one scenario, and the change for the worse that users put up with.

    A change counts when it is larger than `relative` (a fraction of base) and larger than `absolute` (the metric's unit).
    `interest`: a pass must exclude a change of this many times both. `scale`: how two values of one round are compared;
    a rate that may be zero has no ratio.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scenario: str = "serve"
    metric: str
    better: Literal["lower", "higher"]
    relative: float = Field(gt=0)
    absolute: float = Field(0.0, ge=0)
    interest: float = Field(2.0, ge=1)
    scale: Literal["ratio", "difference"] = "ratio"
    gated: bool = True
    reason: str = ""

    @model_validator(mode="after")
    def _explained(self) -> "Rule":
        if not self.gated and not self.reason.strip():
            raise ValueError("gated: false needs a reason")
        return self

    @property
    def name(self) -> str:
        return self.metric if self.scenario == "serve" else f"{self.scenario}/{self.metric}"


class Span(NamedTuple):
    """An estimate within its 95% interval."""

    low: float
    value: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Change:
    """Head against base over `num_base` and `num_head` runs.

    `relative` is a fraction of base, `absolute` in the metric's unit; both have the sign of head - base. `p` is the chance
    of seeing this much worse, or more, from identical code. `exact`: the runs do not vary, so there is nothing to test.
    `base` and `head` are levels: geometric means on the ratio scale, means on the other.
    """

    relative: Span
    absolute: Span
    p: float
    exact: bool
    base: float
    head: float
    num_base: int
    num_head: int
    method: str


@dataclass(frozen=True)
class MetricVerdict:
    rule: Rule
    verdict: Verdict
    reason: str = ""
    change: Change | None = None


@dataclass(frozen=True)
class NoiseFinding:
    """Identical code against itself. `problem` is empty when the metric may be judged on this machine."""

    rule: Rule
    change: Change
    problem: str = ""


@dataclass(frozen=True)
class Judgement:
    """The gate's answer. `noise` is empty when no control ran. `num_runs`: contestant -> (valid, void) runs; with two
    files its side stands before its name. `num_launches`: of the head; with several, each is one observation.
    `control_name`: the contestant that is base once more, if there was one."""

    metrics: tuple[MetricVerdict, ...]
    noise: tuple[NoiseFinding, ...]
    paired: bool
    base_name: str
    head_name: str
    num_runs: dict[str, tuple[int, int]]
    num_launches: int
    control_name: str | None
    units: dict[str, str]
    environments: dict[str, dict[str, Any]]

    def of(self, *verdicts: Verdict) -> tuple[MetricVerdict, ...]:
        return tuple(metric for metric in self.metrics if metric.verdict in verdicts)

    @property
    def noisy(self) -> tuple[NoiseFinding, ...]:
        return tuple(finding for finding in self.noise if finding.problem)

    @property
    def exit_code(self) -> int:
        """The A/A check comes first: on a machine that moves identical code, a regression proves nothing."""
        if self.noisy:
            return UNDECIDED
        if self.of(Verdict.REGRESSION):
            return REGRESSED
        return UNDECIDED if self.of(Verdict.CANNOT_TELL) else PASSED

    @property
    def verdict(self) -> Verdict:
        return {
            PASSED: Verdict.PASS,
            REGRESSED: Verdict.REGRESSION,
            UNDECIDED: Verdict.CANNOT_TELL,
        }[self.exit_code]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite change becomes null."""
        return {"verdict": self.verdict.value, "exit_code": self.exit_code, **_plain(asdict(self))}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Span):
        return _plain(value._asdict())
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
