"""A made-up result of two contestants at two concurrencies and of one component, with samples and hit counters."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.config import Price, Slo, make_config
from benchmarks.load.samples import Samples
from benchmarks.metrics import compute
from benchmarks.metrics.definitions import DEFINITIONS
from benchmarks.result import Definition, Result, Run

ROUNDS, NUM_REQUESTS, NUM_TOKENS = 6, 30, 12
SLOWDOWN = {"base": 1.0, "head": 1.1}
LOOKUP = Definition(unit="s", better="lower", text="Wall time of one lookup.")


def make_samples(rng: np.random.Generator, slowdown: float, users: int) -> Samples:
    sent = np.sort(rng.uniform(0, 4, NUM_REQUESTS))
    first = sent + slowdown * rng.lognormal(np.log(0.02 * users), 0.3, NUM_REQUESTS)
    gaps = rng.lognormal(np.log(0.03), 0.25, (NUM_REQUESTS, NUM_TOKENS - 1))
    arrivals = np.column_stack([first, first[:, None] + np.cumsum(gaps, axis=1)])
    return Samples(
        scheduled_s=sent, sent_s=sent, first_s=arrivals[:, 0], last_s=arrivals[:, -1],
        prompt_tokens=np.full(NUM_REQUESTS, 100), output_tokens=np.full(NUM_REQUESTS, NUM_TOKENS),
        ok=np.ones(NUM_REQUESTS, dtype=bool), chunk_offsets=np.arange(NUM_REQUESTS + 1) * NUM_TOKENS,
        chunk_s=arrivals.ravel(), chunk_tokens=np.ones(arrivals.size, dtype=np.int64),
        errors=np.full(NUM_REQUESTS, ""),
    )  # fmt: skip


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The result, and the folder of its samples."""
    folder, rng = tmp_path_factory.mktemp("outcome"), np.random.default_rng(7)
    runs = [
        make_run(rng, folder, contestant, users, number)
        for number in range(ROUNDS)
        for contestant in SLOWDOWN
        for users in (4, 16)
    ]
    runs += [
        Run(contestant=name, scenario="lookup", round=number, seed=1, metrics={"lookup_s": rng.normal(2e-6, 1e-7)})
        for number in range(ROUNDS)
        for name in SLOWDOWN
    ]
    runs[0] = runs[0].model_copy(update={"status": "void", "reason": "the client lagged | by 12%"})
    runs[5] = runs[5].model_copy(update={"status": "failed", "reason": "the server ended", "metrics": {}})
    config = make_config(
        {"name": "demo", "workload": {"arrivals": {"kind": "closed", "concurrency": 4}, "num_requests": NUM_REQUESTS,
         "prompt_tokens": {"kind": "constant", "value": 100}, "output_tokens": {"kind": "constant", "value": 12}}}
    )  # fmt: skip
    result = Result(
        name="demo", status="partial", reason="stopped by its user", started="2025-01-01T00:00:00Z", duration_s=61.2,
        config=config.model_dump(mode="json"), definitions={**DEFINITIONS, "lookup_s": LOOKUP}, runs=runs,
        environment={"machine": {"processor": "A CPU", "cores": 2}, "versions": {"torch": "2"}, "commit": "abc"},
    )  # fmt: skip
    return result, folder


def make_run(rng: np.random.Generator, folder: Path, contestant: str, users: int, number: int) -> Run:
    samples = make_samples(rng, SLOWDOWN[contestant], users)
    stem = f"{contestant}-{users}-{number}"
    samples.write(folder / f"{stem}.npz")
    time_s = np.linspace(0, 5, 60)
    asked = 600.0 * np.arange(60)
    found = np.cumsum(600 * 0.8 * (1 - np.exp(-time_s)) * rng.uniform(0.8, 1, 60))
    np.savez(folder / f"{stem}-hits.npz", time_s=time_s, query_tokens=asked, hit_tokens=found)
    metrics, absent = compute.request_metrics(samples, Slo(ttft_s=0.4, tpot_s=0.1))
    costs = compute.cost_metrics(1, compute.wall_s(samples), compute.output_tokens(samples), Price(per_device_hour=2))
    metrics |= costs.metrics | {"comm_share": 0.0, "kv_hit_rate_tokens": found[-1] / asked[-1], "mfu": 0.3,
                                "peak_memory_bytes": 1.2e9 * rng.normal(1, 0.01)}  # fmt: skip
    return Run(
        contestant=contestant, scenario=f"serve@{users}", round=number, seed=number, metrics=metrics,
        absent={**absent, "kv_hit_rate_retries": "no request was admitted again"},
        client={"lag": 0.01}, cache={"hit_tokens": float(found[-1])}, samples=f"{stem}.npz",
    )  # fmt: skip
