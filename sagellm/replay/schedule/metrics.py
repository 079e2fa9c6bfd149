"""Figures of a run: what clients would have seen of it. The README defines every one."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sagellm.replay.schedule.base import RequestTimes, Run

__all__ = ["Figures", "Targets", "figures", "groups", "meets"]


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of requests without their own; infinity: no target."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds, and per second. None: nothing to be counted. `goodput`: None if no request has a target."""

    num_requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_mean_s: float | None
    tpot_p99_s: float | None
    itl_p99_s: float | None
    goodput: float | None
    tokens_per_s: float
    makespan_s: float
    preempted: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def figures(
    requests: Sequence[RequestTimes], targets: Targets, preempted: int | None = None, span_s: float | None = None
) -> Figures:
    """`span_s`: of the run that these are part of; by default from their first arrival to their last token."""
    ttft = np.array([each.ttft_s for each in requests])
    tpot = np.array([each.tpot_s for each in requests if each.num_tokens > 1])
    itl = np.concatenate([np.diff(each.token_s) for each in requests] or [np.empty(0)])
    makespan_s = max(each.last_token_s for each in requests) - min(each.arrival_s for each in requests)
    span_s = span_s or makespan_s
    p50, p95, p99 = np.percentile(ttft, (50, 95, 99)).tolist()
    goodput = None
    if any(_has_target(each, targets) for each in requests):
        goodput = _rate(sum(meets(each, targets) for each in requests), span_s)
    return Figures(
        len(requests), float(ttft.mean()), p50, p95, p99, float(tpot.mean()) if len(tpot) else None,
        float(np.percentile(tpot, 99)) if len(tpot) else None, float(np.percentile(itl, 99)) if len(itl) else None, goodput,
        _rate(sum(each.num_tokens for each in requests), span_s), makespan_s, preempted,
    )  # fmt: skip


def groups(run: Run, targets: Targets) -> list[tuple[str, int, Figures]]:
    """(tenant, priority, figures) of those who ask as one, sorted; rates are those of the whole run's time."""
    found: dict[tuple[str, int], list[RequestTimes]] = {}
    for each in run.requests:
        found.setdefault((each.service.tenant_id, each.service.priority), []).append(each)
    span_s = figures(run.requests, targets).makespan_s
    return [(*key, figures(found[key], targets, span_s=span_s)) for key in sorted(found)]


def meets(request: RequestTimes, targets: Targets) -> bool:
    """Whether it got its first token, its further ones and its last one in time."""
    ttft_s, tpot_s, deadline_s = _targets(request, targets)
    # NaN, of a request with one token, is not above anything.
    return request.ttft_s <= ttft_s and not request.tpot_s > tpot_s and request.last_token_s <= deadline_s


def _targets(request: RequestTimes, targets: Targets) -> tuple[float, float, float]:
    asked = request.service
    ttft_s = asked.ttft_s if math.isfinite(asked.ttft_s) else targets.ttft_s
    tpot_s = asked.tpot_s if math.isfinite(asked.tpot_s) else targets.tpot_s
    return ttft_s, tpot_s, asked.deadline_s


def _has_target(request: RequestTimes, targets: Targets) -> bool:
    return any(map(math.isfinite, _targets(request, targets)))


def _rate(count: int, span_s: float) -> float:
    return count / span_s if span_s > 0 else 0.0
