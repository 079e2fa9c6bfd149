"""How well lifetime predictors are calibrated: on a generated trace, and on one that you bring.

    python -m benchmarks.lifetimes [--trace FILE] [--predictor NAME] [--json]

FILE has one JSON object a line with `timestamp` (ms) and `hash_ids`, as Mooncake's traces have. The generated trace draws
blocks by Zipf's law, with accesses a Poisson process; so gaps of a block are exponential, with a mean of its own.
"""

import json
import sys
import time
from pathlib import Path

import click
import numpy as np

from sagellm.core.errors import SageError, TraceError
from sagellm.kv_policy import calibrate, lifetime_predictor_names, make_lifetime_predictor

NUM_BLOCKS, NUM_ACCESSES, ACCESSES_PER_S = 5_000, 60_000, 100.0


def zipf_trace(seed: int) -> list[tuple[float, int]]:
    """(time_s, key) of `NUM_ACCESSES` accesses."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, NUM_BLOCKS + 1)
    keys = random.choice(NUM_BLOCKS, NUM_ACCESSES, p=weights / weights.sum())
    times_s = np.cumsum(random.exponential(1 / ACCESSES_PER_S, NUM_ACCESSES))
    return list(zip(times_s.tolist(), keys.tolist(), strict=True))


def read_trace(file: Path) -> list[tuple[float, int]]:
    """(time_s, key) of every block of every request, in row order. Raises TraceError: a line that is no request."""
    accesses = []
    try:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                accesses += [(row["timestamp"] / 1000, int(key)) for key in row["hash_ids"]]
            except (ValueError, TypeError, KeyError) as error:
                raise TraceError(f"{file}, line {number}: no timestamp and hash_ids ({error!r}).") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {file}: {error}.") from None
    return accesses


@click.command()
@click.option("--trace", type=click.Path(path_type=Path), help="Also this one.")
@click.option("--predictor", "names", multiple=True, help="Default: all that are known.")
@click.option("--seed", default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(trace: Path | None, names: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Print the calibration error of each predictor, and the factor by which its median prediction is off."""
    rows = []
    try:
        traces = {"zipf": zipf_trace(seed)} | ({trace.name: read_trace(trace)} if trace else {})
        for title, accesses in traces.items():
            for name in names or lifetime_predictor_names():
                start = time.perf_counter()
                found = calibrate(make_lifetime_predictor(name), accesses)
                rows.append(
                    {"trace": title, "predictor": name, **found._asdict(), "seconds": time.perf_counter() - start}
                )
    except SageError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        shares = " ".join(f"{share:.3f}" for share in row["shares"])
        error, factor = f"{row['error']:.4f}", f"{row['median_ratio']:.2f}"
        click.echo(f"{row['trace']:<26} {row['predictor']:<12} error {error}  factor {factor}  within: {shares}")


if __name__ == "__main__":
    sys.exit(main())
