"""How well lifetime predictors are calibrated, when a gap begins and when a tier evicts: on a generated trace, and on one that
you bring.

    python -m benchmarks.lifetimes [--trace FILE] [--predictor NAME] [--capacity BLOCKS] [--horizon S] [--json]

FILE is a trace as `sagellm replay` reads it. The generated trace draws blocks by Zipf's law, with accesses a
Poisson process; so gaps of a block are exponential, with a mean of its own.
"""

import math
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks.output import Output, table, with_output
from sagellm.core.errors import SageError
from sagellm.kv_policy import LifetimePredictor, calibrate, lifetime_predictor_names, make_lifetime_predictor
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_policy.lifetime.base import reuse_probability
from sagellm.replay.traces import read_trace

NUM_BLOCKS, NUM_ACCESSES, ACCESSES_PER_S = 5_000, 60_000, 100.0
SAMPLED = 16


def zipf_trace(seed: int) -> list[tuple[float, int]]:
    """(time_s, key) of `NUM_ACCESSES` accesses."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, NUM_BLOCKS + 1)
    keys = random.choice(NUM_BLOCKS, NUM_ACCESSES, p=weights / weights.sum())
    times_s = np.cumsum(random.exponential(1 / ACCESSES_PER_S, NUM_ACCESSES))
    return list(zip(times_s.tolist(), keys.tolist(), strict=True))


def recorded(file: Path) -> list[tuple[float, int]]:
    """(time_s, key) of every block of every request, in row order. Raises TraceError: no trace that can be read."""
    trace = read_trace(file, unique_parents=False)
    times_s = np.repeat(trace.times_s, trace.blocks_of)
    return list(zip(times_s.tolist(), trace.keys.tolist(), strict=True))


class AtEviction(NamedTuple):
    """Sampled victims of an LRU tier: the mean predicted probability of use within a horizon, the share that was used,
    and how many victims."""

    predicted: float
    actual: float
    num_victims: int


def at_eviction(
    predictor: LifetimePredictor, accesses: list[tuple[float, int]], capacity: int, horizon_s: float
) -> AtEviction | None:
    """Sample every `SAMPLED`th victim in the second half of a trace whose horizon lies within it. Return None without a
    victim."""
    next_s = [math.inf] * len(accesses)
    later: dict[int, float] = {}
    for place in range(len(accesses) - 1, -1, -1):
        time_s, key = accesses[place]
        next_s[place] = later.get(key, math.inf)
        later[key] = time_s
    tier: OrderedDict[int, int] = OrderedDict()  # the place of the last use
    predicted, came = [], []
    num_evicted = 0
    for place, (time_s, key) in enumerate(accesses):
        predictor.observe(BlockKey(key), time_s)
        tier[key] = place
        tier.move_to_end(key)
        if len(tier) <= capacity:
            continue
        victim, last_use = tier.popitem(last=False)
        num_evicted += 1
        if num_evicted % SAMPLED == 0 and place > len(accesses) // 2 and time_s + horizon_s <= accesses[-1][0]:
            predicted.append(reuse_probability(predictor, BlockKey(victim), time_s, horizon_s))
            came.append(next_s[last_use] <= time_s + horizon_s)
    return AtEviction(float(np.mean(predicted)), float(np.mean(came)), len(came)) if came else None


@click.command()
@click.option("--trace", type=click.Path(path_type=Path), help="Trace file to measure besides the generated trace.")
@click.option("--predictor", "names", multiple=True, help="Lifetime predictor to measure; default: all.")
@click.option("--seed", type=click.IntRange(0), default=5, show_default=True, help="Seed of the workload.")
@click.option("--capacity", type=click.IntRange(1), default=1000, show_default=True, help="Blocks of the LRU tier.")
@click.option(
    "--horizon", type=click.FloatRange(0), default=60.0, show_default=True,
    help="Seconds after an eviction in which a use counts.",
)
@with_output
def main(
    trace: Path | None, names: tuple[str, ...], seed: int, capacity: int, horizon: float, output: Output
) -> None:  # fmt: skip
    """Print the calibration error of each predictor, the factor by which its median prediction is off, and the predicted and
    the actual share of an LRU tier's victims that are used again soon."""
    rows = []
    try:
        traces = {"zipf": zipf_trace(seed)} | ({trace.name: recorded(trace)} if trace else {})
        for title, accesses in traces.items():
            for name in names or lifetime_predictor_names():
                start = time.perf_counter()
                found = calibrate(make_lifetime_predictor(name), accesses)
                seconds = time.perf_counter() - start
                victims = at_eviction(make_lifetime_predictor(name), accesses, capacity, horizon)
                row = {"trace": title, "predictor": name, **found._asdict(), "seconds": seconds}
                rows.append(row | {"at_eviction": victims._asdict() if victims else None})
    except SageError as error:
        raise click.ClickException(str(error)) from None
    heads = ("trace", "predictor", "error", "factor", "victims", "predicted", "used again")
    output.say(table(heads, [_cells(row) for row in rows]))
    output.finish({"rows": rows})


def _cells(row: dict[str, Any]) -> list[str]:
    victims = row["at_eviction"]
    found = [f"{victims['num_victims']}", f"{victims['predicted']:.3f}", f"{victims['actual']:.3f}"] if victims else ["-"] * 3
    return [row["trace"], row["predictor"], f"{row['error']:.4f}", f"{row['median_ratio']:.2f}", *found]


if __name__ == "__main__":
    sys.exit(main())
