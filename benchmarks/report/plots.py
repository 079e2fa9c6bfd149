"""Plots of a result as PNG files: latencies, throughput against concurrency, hit rate over time, A against B."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.contestants import summary
from benchmarks.load.samples import Samples
from benchmarks.metrics.compute import Ratio, latencies, paired_ratio
from benchmarks.metrics.definitions import PERCENTILES
from benchmarks.report.markdown import digits, metric_names, scaled
from benchmarks.result import Result, Run
from sagellm.core.figure import COLOURS, new_figure, save_figure

SamplesOf = Callable[[Run], Samples | None]

MARKERS = "osD^vP*"
LATENCY_TITLES = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Inter-token latency",
                  "e2e": "End-to-end latency"}  # fmt: skip
HIT_BINS = 30
LOG_FROM = 30.0  # axes that span a larger ratio than this are logarithmic


class Hits(NamedTuple):
    """A round's hit counters over time: seconds since its start, and tokens looked up and found since then, all [k]."""

    time_s: np.ndarray
    query_tokens: np.ndarray
    hit_tokens: np.ndarray


def write_plots(result: Result, folder: Path, samples_of: SamplesOf, samples_folder: Path | None = None) -> list[Path]:
    """Write into `folder` the plots that the result has data for; returns their files.

    `samples_folder` is what `Run.samples` is relative to, `folder` when not given: hit counters over time are looked for
    beside the samples, as `<stem>-hits.npz` with the arrays of `Hits`. Only valid runs are drawn.
    """
    figures: dict[str, Figure | None] = {}
    for scenario in result.scenarios():
        runs = [run for run in result.runs if run.scenario == scenario and run.status == "valid"]
        slug = re.sub(r"[^A-Za-z0-9.-]+", "-", scenario)
        figures[f"latency-{slug}"] = _latency(result, scenario, runs, samples_of)
        figures[f"hit-rate-{slug}"] = _hit_rate(result, scenario, runs, samples_folder or folder)
        figures[f"ratio-{slug}"] = _ratios(result, scenario)
    for family, scenarios in _concurrencies(result).items():
        slug = re.sub(r"[^A-Za-z0-9.-]+", "-", family)
        figures[f"throughput-{slug}"] = _throughput(result, family, scenarios)
    files = []
    for name, figure in figures.items():
        if figure is not None:
            files.append(save_figure(figure, folder / f"{name}.png"))
    return files


def _latency(result: Result, scenario: str, runs: list[Run], samples_of: SamplesOf) -> Figure | None:
    """Share of requests, or of gaps, at or under a latency; all valid rounds of a contestant together."""
    pooled: dict[str, dict[str, np.ndarray]] = {}
    for contestant in result.contestants():
        found = [samples_of(run) for run in runs if run.contestant == contestant]
        rounds = [latencies(samples) for samples in found if samples is not None]
        if rounds:
            pooled[contestant] = {name: np.concatenate([of[name] for of in rounds]) for name in LATENCY_TITLES}
    if not pooled:
        return None
    figure = new_figure(10, 7.5)
    figure.suptitle(f"{result.name}: latency of {scenario}, valid rounds together")
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, LATENCY_TITLES.items(), strict=True):
        _distribution(axes, title, {contestant: of[name] for contestant, of in pooled.items()}, result)
        axes.set_ylabel("share of gaps" if name == "itl" else "share of requests")
    return figure


def _distribution(axes: Axes, title: str, values: dict[str, np.ndarray], result: Result) -> None:
    # The legend stands between title and axes, where it covers no curve.
    axes.set_title(title, fontsize=11, pad=12 + 13 * len(values))
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.25)
    everything = np.concatenate(list(values.values()))
    if not len(everything):
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center")
        return
    factor, unit = scaled("s", float(np.median(everything)))
    for contestant, of in values.items():
        if len(of):
            marks = ", ".join(digits(value * factor) for value in np.percentile(of, PERCENTILES))
            label = f"{contestant} (p50, p95, p99: {marks} {unit})"
            axes.ecdf(of * factor, color=_colour(result, contestant), linewidth=1.6, label=label)
    for percentile in PERCENTILES[:2]:
        axes.axhline(percentile / 100, color="grey", linewidth=0.7, linestyle=":")
    positive = everything[everything > 0]
    # Not the extremes: two chunks that come together make a gap of some microseconds, and would rule the axis.
    low, high = np.percentile(positive, (1, 99)) if len(positive) else (1.0, 1.0)
    if high / low > LOG_FROM:
        _log_axis(axes, float(everything.max() / low))
        axes.set_xlim(low * factor / 2, float(everything.max()) * factor * 1.2)
    axes.set_xlabel(unit)
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, borderaxespad=0.2)


def _concurrencies(result: Result) -> dict[str, dict[int, str]]:
    """`serve@4` and `serve@16` -> {"serve": {4: "serve@4", 16: "serve@16"}}; families of at least two."""
    families: dict[str, dict[int, str]] = {}
    for scenario in result.scenarios():
        if match := re.fullmatch(r"(.+)@(\d+)", scenario):
            families.setdefault(match[1], {})[int(match[2])] = scenario
    return {family: dict(sorted(of.items())) for family, of in families.items() if len(of) > 1}


def _throughput(result: Result, family: str, scenarios: dict[int, str]) -> Figure | None:
    panels = (
        ("output_tokens_per_s", "Output throughput", "output tokens/s"),
        ("goodput_rps", "Goodput: answers within all SLOs", "requests/s"),
    )
    figure = new_figure(10, 4.5)
    figure.suptitle(f"{result.name}: throughput of {family} against concurrency (median, quartiles of rounds)")
    drawn = False
    for axes, (metric, title, unit) in zip(figure.subplots(1, 2), panels, strict=True):
        for contestant in result.contestants():
            found = {users: list(result.of(contestant, name, metric).values()) for users, name in scenarios.items()}
            points = {users: summary(values) for users, values in found.items() if values}
            if points:
                _points(axes, contestant, points, result)
                drawn = True
        axes.set(title=title, xlabel="concurrent requests", ylabel=unit, xscale="log")
        axes.set_xticks(list(scenarios), [str(users) for users in scenarios])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.1, y=0.15)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        if axes.has_data():
            axes.legend(fontsize=9)
    return figure if drawn else None


def _points(axes: Axes, contestant: str, points: dict[int, dict[str, float]], result: Result) -> None:
    median = np.array([point["median"] for point in points.values()])
    spread = [[point["median"] - point["low"] for point in points.values()],
              [point["high"] - point["median"] for point in points.values()]]  # fmt: skip
    style = {"color": _colour(result, contestant), "marker": _marker(result, contestant)}
    axes.errorbar(list(points), median, yerr=spread, capsize=3, label=contestant, **style)


def _hit_rate(result: Result, scenario: str, runs: list[Run], folder: Path) -> Figure | None:
    """Tokens found / looked up in each of `HIT_BINS` stretches of a round, all valid rounds of a contestant together."""
    found = {contestant: [hits for run in runs if run.contestant == contestant and (hits := _read_hits(run, folder))]
             for contestant in result.contestants()}  # fmt: skip
    end = max((float(hits.time_s[-1]) for rounds in found.values() for hits in rounds), default=0.0)
    if end <= 0:
        return None
    edges = np.linspace(0, end, HIT_BINS + 1)
    figure = new_figure(9, 4.5)
    axes = figure.subplots()
    for contestant, rounds in found.items():
        if rounds:
            looked = sum(np.diff(np.interp(edges, hits.time_s, hits.query_tokens)) for hits in rounds)
            hit = sum(np.diff(np.interp(edges, hits.time_s, hits.hit_tokens)) for hits in rounds)
            # A stretch in which nothing was looked up has no rate: a gap in the line.
            rate = np.divide(hit, looked, out=np.full(HIT_BINS, np.nan), where=looked > 0)
            axes.plot((edges[:-1] + edges[1:]) / 2, rate, color=_colour(result, contestant),
                      marker=_marker(result, contestant), markersize=4, label=contestant)  # fmt: skip
    axes.set_title(f"{result.name}: KV hit rate of {scenario} over time, first admissions")
    axes.set(xlabel="s since the start of the round", ylabel="tokens found / looked up")
    axes.set(xlim=(0, end), ylim=(-0.02, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9)
    return figure


def _read_hits(run: Run, folder: Path) -> Hits | None:
    if run.samples is None:
        return None
    samples = folder / run.samples
    file = samples.with_name(f"{samples.stem}-hits.npz")
    if not file.exists():
        return None
    with np.load(file, allow_pickle=False) as arrays:
        hits = Hits(*(arrays[name] for name in Hits._fields))
    return hits if len(hits.time_s) > 1 else None


def _ratios(result: Result, scenario: str) -> Figure | None:
    """A row a metric: the paired ratio to the first contestant as a dot, its interval as a line."""
    base, *others = result.contestants()
    rows: dict[str, dict[str, Ratio]] = {}
    for name in metric_names(result, scenario):
        ratios = {other: paired_ratio(result.independent([other, base], scenario, name)) for other in others}
        # A ratio of 0 has no place on the axis; the report's table has it.
        if there := {other: ratio for other, ratio in ratios.items() if ratio is not None and ratio.median > 0}:
            rows[name] = there
    if not rows:
        return None
    figure = new_figure(9, 1.6 + 0.32 * len(rows) * max(1, len(others) / 2))
    axes = figure.subplots()
    for number, other in enumerate(others):
        offset = 0.5 * ((number + 0.5) / len(others) - 0.5)
        mine = [(row + offset, ratios[other]) for row, ratios in enumerate(rows.values()) if other in ratios]
        _dots(axes, f"{other} / {base}", mine, _colour(result, other), _marker(result, other))
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), [_row_name(result, name) for name in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _ratio_axis(axes, [ratio for ratios in rows.values() for ratio in ratios.values()])
    axes.grid(alpha=0.25)
    figure.suptitle(f"{result.name}: {scenario} against {base}, paired by launch or round")
    axes.legend(fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    axes.set_xlabel("ratio pair by pair: median and 95% bootstrap interval; 1 is no change")
    return figure


def _dots(axes: Axes, label: str, rows: list[tuple[float, Ratio]], colour: str, marker: str) -> None:
    for place, ratio in rows:
        if not math.isnan(ratio.low):
            axes.plot((ratio.low, ratio.high), (place, place), color=colour, linewidth=2, alpha=0.6)
    medians, places = [ratio.median for _, ratio in rows], [place for place, _ in rows]
    axes.plot(medians, places, color=colour, marker=marker, linestyle="", markersize=6, label=label)


def _ratio_axis(axes: Axes, ratios: list[Ratio]) -> None:
    """Room for every interval, and not so little that noise of a thousandth fills the picture."""
    ends = [end for ratio in ratios for end in ratio[:3] if not math.isnan(end) and end > 0] + [0.95, 1.05]
    low, high = min(ends), max(ends)
    if high / low > LOG_FROM / 10:
        _log_axis(axes, high / low)
    axes.set_xlim(low / (high / low) ** 0.05, high * (high / low) ** 0.05)


def _log_axis(axes: Axes, span: float) -> None:
    """`span`: largest value / smallest; wide axes have room for powers of ten only."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 500 else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _row_name(result: Result, name: str) -> str:
    definition = result.definitions.get(name)
    better = definition.better if definition else None
    return f"{name} ({better} is better)" if better else name


def _colour(result: Result, contestant: str) -> str:
    return COLOURS[result.contestants().index(contestant) % len(COLOURS)]


def _marker(result: Result, contestant: str) -> str:
    return MARKERS[result.contestants().index(contestant) % len(MARKERS)]
