"""A load on a fleet whose size a scaling policy changes, on the virtual clock."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sagellm.control_plane.base import PoolView
from sagellm.control_plane.config import ScalingConfig
from sagellm.control_plane.scaling import ScalingLoop, ScalingStep, step_fields
from sagellm.control_plane.sla.load import Load
from sagellm.control_plane.sla.profile import SetupCosts
from sagellm.control_plane.sla.simulate import Fleet, Outcome, joined
from sagellm.kv_policy.migration.cost_model import Link
from sagellm.replay.schedule.metrics import Targets
from sagellm.replay.schedule.virtual_run import times_of
from sagellm.scheduler_ir.simulation.base import EngineShape
from sagellm.scheduler_ir.simulation.requests import VirtualRequest
from sagellm.scheduler_ir.simulation.virtual_engine import VirtualEngine

__all__ = ["Elastic", "ScaledPool", "oscillations", "simulate_scaling"]


@dataclass
class ScaledPool:
    """A loop, its settings, and how many engines it begins with.

    Attributes:
        start_s: seconds that an engine takes to start, as measured.
    """

    loop: ScalingLoop
    config: ScalingConfig
    engines: int
    start_s: float


@dataclass(frozen=True)
class Elastic:
    """The run of a load.

    Attributes:
        outcome: times of the requests.
        engine_s: seconds of all engines, from the start of each to its end.
        span_s: from the first arrival to the last token.
        steps: by pool, each decision with its view.
    """

    outcome: Outcome
    engine_s: float
    span_s: float
    steps: dict[str, list[tuple[PoolView, ScalingStep]]]

    @property
    def engines(self) -> float:
        """Mean number of engines."""
        return self.engine_s / self.span_s

    def changes(self, pool: str) -> list[tuple[float, int]]:
        """Return (time, number of engines added) of each change of a pool."""
        return [(view.now_s, step.target - step.present) for view, step in self.steps[pool] if step.target != step.present]

    def record(self, pool: str) -> list[dict[str, Any]]:
        """Return the lines of a pool's decisions, as a manager records them."""
        return [step_fields(pool, number, *each) for number, each in enumerate(self.steps[pool], 1)]


@dataclass(eq=False)
class _Engine:
    virtual: VirtualEngine
    ready_s: float
    since_s: float
    running: list[VirtualRequest] = field(default_factory=list)
    drained_s: float | None = None

    @property
    def is_draining(self) -> bool:
        return self.drained_s is not None


class _Pool:
    """Engines of one role that share requests."""

    def __init__(self, name: str, scaled: ScaledPool, shape: EngineShape, costs: SetupCosts, begin_s: float) -> None:
        self.name, self._scaled, self._shape, self._costs = name, scaled, shape, costs
        self._begin_s = self._told_s = begin_s
        self.engines: list[_Engine] = []
        self.steps: list[tuple[PoolView, ScalingStep]] = []
        self.engine_s = 0.0
        self._num_arrived = 0
        self._recent: list[VirtualRequest] = []  # those that had not ended before the interval began
        self._grow(scaled.engines, begin_s, 0.0)

    def advance(self, now_s: float) -> None:
        """Run every step that begins before this time."""
        for each in self.engines:
            each.virtual.run(until_s=now_s)
            each.running = [one for one in each.running if not one.has_ended]

    def take(self, request: VirtualRequest) -> None:
        """Give a request that arrives now to the engine with the fewest requests. All are at this time."""
        able = [each for each in self.engines if each.ready_s <= request.arrival_s and not each.is_draining]
        chosen = min(able, key=lambda each: len(each.running))
        chosen.virtual.add(request)
        chosen.running.append(request)
        self._recent.append(request)
        self._num_arrived += 1

    def decide(self, now_s: float) -> None:
        """Let the loop decide, and start or drain engines."""
        for each in [each for each in self.engines if each.is_draining and not each.running]:
            self._remove(each, now_s)
        view = self._view(now_s)
        step = self._scaled.loop.step(view)
        self.steps.append((view, step))
        if self._scaled.config.dry_run:
            return
        self._grow(step.target - step.present, now_s, now_s + self._scaled.start_s)
        staying = [each for each in self.engines if not each.is_draining]
        for each in staying[step.target :]:
            each.drained_s = now_s

    def end(self, now_s: float) -> None:
        for each in list(self.engines):
            self._remove(each, now_s)

    def _grow(self, num: int, now_s: float, ready_s: float) -> None:
        for _ in range(num):
            self.engines.append(_Engine(VirtualEngine(self._shape, self._costs, []), ready_s, now_s))

    def _remove(self, engine: _Engine, now_s: float) -> None:
        """Count its time to its last token where it drains, or else to now."""
        until_s = now_s if engine.drained_s is None else max(engine.drained_s, engine.virtual.now_s)
        self.engine_s += min(until_s, now_s) - engine.since_s
        self.engines.remove(engine)

    def _view(self, now_s: float) -> PoolView:
        interval_s = now_s - self._told_s
        seen = [each for each in self._recent if each.token_s]
        first = [each.ttft_s for each in seen if self._told_s < each.token_s[0] <= now_s]
        ended = [each for each in seen if each.has_ended and each.token_s[-1] <= now_s]
        gaps = sum(len(each.token_s) - 1 for each in ended)
        staying = [each for each in self.engines if not each.is_draining]
        running = [one for each in self.engines for one in each.running]
        view = PoolView(
            now_s - self._begin_s, interval_s, self._num_arrived / interval_s, len(ended),
            prompt_tokens=sum(each.prompt_tokens for each in ended) / len(ended) if ended else None,
            output_tokens=sum(len(each.token_s) for each in ended) / len(ended) if ended else None,
            itl_s=sum(each.token_s[-1] - each.token_s[0] for each in ended) / gaps if gaps else None,
            ttft_s=sum(first) / len(first) if first else None,
            num_running=len(running), num_waiting=sum(not each.has_run for each in running),
            num_ready=sum(each.ready_s <= now_s for each in staying),
            num_starting=sum(each.ready_s > now_s for each in staying), num_draining=len(self.engines) - len(staying),
            min_engines=self._scaled.config.min, max_engines=self._scaled.config.max, start_s=self._scaled.start_s,
            role=self.name,
        )  # fmt: skip
        past = {id(each) for each in ended}
        self._recent = [each for each in self._recent if id(each) not in past]
        self._told_s, self._num_arrived = now_s, 0
        return view


def simulate_scaling(
    load: Load, fleet: Fleet, costs: SetupCosts, targets: Targets, pools: dict[str, ScaledPool], *, max_prefill_tokens: int,
    block_size: int = 64, link: Link | None = None, kv_bytes_per_token: int = 0,
) -> Elastic:  # fmt: skip
    """Run a load on pools of engines that grow and shrink.

    Requests go to the engine with the fewest. Engines that start take none, and those that drain end theirs.

    Args:
        fleet: shape of the engines; the numbers are those of `pools`.
        pools: "hybrid" alone, or "prefill" and "decode". Their loops decide by turns of the same interval.
        link: between a prefill and a decode engine.

    Raises ConfigError: a request that the pool of an engine cannot hold.
    """
    shape = EngineShape(
        block_size, fleet.kv_blocks, max_prefill_tokens, fleet.max_batch_size, prefix_caching="prefill" in pools
    )  # fmt: skip
    begin_s = load.requests[0].arrival_s
    made = {name: _Pool(name, pool, shape, costs, begin_s) for name, pool in pools.items()}
    link = link or Link(latency_s=0.0, bytes_per_s=1e30)
    front, back = made.get("hybrid") or made["prefill"], made.get("decode")
    asked: dict[Any, VirtualRequest] = {}
    later: dict[Any, VirtualRequest] = {}
    moving: list[VirtualRequest] = []

    def advance(now_s: float) -> None:
        """Run all engines up to a time; prompts that are computed move on meanwhile."""
        front.advance(now_s)
        if back is None:
            return
        for each in [each for each in moving if each.has_ended]:
            moving.remove(each)
            tokens, num = each.prompt_tokens, left[each.request_id]
            if num > 1:
                seconds = link.latency_s + tokens * kv_bytes_per_token / link.bytes_per_s
                # Full blocks have come; a short step computes the rest and takes the place of joining.
                rest = VirtualRequest(each.request_id, each.token_s[0] + seconds, tokens + 1, num - 1, cached_tokens=tokens)
                later[each.request_id] = rest
                waiting.append(rest)
        waiting.sort(key=lambda each: (each.arrival_s, each.request_id))
        while waiting and waiting[0].arrival_s <= now_s:
            request = waiting.pop(0)
            back.advance(request.arrival_s)
            back.take(request)
        back.advance(now_s)

    left = {each.request_id: each.num_generated for each in load.requests}
    waiting: list[VirtualRequest] = []
    interval_s = min(pool.config.interval_s for pool in pools.values())
    turn_s = begin_s + interval_s
    for each in load.requests:
        while turn_s <= each.arrival_s:
            advance(turn_s)
            for pool in made.values():
                pool.decide(turn_s)
            turn_s += interval_s
        advance(each.arrival_s)
        num = each.num_generated if back is None else 1
        request = VirtualRequest(each.request_id, each.arrival_s, each.prompt_tokens, num, cached_tokens=each.cached_tokens)
        asked[each.request_id] = request
        front.take(request)
        if back is not None:
            moving.append(request)
    advance(math.inf)
    whole = [joined(times_of(each), times_of(later[name]) if name in later else None) for name, each in asked.items()]
    end_s = max(each.last_token_s for each in whole)
    for pool in made.values():
        pool.end(end_s)
    outcome = Outcome(tuple(whole), targets, 0, {})
    steps = {name: pool.steps for name, pool in made.items()}
    return Elastic(outcome, sum(pool.engine_s for pool in made.values()), end_s - begin_s, steps)


def oscillations(changes: Sequence[tuple[float, int]], within_s: float) -> int:
    """Count changes that go back on the change before them within so many seconds."""
    return sum(now_s - last_s <= within_s and last * num < 0 for (last_s, last), (now_s, num) in pairwise(changes))
