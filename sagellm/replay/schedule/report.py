"""A replayed schedule as tables on a terminal, and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sagellm.core.figure import COLOURS, new_figure, save_figure
from sagellm.replay.schedule.metrics import groups
from sagellm.replay.schedule.session import Replayed

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = {
    "TTFT mean": lambda row: _ms(row.ttft_mean_s),
    "p50": lambda row: _ms(row.ttft_p50_s),
    "p95": lambda row: _ms(row.ttft_p95_s),
    "p99": lambda row: _ms(row.ttft_p99_s),
    "TPOT mean": lambda row: _ms(row.tpot_mean_s),
    "ITL p99": lambda row: _ms(row.itl_p99_s),
    "good requests/s": lambda row: "" if row.goodput is None else f"{row.goodput:.3f}",
    "tokens /s": lambda row: f"{row.tokens_per_s:.1f}",
    "makespan s": lambda row: f"{row.makespan_s:.2f}",
    "preempted": lambda row: f"{row.preempted:,}" if row.preempted else "",
}
FIGURES = {"ttft_mean_s": "mean TTFT", "ttft_p95_s": "its p95", "tpot_mean_s": "mean TPOT", "tokens_per_s": "tokens/s"}


def caption(found: Replayed) -> list[str]:
    """Lines about the log, the fit and the error of the prediction."""
    log, shape = found.log, found.log.shape
    left_out = f", {log.num_left_out:,} left out that did not end or got no token" if log.num_left_out else ""
    skipped = f", {log.num_skipped:,} lines skipped" if log.num_skipped else ""
    lines = [
        f"{log.path}: {len(log.requests):,} requests, {len(log.measured.steps):,} steps, {shape.num_blocks:,} blocks of "
        f"{shape.block_size} tokens, decided by {found.predicted_by}{left_out}{skipped}; times in ms",
        f"step times: {_fit('prefill', found.times.prefill_error)}, {_fit('decode', found.times.decode_error)} on steps "
        "held out",
    ]
    lines += [
        f"decisions of {name}: {run.decisions['carried_out_share']:.1%} of {run.decisions['steps']:,} carried out, "
        f"{run.decisions['as_expected_share']:.1%} used the tokens they expected"
        for name, run in found.runs.items() if run.decisions
    ]  # fmt: skip
    if found.prediction is None:
        lines.append(f"the log was made with {found.predicted_by}, which is not known here: no error of the prediction")
        return lines
    errors = [
        f"{label} {error:+.1%}" for name, label in FIGURES.items() if (error := found.prediction.errors[name]) is not None
    ]
    lines.append(f"error of the prediction, {found.predicted_by} against the log: {', '.join(errors)}")
    if (first := found.prediction.first_difference) is None:
        lines.append(f"all {found.prediction.num_steps_recorded:,} steps are the log's own")
    else:
        lines.append(
            f"the same steps up to number {first.index}; there the log has {first.recorded or 'none'}, "
            f"the virtual clock {first.predicted or 'none'}"
        )
    return lines


def _fit(phase: str, error) -> str:
    return f"no {phase}" if error is None else f"{phase} {error.median:.1%} median error"


def table(found: Replayed) -> Table:
    """A row a strategy; where tenants or priorities differ, one for each of them below it."""
    from rich.table import Table

    rows = []
    for name, run, figures in found.rows():
        rows.append((name, figures))
        parts = groups(run, found.targets)
        if len(parts) > 1:
            rows += [(f"  {tenant or '-'} {priority}", part) for tenant, priority, part in parts]
    made = Table(box=None, padding=(0, 1, 0, 0))
    made.add_column("strategy", no_wrap=True, vertical="bottom")
    shown = [header for header, cell in COLUMNS.items() if any(cell(figures) for _, figures in rows)]
    for header in shown:
        made.add_column(header.replace(" ", "\n"), justify="right", no_wrap=True, vertical="bottom")
    for name, figures in rows:
        made.add_row(name, *(COLUMNS[header](figures) for header in shown))
    return made


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f}"


def write_plot(found: Replayed, folder: Path) -> list[Path]:
    """Write `ttft.png`, the share of requests over the time to their first token, into the folder, made if need be.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    figure = new_figure(8, 5)
    axes = figure.subplots()
    for number, (name, run, _) in enumerate(found.rows()):
        times = np.sort([each.ttft_s for each in run.requests])
        style = {"linestyle": "--"} if run is found.log.measured else {}
        axes.step(times, np.arange(1, len(times) + 1) / len(times), label=name, color=COLOURS[number % len(COLOURS)], **style)
    axes.set(title=found.log.path, xlabel="TTFT, s", ylabel="share of requests", ylim=(0, 1))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9)
    return [save_figure(figure, folder / "ttft.png", make_folder=True)]
