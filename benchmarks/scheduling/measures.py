"""From token times to the figures that users name. Seconds from each request's arrival, unless said otherwise."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.scheduling.workloads import Job


def figures(jobs: Sequence[Job], token_s: Sequence[Sequence[float]]) -> dict[str, Any]:
    """By group and for all: TTFT, inter-token latency, requests within their targets a second, tokens a second."""
    groups = {job.group for job in jobs}
    end_s = max(job.arrival_s + times[-1] for job, times in zip(jobs, token_s, strict=True))
    rows = {group: [(job, times) for job, times in zip(jobs, token_s, strict=True) if job.group == group] for group in groups}
    rows["all"] = list(zip(jobs, token_s, strict=True))
    return {"seconds": end_s, **{name: _of_group(each, end_s) for name, each in rows.items()}}


def _of_group(rows: Sequence[tuple[Job, Sequence[float]]], end_s: float) -> dict[str, float]:
    first = np.array([times[0] for _, times in rows])
    gaps = np.concatenate([np.diff(times) for _, times in rows])
    met = [is_met(job, times) for job, times in rows]
    tokens = sum(len(times) + len(job.prompt) for job, times in rows)
    return {
        "requests": len(rows),
        "ttft_mean_s": float(first.mean()), **{f"ttft_p{p}_s": float(np.percentile(first, p)) for p in (50, 95, 99)},
        "ttft_max_s": float(first.max()),
        "itl_p50_s": float(np.percentile(gaps, 50)), "itl_p99_s": float(np.percentile(gaps, 99)),
        "goodput_per_s": sum(met) / end_s, "met_share": float(np.mean(met)), "tokens_per_s": tokens / end_s,
    }  # fmt: skip


def is_met(job: Job, times: Sequence[float]) -> bool:
    """Whether the answer kept to the request's targets: first token, and the mean of each further one."""
    ttft_s, tpot_s = (job.service.get(name, np.inf) / 1000 for name in ("ttft_slo_ms", "tpot_slo_ms"))
    per_token_s = (times[-1] - times[0]) / max(len(times) - 1, 1)
    return times[0] <= ttft_s and per_token_s <= tpot_s


def gaps_during(jobs: Sequence[Job], token_s: Sequence[Sequence[float]], group: str, of: str) -> np.ndarray:
    """Inter-token gaps of a group's requests, whole, that overlap the time from the arrival to the first token of the one
    request `of`."""
    (place,) = [number for number, job in enumerate(jobs) if job.group == of]
    start_s, end_s = jobs[place].arrival_s, jobs[place].arrival_s + token_s[place][0]
    gaps = []
    for job, times in zip(jobs, token_s, strict=True):
        if job.group == group:
            at = job.arrival_s + np.asarray(times)
            inside = (at[1:] > start_s) & (at[:-1] < end_s)
            gaps.append(np.diff(at)[inside])
    return np.concatenate(gaps)


def shares(jobs: Sequence[Job], token_s: Sequence[Sequence[float]], groups: tuple[str, str]) -> dict[str, float]:
    """Tokens of answers and prompts that each of two groups got while both had requests waiting: until the first of them had
    its last one begun."""
    until_s = min(
        max(job.arrival_s + times[0] for job, times in zip(jobs, token_s, strict=True) if job.group == group)
        for group in groups
    )
    served = dict.fromkeys(groups, 0)
    for job, times in zip(jobs, token_s, strict=True):
        at = job.arrival_s + np.asarray(times)
        served[job.group] += int((at <= until_s).sum()) + (len(job.prompt) if at[0] <= until_s else 0)
    total = sum(served.values())
    return {group: count / total for group, count in served.items()}
