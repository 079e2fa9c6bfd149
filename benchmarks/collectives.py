"""Collectives of communication backends over sizes, as `sagellm comm measure` measures them.

    python -m benchmarks.collectives [--backends shm,gloo] [--ranks 2] [--rounds 20] [--out FILE]
"""

from typing import Any

import click

from benchmarks.output import Output, table, with_output
from sagellm.comm_backend.measure import measure


@click.command()
@click.option("--backends", default="shm,gloo", show_default=True, help="Backends; the last one is compared with.")
@click.option("--ranks", default=2, show_default=True, help="Processes of one thread each.")
@click.option("--rounds", default=20, show_default=True, help="Turns of each backend at each size.")
@with_output
def main(backends: str, ranks: int, rounds: int, output: Output) -> None:
    """Measure, print a table, and write the result."""
    names = backends.split(",")
    result = measure(names, ranks, rounds=rounds)
    last = result["backends"][names[-1]]
    rows = [_row(result, last, name, kind, size)
            for name in names[:-1] for kind in ("all_reduce", "all_gather") for size in result["copy_bytes_per_s"]]  # fmt: skip
    output.say(table(["backend", "KiB", "p50, us", f"times quicker than {names[-1]}", "share of a copy's bandwidth"], rows))
    output.finish(result)


def _row(result: dict[str, Any], last: dict[str, Any], name: str, kind: str, size: str) -> tuple[object, ...]:
    found, other = result["backends"][name][kind][size], last[kind][size]
    return (
        f"{name} {kind}", int(size) // 1024, f"{1e6 * found['p50_s']:.1f}", f"{other['p50_s'] / found['p50_s']:.1f}",
        f"{found['bytes_per_s'] / result['copy_bytes_per_s'][size]:.2f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
