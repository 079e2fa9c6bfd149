"""Rows as PNG files: hit rate and evictions over capacity, a line a policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.core.figure import COLOURS, new_figure, save_figure
from sagellm.replay.policies import BELADY
from sagellm.replay.run import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vP*X<>"


def write_plots(rows: Sequence[Row], title: str, folder: Path) -> list[Path]:
    """Write `hit_rate.png` and `evictions.png` into the folder, which is made if need be.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    files, rows = [], [row for row in rows if not row.error]
    for name, label, value in (
        ("hit_rate", "hit blocks / blocks, first admission", lambda row: row.hit_rate_block),
        ("evictions", "evicted blocks", lambda row: row.evictions),
    ):
        figure = new_figure(8, 5)
        axes = figure.subplots()
        _lines(axes, rows, value)
        if name == "hit_rate":
            _bound(axes, rows)
        axes.set(title=title, xlabel="capacity, blocks", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=9)
        files.append(save_figure(figure, folder / f"{name}.png", make_folder=True))
    return files


def _lines(axes: "Axes", rows: Sequence[Row], value) -> None:
    names = list(dict.fromkeys(row.policy for row in rows))
    capacities = sorted({row.capacity for row in rows})
    for number, name in enumerate(names):
        points = sorted((row.capacity, value(row)) for row in rows if row.policy == name)
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        axes.plot(*zip(*points, strict=True), label=name, **style)
    if len(capacities) > 1 and capacities[-1] / capacities[0] > 5:
        axes.set_xscale("log")
    axes.set_xticks(capacities, [f"{capacity:,}" for capacity in capacities])
    axes.minorticks_off()


def _bound(axes: "Axes", rows: Sequence[Row]) -> None:
    best = {row.capacity: row.belady_hit_rate_block for row in rows if row.belady_hit_rate_block is not None}
    if best and all(row.policy != BELADY for row in rows):
        axes.plot(*zip(*sorted(best.items()), strict=True), color="grey", linestyle="--", label="belady (bound)")
