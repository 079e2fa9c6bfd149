"""Eviction policies beside libCacheSim's on the same requests, and by themselves at other capacities.

    python -m benchmarks.policy_peers [--libcachesim PYTHON] [--trace FILE] [--out FOLDER]

PYTHON is the interpreter of an environment that has the peer; `benchmarks/policies/README.md` says how to make one. Both are
processes of their own, up at once and asked in turn. First each request's hit is compared, then time is taken. FILE is a
trace as `sagellm replay` reads it; without one, sessions are generated.
"""

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.contestants import interleave, paired_ratio, summary
from benchmarks.machine import describe
from benchmarks.output import progress, report
from benchmarks.peers.process import ContestantProcess
from benchmarks.policies.contestants import POLICIES
from benchmarks.policies.report import OURS, PEER, markdown
from benchmarks.policies.workload import Rows, sessions, zipf
from benchmarks.process_cost import spent
from sagellm.replay.traces import read_trace

WORKER = "benchmarks.policies.worker"
ZIPF_CAPACITIES = (1, 2, 3, 5, 10, 20, 37, 100, 1_000, 5_000)
TRACE_CAPACITIES = (1_000, 5_000, 20_000)
CAPACITY = 1_000  # of what is timed
GROWING = (1_000, 10_000, 100_000, 1_000_000)


@click.command()
@click.option("--libcachesim", help="Python interpreter with libcachesim 0.3.5.")
@click.option(
    "--trace", type=click.Path(path_type=Path, dir_okay=False),
    help="Trace file that sagellm replay reads; default: generated sessions.",
)
@click.option("--requests", default=2_000_000, show_default=True, help="Requests that are timed in one call.")
@click.option("--objects", default=100_000, show_default=True, help="Different objects of the requests.")
@click.option(
    "--compared", default=300_000, show_default=True,
    help="Requests whose hits are compared with the peer's.",
)
@click.option("--single", default=2_000_000, show_default=True, help="Requests that are timed one by one.")
@click.option(
    "--growing", default=8_000_000, show_default=True,
    help="Requests at growing capacities; 0 skips this part.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=11, show_default=True, help="Rounds of each contestant.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of the workload.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False),
    help="Folder for policy_peers.json, .csv and .md.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(out: Path | None, as_json: bool, **options: Any) -> None:
    """Measure, print a table, and write the result. Exit code 1: a hit differs."""
    result = report("policy_peers", lambda: compare(options), markdown, out=out, as_json=as_json)
    sys.exit(1 if any(row["num_different"] for row in result["agreement"]) else 0)


def compare(options: dict[str, Any]) -> dict[str, Any]:
    """The result, ready to be written. Raises SageError or ValueError for what cannot be measured."""
    load, seed = os.getloadavg()[0], options["seed"]
    rows = _recorded(options["trace"]) if options["trace"] else sessions(seed, 8_000, 500, 8)
    python = {OURS: sys.executable} | ({PEER: options["libcachesim"]} if options["libcachesim"] else {})
    with tempfile.TemporaryDirectory() as folder, progress("policies", _num_answers(options, len(python))) as advance:
        for file, keys in (
            ("compared", zipf(seed, options["compared"], max(options["compared"] // 15, 1), 1.0)),
            ("trace", rows.keys.astype(np.int64) + 1),
            ("timed", zipf(seed, options["requests"], options["objects"], 1.0)),
            ("single", zipf(seed, options["single"], options["objects"], 1.0)),
        ):
            np.save(Path(folder) / f"{file}.npy", keys)
        with contextlib.ExitStack() as stack:
            processes = []
            for name, interpreter in python.items():
                arguments = {"contestant": name, "folder": folder}
                process = ContestantProcess(name, interpreter, WORKER, arguments, advance)
                processes.append(stack.enter_context(process))
            about = {process.name: process.about() for process in processes}
            agreement = _agreement(processes)
            batch = _speed(processes, "timed", "batch", options["requests"], options["rounds"])
            singly = _speed(processes, "single", "singly", options["single"], options["rounds"])
        return {
            "machine": describe(), "load": {"before": load, "after": os.getloadavg()[0]},
            "options": {**options, "trace": options["trace"] and options["trace"].name, "libcachesim": None},
            "about": about, "agreement": agreement, "batch": batch, "singly": singly,
            "prefix": _prefix(rows, options["rounds"], advance),
            "growing": _growing(seed, options["growing"], advance),
        }  # fmt: skip


def _recorded(path: Path) -> Rows:
    """Raises TraceError."""
    trace = read_trace(path)
    return Rows(trace.keys, trace.offsets)


def _agreement(processes: list[ContestantProcess]) -> list[dict[str, Any]]:
    """Hits of the peer and ours, request by request. A capacity that the peer has not is left out."""
    if len(processes) < 2:
        return []
    found = []
    for file, capacities in (("compared", ZIPF_CAPACITIES), ("trace", TRACE_CAPACITIES)):
        for process in processes:
            num_requests = process.ask({"do": "load", "file": f"{file}.npy"})
        for capacity in capacities:
            for policy in POLICIES:
                files = [process.ask({"do": "hits", "policy": policy, "capacity": capacity}) for process in processes]
                if None in files:
                    continue
                ours, theirs = (np.load(one) for one in files)
                found.append({
                    "requests": file, "num_requests": num_requests, "policy": policy, "capacity": capacity,
                    "num_different": int(np.count_nonzero(ours != theirs)), "hit_rate": float(ours.mean()),
                })  # fmt: skip
    return found


def _speed(processes: list[ContestantProcess], file: str, do: str, num_requests: int, rounds: int) -> dict[str, Any]:
    """Millions of requests a second of CPU time, by policy and contestant, and ours over the peer's round by round."""
    for process in processes:
        process.ask({"do": "load", "file": f"{file}.npy"})
    found: dict[str, Any] = {}
    for policy in POLICIES:
        answers = interleave(processes, {"do": do, "policy": policy, "capacity": CAPACITY}, rounds)
        rates = {name: [num_requests / row["cpu_ns"] * 1e3 for row in rows] for name, rows in answers.items()}
        found[policy] = {name: summary(values) for name, values in rates.items()}
        if PEER in rates:
            found[policy]["ratio"] = paired_ratio(rates[OURS], rates[PEER])
        found[policy]["rounds"] = rates
    return found


def _prefix(rows: Rows, rounds: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds of CPU time for all rows, by policy and capacity."""
    from sagellm import _core

    found: dict[str, Any] = {"num_blocks": len(rows.keys), "num_rows": len(rows.offsets) - 1}
    for policy in _core.policy_names():
        for capacity in TRACE_CAPACITIES:
            times, results = [], []
            once = functools.partial(_core.replay_prefix, policy, capacity, rows.keys, rows.offsets)
            for _ in range(rounds):
                times.append(spent(lambda: results.append(once())).cpu_ns / 1e6)  # noqa: B023
            hit_rate = float(results[-1].hit_blocks.sum() / len(rows.keys))
            found.setdefault(policy, {})[str(capacity)] = {"ms": summary(times), "hit_rate": hit_rate}
            advance()
    return found


def _growing(seed: int, num_requests: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Nanoseconds of CPU time, by policy and capacity: an access of a flat cache, which the first half of the requests
    filled, and a block of replayed prefixes, reading the trace included."""
    from sagellm import _core

    found: dict[str, Any] = {"access": {}, "block": {}}
    if num_requests == 0:
        return found
    keys, half = zipf(seed, num_requests, num_requests, 0.8), num_requests // 2
    rows = sessions(seed, num_requests // 50, num_requests // 400, 8)
    for policy in _core.policy_names():
        for capacity in GROWING:
            taken = spent(lambda: _core.replay_prefix(policy, capacity, rows.keys, rows.offsets))  # noqa: B023
            found["block"].setdefault(policy, {})[str(capacity)] = taken.cpu_ns / len(rows.keys)
            advance()
            if policy == "belady":  # reading its future would be most of what is measured
                continue
            cache = _core.ObjectCache(policy, capacity)
            cache.access_many(keys[:half])
            taken = spent(lambda: cache.access_many(keys[half:]))  # noqa: B023
            found["access"].setdefault(policy, {})[str(capacity)] = taken.cpu_ns / (num_requests - half)
            advance()
    return found


def _num_answers(options: dict[str, Any], num_contestants: int) -> int:
    compared = len(POLICIES) * (len(ZIPF_CAPACITIES) + len(TRACE_CAPACITIES)) + 2 if num_contestants > 1 else 0
    timed = 2 * (len(POLICIES) * options["rounds"] + 1)
    return (
        num_contestants * (compared + timed) + 14 * len(TRACE_CAPACITIES) + 27 * len(GROWING) * (options["growing"] > 0)
    )


if __name__ == "__main__":
    main()
