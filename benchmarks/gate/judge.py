"""From runs to verdicts.

A metric regressed when its change is beyond the limit *and* identical code would not show it: one in a hundred gates of
identical code may have any such metric (Holm over all that are gated). A pass is a statement too: the interval must exclude
a change of `interest` limits. All other verdicts are "cannot tell".
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.errors import BenchmarkError
from benchmarks.gate import inputs, statistics
from benchmarks.gate.base import Change, Judgement, MetricVerdict, NoiseFinding, Rule, Span, Verdict
from benchmarks.gate.inputs import CONTROL, Side, Sides
from benchmarks.gate.rules import DEFAULT_RULES, Rules
from benchmarks.result import Result

ALPHA = 0.01


class Series(NamedTuple):
    """Values of one metric: float[observations] each. Paired: index i is the same launch, or round, in all of them."""

    base: np.ndarray
    head: np.ndarray
    control: np.ndarray | None = None
    paired: bool = True


def judge(
    current: Result,
    baseline: Result | None = None,
    rules: Rules = DEFAULT_RULES,
    base_name: str | None = None,
    head_name: str | None = None,
    control_name: str = CONTROL,
) -> Judgement:
    """Judges head against base: paired when both are in `current`, as two samples when base is in `baseline`.

    Raises BenchmarkError for results that cannot be compared and for metrics that are missing without a reason.
    """
    sides = inputs.choose(current, baseline, base_name, head_name, control_name)
    rules = _asked(rules, inputs.scenarios(sides))
    missing = _missing(sides, rules)
    series = {rule: _series(sides, rule) for rule in rules if rule not in missing}
    judged = judge_series(series)
    metrics = tuple(judged[rule] if rule in judged else missing[rule] for rule in rules)
    if not any(rule.gated for rule in rules) or all(metric.verdict == Verdict.NOT_GATED for metric in metrics):
        raise BenchmarkError("no gated metric is left to judge; run a workload, or give --rules for the components")
    chosen = [side for side in (sides.base, sides.control, sides.head) if side is not None]
    return Judgement(
        metrics=metrics,
        noise=noise_check({rule: values for rule, values in series.items() if rule.gated}),
        paired=sides.paired,
        base_name=sides.base.contestant,
        head_name=sides.head.contestant,
        num_runs={
            side.contestant if sides.paired else f"{side.label} {side.contestant}": side.count() for side in chosen
        },
        num_launches=sides.head.num_launches(),
        control_name=sides.control.contestant if sides.control else None,
        units={rule.name: _unit(sides, rule) for rule in rules},
        environments={side.label: side.result.environment for side in (sides.base, sides.head)},
    )


def judge_series(series: dict[Rule, Series]) -> dict[Rule, MetricVerdict]:
    changes = {rule: compare(rule, values) for rule, values in series.items()}
    gated = {rule: change for rule, change in changes.items() if rule.gated and change is not None}
    worse = _significant({rule: change.p for rule, change in gated.items()}, _noisy(gated))
    better = _significant({rule: 1 - change.p for rule, change in gated.items()}, _noisy(gated))
    return {rule: _verdict(rule, change, rule in worse, rule in better, series[rule]) for rule, change in changes.items()}


def noise_check(series: dict[Rule, Series]) -> tuple[NoiseFinding, ...]:
    """The control against base, which run the same code, by the same limits in both directions.

    The head has no part in it: a change that makes it erratic is its own fault, not the machine's.
    """
    changes: dict[Rule, Change] = {}
    for rule, values in series.items():
        if values.control is not None:
            change = compare(rule, Series(values.base, values.control))
            if change is not None:
                changes[rule] = change
    either = {rule: min(1.0, 2 * min(change.p, 1 - change.p)) for rule, change in changes.items()}
    significant = _significant(either, _noisy(changes))
    return tuple(
        NoiseFinding(rule, change, _problem(rule, change, rule in significant)) for rule, change in changes.items()
    )


def compare(rule: Rule, series: Series) -> Change | None:
    """None when there are too few runs for any interval."""
    if min(len(series.base), len(series.head)) < statistics.FEWEST_RUNS:
        return None
    sides = [series.base, series.head] if series.control is None else [series.base, series.control, series.head]
    ratio = rule.scale == "ratio" and all((side > 0).all() for side in sides)
    worse = 1 if rule.better == "lower" else -1
    table = [worse * (np.log(side) if ratio else side) for side in sides]
    if not series.paired:
        estimate = statistics.unpaired(*table)
    else:
        # The control is base again: half of what base is, and twice the rounds to learn the noise from.
        weights = (-1, 1) if series.control is None else (-0.5, -0.5, 1)
        estimate = statistics.blocked(np.stack(table, axis=1), weights)
    base_table = np.concatenate(table[:-1])
    return _change(estimate, worse, ratio, float(base_table.mean()), float(table[-1].mean()), series)


def _change(estimate: statistics.Estimate, worse: int, ratio: bool, base: float, head: float, series: Series) -> Change:
    """Back from "more is worse", on the scale of comparison, to the metric's own direction and unit."""
    ends = sorted((worse * estimate.low, worse * estimate.high))
    signed = Span(ends[0], worse * estimate.value, ends[1])
    if ratio:
        base, head = float(np.exp(worse * base)), float(np.exp(worse * head))
        relative = Span(*np.expm1(signed).tolist())
        absolute = Span(*(base * part for part in relative))
    else:
        base, head = worse * base, worse * head
        absolute = signed
        relative = Span(*(_fraction(part, base) for part in signed))
    counts = len(series.base), len(series.head)
    return Change(relative, absolute, estimate.p, estimate.exact, base, head, *counts, estimate.method)


def _fraction(part: float, base: float) -> float:
    if base:
        return part / abs(base)
    return 0.0 if part == 0 else float(np.copysign(np.inf, part))


def _verdict(rule: Rule, change: Change | None, worse: bool, better: bool, series: Series) -> MetricVerdict:
    if not rule.gated:
        return MetricVerdict(rule, Verdict.NOT_GATED, rule.reason, change)
    if change is None:
        runs = min(len(series.base), len(series.head))
        what = "launches, or rounds of one launch" if series.paired else "launches a side, or rounds of one launch"
        reason = f"{runs} {what}; at least {statistics.FEWEST_RUNS} are needed"
        return MetricVerdict(rule, Verdict.CANNOT_TELL, reason)
    low, value, high = _worse(rule, change)
    if _beyond(rule, value):
        if worse:
            return MetricVerdict(rule, Verdict.REGRESSION, change=change)
        if low[0] > 0:
            return MetricVerdict(rule, Verdict.CANNOT_TELL, "looks worse, but so few runs do not prove it", change)
    if _beyond(rule, high, rule.interest):
        reason = f"the interval does not exclude a change for the worse of {rule.interest * rule.relative:.1%}"
        return MetricVerdict(rule, Verdict.CANNOT_TELL, reason, change)
    if better and _beyond(rule, (-value[0], -value[1])):
        return MetricVerdict(rule, Verdict.IMPROVED, change=change)
    return MetricVerdict(rule, Verdict.PASS, change=change)


def _worse(rule: Rule, change: Change) -> list[tuple[float, float]]:
    """(relative, absolute) at the interval's better end, at the estimate and at its worse end; positive is worse."""
    points = list(zip(change.relative, change.absolute, strict=True))
    if rule.better == "lower":
        return points
    return [(-relative, -absolute) for relative, absolute in reversed(points)]


def _beyond(rule: Rule, point: tuple[float, float], times: float = 1.0) -> bool:
    return point[0] > times * rule.relative and point[1] > times * rule.absolute


def _problem(rule: Rule, change: Change, significant: bool) -> str:
    widths = change.relative.half_width, change.absolute.half_width
    if _beyond(rule, widths, rule.interest):
        return f"uncertain by ±{widths[0]:.1%}, ±{rule.interest * rule.relative:.1%} is needed"
    moved = abs(change.relative.value), abs(change.absolute.value)
    if significant and _beyond(rule, moved):
        return f"moved by {change.relative.value:+.1%} with identical code, the limit is {rule.relative:.1%}"
    return ""


def _noisy(changes: dict[Rule, Change]) -> set[Rule]:
    return {rule for rule, change in changes.items() if not change.exact}


def _significant(p_values: dict[Rule, float], noisy: set[Rule]) -> set[Rule]:
    """The rules whose change identical code would not show. A metric without variation cannot raise a false alarm."""
    # Cost is device time at a price and MFU is its inverse: equal p values are one test and count once.
    keys = {rule: f"{p_values[rule]:.9g}" for rule in p_values if rule in noisy}
    distinct = {key: float(key) for key in keys.values()}
    passed = dict(zip(distinct, statistics.holm(list(distinct.values()), ALPHA), strict=True))
    exact = {rule for rule in p_values if rule not in noisy and p_values[rule] < ALPHA}
    return exact | {rule for rule, key in keys.items() if passed[key]}


def _asked(rules: Rules, ran: Sequence[str]) -> Rules:
    """Default rules of a scenario that was not run ask for nothing; a rule that somebody wrote does."""
    absent = [rule for rule in rules if rule.scenario not in ran]
    for rule in absent:
        if rule not in DEFAULT_RULES and rule.scenario != "serve":
            raise BenchmarkError(f"rule {rule.name}: scenario {rule.scenario!r} was not run; run were {', '.join(ran)}")
    return tuple(rule for rule in rules if rule not in absent)


def _missing(sides: Sides, rules: Rules) -> dict[Rule, MetricVerdict]:
    """Verdicts on metrics that a side lacks. Raises BenchmarkError if no run says why."""
    verdicts: dict[Rule, MetricVerdict] = {}
    unexplained: list[str] = []
    for rule in rules:
        lacking = [side for side in filter(None, sides[:3]) if not side.values(rule)]
        if not lacking:
            continue
        reasons = {side.label: rule.reason or side.absent(rule) for side in lacking}
        unexplained += [f"{rule.name} ({label})" for label, reason in reasons.items() if not reason]
        # A head that stopped reporting what base reports must not pass for it.
        everywhere = {"baseline", "current"} <= set(reasons) or not rule.gated
        verdict = Verdict.NOT_GATED if everywhere else Verdict.CANNOT_TELL
        text = (
            next(iter(reasons.values())) if everywhere else "; ".join(f"{k} lacks it: {v}" for k, v in reasons.items())
        )
        verdicts[rule] = MetricVerdict(rule, verdict, text)
    if unexplained:
        raise BenchmarkError(
            f"missing without a reason: {', '.join(unexplained)}; measure them, or set gated: false with a reason in --rules"
        )
    return verdicts


def _series(sides: Sides, rule: Rule) -> Series:
    def observed(result: Result, *of: Side) -> Iterable[np.ndarray]:
        return result.independent([side.contestant for side in of], rule.scenario, rule.metric).T

    if not sides.paired:
        (base,), (head,) = observed(sides.base.result, sides.base), observed(sides.head.result, sides.head)
        if rule.metric == "mfu":
            head = head * inputs.peak_ratio(sides)  # both by the baseline's peak
        return Series(base, head, paired=False)
    if sides.control is None:
        return Series(*observed(sides.head.result, sides.base, sides.head))
    base, control, head = observed(sides.head.result, sides.base, sides.control, sides.head)
    return Series(base, head, control)


def _unit(sides: Sides, rule: Rule) -> str:
    definition = sides.head.result.definitions.get(rule.metric)
    return definition.unit if definition else ""
