"""Made-up results: they look as an engine run would leave them, with noise of a known size."""

import numpy as np

from benchmarks.gate.base import Rule
from benchmarks.gate.judge import Series
from benchmarks.result import Definition, Result, Run

LEVELS = {
    "ttft_p50_s": 0.060,
    "ttft_p95_s": 0.110,
    "tpot_p50_s": 0.012,
    "tpot_p95_s": 0.015,
    "mfu": 0.21,
    "kv_hit_rate_tokens": 0.62,
    "kv_hit_rate_blocks": 0.60,
    "comm_share": 0.0,
    "device_s_per_mtok": 2200.0,
    "cost_per_mtok": 0.61,
}
COMMITS = {"base": {"commit": "0" * 40, "changed": False}, "head": {"commit": "abc" * 13 + "a", "changed": True}}
MACHINE = {"processor": "Example CPU 3000", "cores": 2}


def noisy_runs(rounds, sd, rng, changes=None, round_sd=0.03):
    """Contestant -> round -> metric -> value. `sd`: of head / base in one round, for the latencies; throughput has half.

    Throughput, device time and cost are one measurement, as in an engine, and tails vary more than medians.
    """
    table = {}
    shared = rng.normal(0, round_sd, rounds)
    for contestant, factors in (changes or {"base": {}, "control": {}, "head": {}}).items():
        table[contestant] = []
        for number in range(rounds):
            common, prefill, decode, tail = rng.normal(0, sd / np.sqrt(2), 4)
            noise = {
                "ttft_p50_s": 0.6 * common + 0.8 * prefill,
                "ttft_p95_s": 0.6 * common + 0.6 * prefill + 0.8 * tail,
                "tpot_p50_s": 0.4 * common + 0.5 * decode,
                "tpot_p95_s": 0.4 * common + 0.5 * decode + 0.4 * tail,
                "device_s_per_mtok": 0.3 * common + 0.4 * decode,
            }
            noise["cost_per_mtok"] = noise["device_s_per_mtok"]
            noise["mfu"] = -noise["device_s_per_mtok"]
            sign = {"mfu": -1}
            table[contestant].append(
                {
                    metric: level
                    * np.exp(
                        noise.get(metric, 0.0) + (sign.get(metric, 1) * shared[number] if metric in noise else 0.0)
                    )
                    * factors.get(metric, 1.0)
                    for metric, level in LEVELS.items()
                }
            )
    return table


def make_result(table, **overrides):
    """A Result of contestant -> list of metrics, one a round."""
    runs = [
        Run(contestant=name, scenario="serve", round=number, seed=number, metrics=metrics)
        for name, rounds in table.items()
        for number, metrics in enumerate(rounds)
    ]
    metrics = {metric for run in runs for metric in run.metrics}
    values = {
        "name": "ci",
        "status": "complete",
        "started": "2025-01-01T00:00:00Z",
        "duration_s": 100.0,
        "config": {
            "name": "ci",
            "workload": {"num_requests": 20},
            "server": {},
            "rounds": len(runs),
            "contestants": [],
        },
        "environment": {"machine": dict(MACHINE), "versions": {"lmdeploy": "0.11.0"}, "commits": dict(COMMITS)},
        "definitions": {metric: Definition(unit=_unit(metric), better=_better(metric), text="") for metric in metrics},
        "runs": runs,
    }
    return Result(**{**values, **overrides})


def steady(rounds=6, head=None, names=("base", "head"), seed=0, sd=0.005):
    """Quiet runs: contestants `names`, the last with its metrics multiplied by `head`."""
    rng = np.random.default_rng(seed)
    changes = {name: {} for name in names}
    changes[names[-1]] = head or {}
    return make_result(noisy_runs(rounds, sd, rng, changes, round_sd=0.01))


def series(base, head, control=None, paired=True):
    arrays = [None if side is None else np.asarray(side, dtype=float) for side in (base, head, control)]
    return Series(*arrays, paired=paired)


def rule(**changes):
    return Rule(**{"metric": "ttft_p50_s", "better": "lower", "relative": 0.05, "absolute": 0.001, **changes})


def _unit(metric):
    if metric.endswith("_s"):
        return "s"
    return "device-s" if metric == "device_s_per_mtok" else ""


def _better(metric):
    return "higher" if metric in ("mfu", "kv_hit_rate_tokens", "kv_hit_rate_blocks") else "lower"
