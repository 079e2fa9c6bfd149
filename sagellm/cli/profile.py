"""`sagellm profile sla`: measures an engine under load, for `sagellm plan --profile`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sagellm.cli.evaluate import show_progress
from sagellm.cli.lazy import LazyGroup
from sagellm.cli.tables import show_rows
from sagellm.cli.values import Counts, answering
from sagellm.core.config import DTYPES, KV_SCHEMAS
from sagellm.core.devices import device_names
from sagellm.core.errors import ConfigError

if TYPE_CHECKING:
    from sagellm.control_plane.sla.measure import Grid
    from sagellm.control_plane.sla.profile import Point, SLAProfile

COLUMNS = {
    "TP": "tensor_parallel", "guesses": "lookahead", "requests": "concurrency", "KV tokens": "kv_tokens",
    "step ms": "step_ms", "steps/s": "steps_per_s", "prompts s": "prefill_s",
}  # fmt: skip
TARGET = 0.1  # of the median error of points left out
MOST = 1 << 20


@click.command()
@click.argument("model")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True,
    help="JSON file of the points; the points that it has are not measured again.",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Picture to draw: .png, .svg or .pdf.")
@click.option("--concurrency", type=Counts(1, 4096), default="1,4,16", show_default=True, help="Numbers of requests at once.")
@click.option(
    "--prompt-tokens", type=Counts(1, MOST), default="64,512,2048", show_default=True, help="Lengths of prompts."
)
@click.option("--tensor-parallel", type=Counts(1, 64), default="1", show_default=True, help="Numbers of devices an engine.")
@click.option("--lookaheads", type=Counts(0, 64), default="0", show_default=True, help="Numbers of guesses of a step.")
@click.option("--steps", type=click.IntRange(4), default=16, show_default=True, help="Decode steps of a measurement.")
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Measurements of a point.")
@click.option("--engines", type=click.IntRange(1, 64), default=1, show_default=True,
              help="Engines that compute on this machine at once; all but the measured one decode meanwhile.")  # fmt: skip
@click.option("--max-kv-tokens", type=click.IntRange(1), help="Most tokens in KV blocks [all points].")
@click.option("--device", type=click.Choice(device_names()), default="auto", show_default=True, help="Device of the engine.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Type of the weights.")
@click.option("--kv-schema", type=click.Choice(KV_SCHEMAS), default="auto", show_default=True, help="Type of keys and values.")
@click.option("--threads", type=click.IntRange(1), help="Compute threads of a CPU worker, which then are one device [all].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def sla(model: str, out: Path, plot: Path | None, as_json: bool, **given: Any) -> None:
    """Measure MODEL under load: time between tokens and throughput over KV in use, concurrency, devices and guesses.

    Each point is predicted from the others; the file has these errors. A run that was interrupted goes on where it ended.
    Exit code 0: written; 1: it could not be measured; 2: misuse.
    """
    with answering(as_json):
        from sagellm.control_plane.sla.figure import draw
        from sagellm.control_plane.sla.measure import measure_profile

        grid = _grid(given)
        settings = {name: given[name] for name in ("device", "dtype", "kv_schema", "threads")}
        with show_progress() as tick:
            profile = measure_profile(model, out, grid, settings, tick)
        if plot is not None:
            draw(profile, f"{Path(profile.facts['model']).name} on {profile.facts['processor']}", plot)
    _show(profile, out, as_json)


def _grid(given: dict[str, Any]) -> "Grid":
    from sagellm.control_plane.sla.measure import Grid

    axes = {name: given[name] for name in ("prompt_tokens", "tensor_parallel", "lookaheads", "steps", "rounds", "engines")}
    try:
        return Grid(given["concurrency"], **axes, max_kv_tokens=given["max_kv_tokens"])
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def _show(profile: "SLAProfile", out: Path, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(profile.model_dump(), indent=1))
        return
    show_rows([_row(each) for each in profile.points], COLUMNS, False)
    for setup, errors in profile.errors.items():
        told = ", ".join(f"{kind} {error.median:.1%} (p90 {error.p90:.1%})" for kind, error in errors.items())
        click.echo(f"median error of points left out, {setup}: {told}")
    click.echo(f"mean step over the quickest: {profile.slowdown:.2f}; plans multiply all times by it")
    click.echo(f"wrote {out}")
    if profile.worst_error > TARGET:
        text = f"an error is above {TARGET:.0%}; measure on a quieter machine, with more --rounds or more points."
        click.echo(text, err=True)


def _row(point: "Point") -> dict[str, Any]:
    prompts = "-" if point.prefill_s is None else f"{point.prefill_s:.3g}"
    return point.model_dump() | {
        "kv_tokens": round(point.kv_tokens), "step_ms": f"{1e3 * point.step_s:.3g}",
        "steps_per_s": f"{point.steps_per_s:.4g}", "prefill_s": prompts,
    }  # fmt: skip


profile = LazyGroup(
    {"sla": (lambda: sla, "Measure time between tokens and throughput under load.")},
    name="profile", help="Measure an engine on this machine.",
)  # fmt: skip
