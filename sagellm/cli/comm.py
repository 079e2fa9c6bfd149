"""`sagellm comm measure`: what collectives and messages cost on this machine."""

import json
from pathlib import Path
from typing import Any

import click

from sagellm.cli.values import JSON_FLAG, answering


@click.command()
@click.option("--backends", default="shm,gloo", show_default=True, help="Backends, separated by commas.")
@click.option("--ranks", type=click.IntRange(2, 64), default=2, show_default=True, help="Processes of one thread each.")
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Turns of each backend at each size.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Picture of the bandwidths, .png or .svg.")
@JSON_FLAG
def measure(backends: str, ranks: int, rounds: int, plot: Path | None, as_json: bool) -> None:
    """Measure all-reduce, all-gather, messages and overlap of backends, and a plain copy.

    Exit code 0: done; 1: a backend does not work here.
    """
    from sagellm.comm_backend.measure import measure as measured
    from sagellm.comm_backend.measure import write_plot

    with answering(as_json):
        result = measured(backends.split(","), ranks, rounds=rounds)
        if plot is not None:
            write_plot(result, plot)
    if as_json:
        click.echo(json.dumps(result, indent=1))
        return
    _show(result)
    if plot is not None:
        click.echo(f"wrote {plot}")


def _show(result: dict[str, Any]) -> None:
    from sagellm.cli.tables import show_rows

    rows = []
    for size, copied in result["copy_bytes_per_s"].items():
        for kind in ("all_reduce", "all_gather"):
            for name, found in result["backends"].items():
                each = found[kind][size]
                rows.append({
                    "size": f"{int(size) // 1024} KiB", "kind": kind, "backend": name, "p50": f"{1e6 * each['p50_s']:.1f}",
                    "p99": f"{1e6 * each['p99_s']:.1f}", "rate": f"{each['bytes_per_s'] / 1e9:.2f}",
                    "copy": f"{each['bytes_per_s'] / copied:.2f}",
                })  # fmt: skip
    columns = {"size": "size", "collective": "kind", "backend": "backend", "p50, us": "p50", "p99, us": "p99",
               "GB/s": "rate", "of a copy": "copy"}  # fmt: skip
    show_rows(rows, columns, False)
    rows = [
        {
            "backend": name, "p50": f"{1e6 * found['message_s']['p50_s']:.1f}",
            "p99": f"{1e6 * found['message_s']['p99_s']:.1f}", "hidden": f"{found['hidden']:.0%}",
        }
        for name, found in result["backends"].items()
    ]  # fmt: skip
    show_rows(rows, {"backend": "backend", "message p50, us": "p50", "p99, us": "p99", "hidden": "hidden"}, False)
    click.echo(f"topology detected in {1e3 * result['topology_s']:.1f} ms; candidates: {', '.join(result['candidates'])}")
    click.echo(f"reason: {result['reason']}")
    for kind, name in result["chosen"].items():
        click.echo(f"--comm-backend auto takes {name} for {kind}{' (gloo)' if name == 'group' else ''}")
