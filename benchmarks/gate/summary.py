"""The Markdown that a pull request shows."""

from typing import Any

from benchmarks.gate.base import Judgement, MetricVerdict, NoiseFinding, Rule, Span, Verdict

DRIFT = "Base and head were measured apart: what changed on the machine in between looks like a change of the code."


def markdown(judgement: Judgement) -> str:
    parts = [
        f"## Benchmark: {judgement.verdict.value}",
        headline(judgement),
        _table(judgement),
        _reasons(judgement),
        noise_line(judgement),
        "" if judgement.paired else DRIFT,
        _runs(judgement),
        *_environments(judgement),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def headline(judgement: Judgement) -> str:
    """The verdict and what it rests on, in one sentence."""
    if judgement.noisy:
        return "**Cannot tell**: the A/A check did not pass, the machine is too noisy to judge on."
    regressions = judgement.of(Verdict.REGRESSION)
    if regressions:
        return f"**Regression** of {judgement.head_name} against {judgement.base_name}: {_list(regressions)}."
    undecided = judgement.of(Verdict.CANNOT_TELL)
    if undecided:
        return f"**Cannot tell** about {_list(undecided)}: more rounds, or a quieter machine."
    improved = judgement.of(Verdict.IMPROVED)
    better = f"; better: {_list(improved)}" if improved else ""
    judged = len(judgement.metrics) - len(judgement.of(Verdict.NOT_GATED))
    return f"**Pass**: none of {judged} gated metrics is worse than its limit{better}."


def noise_line(judgement: Judgement) -> str:
    """The A/A check: that it passed and what it saw, or by how much each metric is too noisy."""
    if not judgement.noise and judgement.control_name:
        return "A/A check: too few runs of the control for one."
    if not judgement.noise:
        return "A/A check: not run; no control (base a second time) is among the contestants."
    if judgement.noisy:
        found = "; ".join(f"{finding.rule.name} {finding.problem}" for finding in judgement.noisy)
        return f"A/A check **failed**, the machine is too noisy: {found}."
    widest = max(judgement.noise, key=_noise)
    span = widest.change.relative
    return (
        f"A/A check passed for {len(judgement.noise)} metrics; the noisiest is {widest.rule.name}, which identical code"
        f" moved by {_percent(span.value)} ± {span.half_width:.1%}."
    )


def _noise(finding: NoiseFinding) -> float:
    """Uncertainty in limits, so that metrics of different limits compare."""
    return min(finding.change.relative.half_width, 1e9) / finding.rule.relative


def _table(judgement: Judgement) -> str:
    rows = ["| metric | base | head | change (95% interval) | limit | verdict |", "|---|---:|---:|---:|---:|---|"]
    for metric in judgement.metrics:
        unit = judgement.units.get(metric.rule.name, "")
        cells = [metric.rule.name, *_levels(metric, unit), _limit(metric.rule, unit)]
        rows.append(f"| {' | '.join(_cell(text) for text in cells)} | {_strong(metric.verdict)} |")
    return "\n".join(rows)


def _levels(metric: MetricVerdict, unit: str) -> tuple[str, str, str]:
    change = metric.change
    if change is None:
        return "–", "–", "–"
    return amount(change.base, unit), amount(change.head, unit), _interval(change.relative)


def _interval(span: Span) -> str:
    if span.low == span.high:
        return f"{_percent(span.value)} (exact)"
    return f"{_percent(span.value)} [{_percent(span.low)}, {_percent(span.high)}]"


def _limit(rule: Rule, unit: str) -> str:
    if not rule.gated:
        return "–"
    sign = "+" if rule.better == "lower" else "-"
    share = f"{sign}{rule.relative * 100:.3g}%"
    return f"{share} and {amount(rule.absolute, unit)}" if rule.absolute else share


def _reasons(judgement: Judgement) -> str:
    return "\n".join(f"- {metric.rule.name}: {_cell(metric.reason)}" for metric in judgement.metrics if metric.reason)


def _runs(judgement: Judgement) -> str:
    design = "interleaved, compared in pairs" if judgement.paired else "two samples"
    if judgement.num_launches > 1:
        design += f"; servers started {judgement.num_launches} times, each start one observation"
    elif judgement.num_launches == 1:
        design += "; servers started once, so that the luck of that start is in no interval"
    counts = [
        f"{name} {valid}" + (f" ({void} void, left out)" if void else "")
        for name, (valid, void) in judgement.num_runs.items()
    ]
    methods = sorted({metric.change.method for metric in judgement.metrics if metric.change})
    return f"Runs: {', '.join(counts)}; {design}; {', '.join(methods) or 'no test'}."


def _environments(judgement: Judgement) -> list[str]:
    lines = {label: _environment(values) for label, values in judgement.environments.items()}
    if len(set(lines.values())) == 1:
        return [line for line in list(lines.values())[:1] if line]
    return [f"{label}: {line}" for label, line in lines.items() if line]


def _environment(values: dict[str, Any]) -> str:
    """Machine, versions and commits; the rest of the environment is for the file."""
    machine = values.get("machine")
    machine = machine if isinstance(machine, dict) else {}
    parts = []
    if "processor" in machine:
        parts.append(f"Machine: {machine['processor']}, {machine.get('cores')} cores")
    versions = values.get("versions")
    if isinstance(versions, dict):
        parts.append("versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    commits = values.get("commits")
    if isinstance(commits, dict):
        parts.append("commits: " + ", ".join(f"{name} {_commit(commit)}" for name, commit in commits.items()))
    return "; ".join(parts)


def _commit(state: Any) -> str:
    if not isinstance(state, dict) or not state.get("commit"):
        return "unknown"
    return str(state["commit"])[:12] + (" (changed)" if state.get("changed") else "")


def amount(value: float, unit: str) -> str:
    """Four digits; seconds under one as milliseconds."""
    if unit == "s" and abs(value) < 1:
        return f"{value * 1e3:.4g} ms"
    return f"{value:.4g} {'' if unit == 'ratio' else unit}".strip()


def _percent(value: float) -> str:
    return f"{value * 100 + 0.0:+.2f}%"  # + 0.0: no minus before a zero


def _list(metrics: tuple[MetricVerdict, ...]) -> str:
    shown = []
    for metric in metrics:
        moved = f" {_percent(metric.change.relative.value)}" if metric.change else ""
        shown.append(metric.rule.name + moved)
    return ", ".join(shown)


def _strong(verdict: Verdict) -> str:
    return f"**{verdict.value}**" if verdict in (Verdict.REGRESSION, Verdict.CANNOT_TELL) else verdict.value


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
