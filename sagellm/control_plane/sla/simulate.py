"""A load on engines of a plan, on the virtual clock: which requests are in time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sagellm.control_plane.sla.load import Load
from sagellm.core.hooks import Phase
from sagellm.kv_policy.migration.cost_model import Link
from sagellm.replay.schedule.base import RecordedRequest, RequestTimes
from sagellm.replay.schedule.metrics import Figures, Targets, figures, meets
from sagellm.replay.schedule.virtual_run import virtual_run
from sagellm.scheduler_ir.simulation.base import EngineShape, StepCosts

__all__ = ["Fleet", "Outcome", "joined", "simulate"]


@dataclass(frozen=True)
class Fleet:
    """Engines that share a load.

    Attributes:
        prefill: engines that compute prompts alone; 0: each engine does both.
        decode: engines that answer.
        tensor_parallel: devices of each.
        lookahead: guesses of each decode step.
        max_batch_size: requests that run at once on one engine.
        kv_blocks: of each engine.
    """

    decode: int
    prefill: int = 0
    tensor_parallel: int = 1
    lookahead: int = 0
    max_batch_size: int = 1
    kv_blocks: int = 16

    @property
    def engines(self) -> int:
        return self.decode + self.prefill

    @property
    def devices(self) -> int:
        return self.engines * self.tensor_parallel

    @property
    def layout(self) -> str:
        split = f"{self.prefill} prefill + {self.decode} decode" if self.prefill else f"{self.decode}"
        return f"{split} x TP {self.tensor_parallel}"


@dataclass(frozen=True)
class Outcome:
    """The run of a load and its figures.

    Attributes:
        requests: times of each.
        busy: part of the time in steps, by "prefill" and "decode", the mean over the engines that have such steps.
    """

    requests: tuple[RequestTimes, ...]
    targets: Targets
    num_preempted: int
    busy: dict[str, float]

    @cached_property
    def figures(self) -> Figures:
        return figures(self.requests, self.targets, self.num_preempted)

    @property
    def share(self) -> float:
        """Part of the requests that are within the targets."""
        return sum(meets(each, self.targets) for each in self.requests) / len(self.requests)

    @property
    def late_first(self) -> float:
        """Part of the requests with a late first token."""
        return sum(each.ttft_s > self.targets.ttft_s for each in self.requests) / len(self.requests)

    @property
    def late_next(self) -> float:
        """Part of the requests whose further tokens come too slowly."""
        return sum(each.tpot_s > self.targets.tpot_s for each in self.requests) / len(self.requests)

    def to_dict(self) -> dict[str, Any]:
        found = self.figures
        names = ("ttft_p50_s", "ttft_p95_s", "tpot_mean_s", "tpot_p99_s", "tokens_per_s", "preempted")
        return {
            "share_in_time": self.share, "goodput_rps": found.goodput, "late_first_token": self.late_first,
            "late_next_tokens": self.late_next, "busy": self.busy, **{name: getattr(found, name) for name in names},
        }  # fmt: skip


def simulate(
    load: Load, fleet: Fleet, costs: StepCosts, targets: Targets, *, max_prefill_tokens: int, block_size: int = 64,
    speedup: float = 1.0, link: Link | None = None, kv_bytes_per_token: int = 0,
) -> Outcome:  # fmt: skip
    """Run a load on engines that take requests in turn.

    Args:
        speedup: arrivals come so many times as fast.
        link: between a prefill and a decode engine.

    Raises ConfigError: a request that the pool of an engine cannot hold.
    """
    has_split = fleet.prefill > 0  # what has come from a prefill engine is found like a cached prefix
    shape = EngineShape(
        block_size, fleet.kv_blocks, max_prefill_tokens, fleet.max_batch_size, prefix_caching=has_split
    )  # fmt: skip
    come = [replace(each, arrival_s=each.arrival_s / speedup) for each in load.requests]
    if not has_split:
        return _outcome(*_run(come, fleet.decode, shape, costs), targets)
    link = link or Link(latency_s=0.0, bytes_per_s=1e30)
    first, runs, preempted = _run([replace(each, num_generated=1) for each in come], fleet.prefill, shape, costs)
    by_id = {each.request_id: each for each in come}
    moved = []
    for each in first:
        asked = by_id[each.request_id]
        if asked.num_generated > 1:
            seconds = link.latency_s + asked.prompt_tokens * kv_bytes_per_token / link.bytes_per_s
            tokens = asked.prompt_tokens
            # Full blocks have come; a short step computes the rest and takes the place of joining.
            moved.append(RecordedRequest(
                each.request_id, each.first_token_s + seconds, tokens + 1, asked.num_generated - 1, cached_tokens=tokens
            ))  # fmt: skip
    rest: dict[Any, RequestTimes] = {}
    if moved:
        ended, more, again = _run(sorted(moved, key=lambda each: each.arrival_s), fleet.decode, shape, costs)
        rest, runs, preempted = {each.request_id: each for each in ended}, runs + more, preempted + again
    whole = [joined(each, rest.get(each.request_id)) for each in first]
    return _outcome(whole, runs, preempted, targets)


def _run(requests: Sequence[RecordedRequest], num_engines: int, shape: EngineShape, costs: StepCosts) -> Any:
    parts = [part for number in range(num_engines) if (part := requests[number::num_engines])]
    runs = [virtual_run(part, shape, costs) for part in parts]
    times = sorted((each for run in runs for each in run.requests), key=lambda each: (each.arrival_s, each.request_id))
    return times, runs, sum(run.num_preempted for run in runs)


def joined(first: RequestTimes, rest: RequestTimes | None) -> RequestTimes:
    if rest is None:
        return first
    times = (*first.token_s, *rest.token_s)
    return replace(first, num_tokens=len(times), last_token_s=times[-1], token_s=times)


def _outcome(times: Sequence[RequestTimes], runs: Sequence[Any], num_preempted: int, targets: Targets) -> Outcome:
    span_s = max(each.last_token_s for each in times) - min(each.arrival_s for each in times)
    busy = {}
    for phase in (Phase.PREFILL, Phase.DECODE):
        seconds = [sum(step.seconds for step in run.steps if step.phase is phase) for run in runs]
        seconds = [each for each in seconds if each > 0]
        busy[phase.value] = sum(seconds) / len(seconds) / span_s if seconds and span_s > 0 else 0.0
    return Outcome(tuple(times), targets, num_preempted, busy)
