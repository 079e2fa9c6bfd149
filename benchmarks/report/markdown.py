"""A result as Markdown: what ran where, what came out, what it means, and what is not to be trusted."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contestants import summary
from benchmarks.metrics.compute import MIN_PAIRS, paired_ratio
from benchmarks.metrics.definitions import grouped
from benchmarks.result import Result, Run

# Unit in the result -> (factor, unit shown), tried in this order until the largest value of a row is 1 or more.
SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1, "s"), (1e3, "ms"), (1e6, "µs")),
    "bytes": ((2**-30, "GiB"), (2**-20, "MiB"), (1, "bytes")),
}


def markdown(result: Result, plots: Sequence[Path] = ()) -> str:
    """The report. `plots`: files as they are to be linked, relative to where the report will lie."""
    sections = [
        [f"# Benchmark {result.name}", "", *_status(result)],
        ["## Where", "", *_table(("what", "value"), _flat(result.environment))],
        ["## Config", "", *_table(("key", "value"), _flat(result.config))],
    ]
    for scenario in result.scenarios():
        sections.append([f"## Scenario {scenario}", "", *_figures(result, scenario)])
        if comparison := _comparison(result, scenario):
            sections.append(comparison)
        if missing := _missing(result, scenario):
            sections.append(["Not measured:", "", *missing])
    sections.append(["## Runs that do not count", "", *_refused(result)])
    if client := _client(result):
        sections.append(["## Client and cache", "", *client])
    if plots:
        sections.append(["## Plots", *(f"\n![{plot.stem}]({plot.as_posix()})" for plot in plots)])
    sections.append(["## What the metrics mean", "", *_definitions(result)])
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def scaled(unit: str, largest: float) -> tuple[float, str]:
    """Factor and unit in which values up to `largest` of `unit` read well."""
    scales = SCALES.get(unit, ((1, unit),))
    return next((scale for scale in scales if largest * scale[0] >= 1), scales[0 if largest == 0 else -1])


def digits(value: float) -> str:
    """Four digits that matter; no exponent for large values."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def metric_names(result: Result, scenario: str) -> list[str]:
    """Those that a valid run of the scenario has, in the order of the result's definitions."""
    there = {name for run in _valid(result) if run.scenario == scenario for name in run.metrics}
    return [name for name in result.definitions if name in there] + sorted(there - result.definitions.keys())


def _status(result: Result) -> list[str]:
    counts = {status: sum(run.status == status for run in result.runs) for status in ("valid", "void", "failed")}
    reason = f": {_cell(result.reason)}" if result.reason else ""
    runs = ", ".join(f"{count} {status}" for status, count in counts.items())
    return [
        f"**{result.status}**{reason}",
        "",
        f"Started {result.started}, took {result.duration_s:.0f} s. Runs: {runs}. Schema `{result.schema_name}`.",
    ]


def _figures(result: Result, scenario: str) -> list[str]:
    contestants, names = result.contestants(), metric_names(result, scenario)
    if not names:
        return ["No valid run."]
    rows = []
    for name in names:
        values = [list(result.of(contestant, scenario, name).values()) for contestant in contestants]
        definition = result.definitions.get(name)
        largest = max(abs(summary(of)["median"]) for of in values if of)
        factor, unit = scaled(definition.unit if definition else "", largest)
        rows.append((f"`{name}`", unit, *(_spread(of, factor) for of in values)))
    return [
        "Median over the valid rounds (lower to upper quartile), and their number n.",
        "",
        *_table(("metric", "unit", *contestants), rows, right=2),
    ]


def _spread(values: list[float], factor: float) -> str:
    if not values:
        return "-"
    median, low, high = (digits(summary(values)[key] * factor) for key in ("median", "low", "high"))
    return f"{median} ({low} to {high}), n={len(values)}"


def _comparison(result: Result, scenario: str) -> list[str]:
    base, *others = result.contestants()
    rows = []
    for name in metric_names(result, scenario):
        cells = []
        for other in others:
            ratio = paired_ratio(result.independent([other, base], scenario, name))
            if ratio is None:
                cells.append("-")
            else:
                interval = "" if math.isnan(ratio.low) else f" ({ratio.low:.3f} to {ratio.high:.3f})"
                cells.append(f"{ratio.median:.3f}{interval}, n={ratio.num_pairs}")
        definition = result.definitions.get(name)
        rows.append((f"`{name}`", (definition and definition.better) or "-", *cells))
    if not others or not rows:
        return []
    return [
        f"Ratio to {base}, paired launch by launch, or round by round of one launch: median (95% bootstrap interval of the "
        f"median; none below {MIN_PAIRS} pairs), and the number of pairs n. Pairs in which {base} has 0 give no ratio.",
        "",
        *_table(("metric", "better", *(f"{other} / {base}" for other in others)), rows, right=2),
    ]


def _missing(result: Result, scenario: str) -> list[str]:
    """One line for each metric and reason, with the contestants it befell and how often."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for run in _valid(result):
        if run.scenario == scenario:
            for name, reason in run.absent.items():
                counts = found.setdefault((name, reason), {})
                counts[run.contestant] = counts.get(run.contestant, 0) + 1
    return [
        f"- `{name}`: {_cell(reason)} ({', '.join(f'{who}: {_runs(count)}' for who, count in counts.items())})"
        for (name, reason), counts in sorted(found.items())
    ]


def _refused(result: Result) -> list[str]:
    rows = [
        (run.scenario, run.contestant, run.round, run.status, run.reason or "no reason given")
        for run in result.runs
        if run.status != "valid"
    ]
    return _table(("scenario", "contestant", "round", "status", "reason"), rows) if rows else ["None."]


def _client(result: Result) -> list[str]:
    """Return reports of the load client and the cache check over all runs: the middle and the largest value."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for run in result.runs:
        for kind, values in (("client", run.client), ("cache", run.cache)):
            for name, value in values.items():
                found.setdefault((run.scenario, run.contestant, f"{kind}: {name}"), []).append(value)
    rows = [
        (scenario, contestant, name, digits(float(np.median(values))), digits(max(values)))
        for (scenario, contestant, name), values in found.items()
    ]
    return _table(("scenario", "contestant", "figure", "median", "largest"), rows, right=3) if rows else []


def _definitions(result: Result) -> list[str]:
    shown = {name for scenario in result.scenarios() for name in metric_names(result, scenario)}
    lines = []
    for names, definition in grouped({name: of for name, of in result.definitions.items() if name in shown}):
        better = f", {definition.better} is better" if definition.better else ""
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(f"- {listed} ({definition.unit}{better}): {_cell(definition.text)}")
    return lines or ["No metric was measured."]


def _valid(result: Result) -> list[Run]:
    return [run for run in result.runs if run.status == "valid"]


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key, value; what is empty or None is left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, (Mapping, list)) for inner in value):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{name}[{number}]")
    elif value not in (None, "", [], ()):
        yield name, ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _cell(text: Any) -> str:
    """Text that can break neither a table's row nor a paragraph."""
    return " ".join(str(text).split()).replace("|", "\\|")


def _table(head: Sequence[str], rows: Any, right: int | None = None) -> list[str]:
    """Lines of a table; columns from number `right` on are aligned to the right."""
    marks = ["--:" if right is not None and number >= right else "---" for number in range(len(head))]
    body = [[_cell(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in ([_cell(name) for name in head], marks, *body)]
