"""The cheapest engines that keep to latency targets under a load: every choice of a profile on the virtual clock."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sagellm.accel.speculative.planning.recommend import tokens_of_step
from sagellm.control_plane.sla.load import Load
from sagellm.control_plane.sla.profile import Setup, SetupCosts, SLAProfile
from sagellm.control_plane.sla.simulate import Fleet, Outcome, simulate
from sagellm.core.errors import CapacityError, ConfigError
from sagellm.kv_policy.migration.cost_model import Link
from sagellm.replay.schedule.metrics import Targets

__all__ = ["PIPELINE", "Plan", "Planner", "Wanted"]

PIPELINE = "1: LMDeploy has no pipeline parallelism"
MIN_BLOCKS = 16  # LMDeploy refuses fewer
SPARE_BLOCKS = 1.1  # of the least pool that is enough
MOST, CLOSE = 64.0, 1.05  # of the search for the largest load: its end, and how close it comes
BEYOND = 1.15  # times the largest load: what is late there is what limits the plan

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """Targets and limits.

    Attributes:
        share: part of the requests that must be within the targets.
        devices: most of them.
        acceptance: chance that a guess is right if those before it were; None: no speculation.
        memory: bytes of one device for weights and KV blocks; None: as many blocks as the load needs.
        weight_bytes: of the model.
        link: between a prefill and a decode engine; None: moving keys and values costs nothing.
    """

    targets: Targets
    devices: int
    share: float = 0.95
    acceptance: float | None = None
    memory: int | None = None
    weight_bytes: int = 0
    link: Link | None = None


@dataclass(frozen=True)
class Plan:
    """A choice of engines.

    Attributes:
        meets: every load keeps to the targets.
        outcomes: by load.
        scale: the loads may come so many times as fast; 0 where they miss the targets as they are.
        limit: what makes requests late first, in words.
        one_more: the best of one more device, with its own `scale`; None if it was not asked for.
        considered: choices that were simulated.
    """

    fleet: Fleet
    meets: bool
    outcomes: tuple[Outcome, ...]
    scale: float
    limit: str
    one_more: "Plan | None" = None
    considered: int = 0

    @property
    def share(self) -> float:
        return min(each.share for each in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        fleet = asdict(self.fleet) | {"engines": self.fleet.engines, "devices": self.fleet.devices}
        return {
            "fleet": fleet | {"pipeline_parallel": PIPELINE}, "meets": self.meets, "share_in_time": self.share,
            "outcomes": [each.to_dict() for each in self.outcomes], "scale": self.scale, "limit": self.limit,
            "one_more_device": None if self.one_more is None else self.one_more.to_dict(), "considered": self.considered,
        }  # fmt: skip


class Planner:
    """Chooses engines for loads by a profile.

    Args:
        tick: told what is simulated.

    Raises ConfigError: too few points of every setup, or a request beyond the profile's model or memory.
    """

    def __init__(
        self, profile: SLAProfile, loads: Sequence[Load], wanted: Wanted, tick: Progress = lambda text: None
    ) -> None:
        self._profile, self._loads, self._wanted, self._tick = profile, tuple(loads), wanted, tick
        self._costs: dict[Setup, SetupCosts] = {}
        for setup in profile.setups:
            if setup[1] and wanted.acceptance is None:
                continue
            tokens = tokens_of_step(wanted.acceptance or 0.0, setup[1])
            self._costs[setup] = profile.costs(setup, tokens)
        if not self._costs:
            raise ConfigError("the profile has no setup without guesses; measure one, or give --acceptance.")
        self._block_size = int(profile.facts["block_size"])
        self._blocks_each = -(-max(load.longest for load in loads) // self._block_size) + 1
        self._considered = 0

    def choose(self) -> Plan:
        """Return the plan with the fewest devices that meets the targets, or else the one with most requests in time."""
        best: tuple[Fleet, tuple[Outcome, ...]] | None = None
        for devices in range(1, self._wanted.devices + 1):
            found = self._best(devices)
            if found is not None and (best is None or _share(found[1]) > _share(best[1])):
                best = found
            if best is not None and self._is_met(best[1]):
                break
        if best is None:
            raise CapacityError(
                f"no choice of up to {self._wanted.devices} devices fits: the smallest setup of the profile has "
                f"{min(setup[0] for setup in self._costs)} devices; one request needs {self._blocks_each} KV blocks, and a "
                f"device holds {self._most_blocks(1)}. Give more --devices or --memory, or shorter requests."
            )
        plan = self._plan(*best)
        return replace(plan, one_more=self._one_more(plan), considered=self._considered)

    def run(self, fleet: Fleet, speedup: float = 1.0) -> tuple[Outcome, ...]:
        """Return what becomes of each load."""
        self._considered += 1
        facts = self._profile.facts
        costs = self._costs[fleet.tensor_parallel, fleet.lookahead]
        kv_bytes = facts[f"block_bytes_{fleet.tensor_parallel}"] * fleet.tensor_parallel // self._block_size
        return tuple(
            simulate(
                load, fleet, costs, self._wanted.targets, max_prefill_tokens=int(facts["max_prefill_tokens"]),
                block_size=self._block_size, speedup=speedup, link=self._wanted.link, kv_bytes_per_token=kv_bytes,
            )
            for load in self._loads
        )  # fmt: skip

    def _best(self, devices: int, speedup: float = 1.0) -> tuple[Fleet, tuple[Outcome, ...]] | None:
        """Return the choice of exactly so many devices with most requests in time; the quickest one of equals."""
        found = None
        for fleet in self._fleets(devices):
            self._tick(f"{fleet.layout}, {fleet.lookahead} guesses, {fleet.max_batch_size} at once")
            outcomes = self.run(fleet, speedup)
            # The quickest of those that meet the targets is the best: it has most to spare.
            share = 1.0 if self._is_met(outcomes) else _share(outcomes)
            key = (share, -sum(_mean_s(each) for each in outcomes))
            if found is None or key > found[0]:
                found = key, fleet, outcomes
        return None if found is None else found[1:]

    def _fleets(self, devices: int) -> Iterator[Fleet]:
        """Yield the choices of exactly so many devices, simpler ones first."""
        for workers, lookahead in self._costs:
            num, rest = divmod(devices, workers)
            if rest or not num:
                continue
            most = self._most_blocks(workers)
            sizes = sorted({each.concurrency for each in self._profile.of((workers, lookahead))})
            for prefill in range(num):
                for size in sizes:
                    blocks = max(MIN_BLOCKS, size * self._blocks_each)
                    if most is not None and most < max(MIN_BLOCKS, self._blocks_each):
                        continue
                    blocks = blocks if most is None else min(blocks, most)
                    yield Fleet(num - prefill, prefill, workers, lookahead, size, blocks)

    def _most_blocks(self, workers: int) -> int | None:
        """Return the KV blocks that fit into an engine, or None without a limit."""
        if self._wanted.memory is None:
            return None
        room = self._wanted.memory - self._wanted.weight_bytes / workers
        block_bytes = self._profile.facts.get(f"block_bytes_{workers}") or self._profile.facts["block_bytes"]
        return max(0, int(room // block_bytes))

    def _is_met(self, outcomes: Sequence[Outcome]) -> bool:
        return _share(outcomes) >= self._wanted.share

    def _plan(self, fleet: Fleet, outcomes: tuple[Outcome, ...]) -> Plan:
        self._tick(f"largest load of {fleet.layout}")
        if not self._is_met(outcomes):
            return Plan(fleet, False, outcomes, 0.0, self._limit(fleet, outcomes))
        scale = self._scale(fleet)
        limit = self._limit(fleet, self.run(fleet, scale * BEYOND))
        fleet = self._least_kv(fleet, scale)
        return Plan(fleet, True, self.run(fleet), scale, limit)

    def _least_kv(self, fleet: Fleet, scale: float) -> Fleet:
        """Return the choice with the least pool that carries its largest load without preemption, and a tenth more."""
        if any(each.num_preempted for each in self.run(fleet, scale)):
            return fleet  # memory is short already
        low, high = max(MIN_BLOCKS, self._blocks_each), fleet.kv_blocks
        while low < high:
            middle = (low + high) // 2
            outcomes = self.run(replace(fleet, kv_blocks=middle), scale)
            is_enough = self._is_met(outcomes) and not any(each.num_preempted for each in outcomes)
            low, high = (low, middle) if is_enough else (middle + 1, high)
        return replace(fleet, kv_blocks=min(math.ceil(SPARE_BLOCKS * high), fleet.kv_blocks))

    def _scale(self, fleet: Fleet) -> float:
        """Return how many times as fast the loads may come, to within 5%."""
        low, high = 1.0, 2.0
        while high < MOST and self._is_met(self.run(fleet, high)):
            low, high = high, 2 * high
        while high / low > CLOSE:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._is_met(self.run(fleet, middle)) else (low, middle)
        return low

    def _one_more(self, plan: Plan) -> Plan | None:
        """Return the best plan of one more device, at a load that this one just cannot carry."""
        devices = plan.fleet.devices + 1
        found = self._best(devices, max(1.0, plan.scale * BEYOND))
        if found is None:
            return None
        fleet, _ = found
        return self._plan(fleet, self.run(fleet))

    def _limit(self, fleet: Fleet, outcomes: Sequence[Outcome]) -> str:
        """Say why requests are late."""
        worst = min(outcomes, key=lambda each: each.share)
        targets, costs = self._wanted.targets, self._costs[fleet.tensor_parallel, fleet.lookahead]
        if worst.num_preempted:
            return f"KV blocks: {worst.num_preempted} requests lost theirs and were computed again"
        if worst.late_next > worst.late_first:
            alone = costs.step_s(1, 1) / tokens_of_step(self._wanted.acceptance or 0.0, fleet.lookahead)
            if alone > targets.tpot_s:
                return f"time per token: a request alone takes {1e3 * alone:.0f} ms"
            cause = "prompts between decode steps" if worst.busy["prefill"] > worst.busy["decode"] else "large decode steps"
            return f"time per token: {worst.late_next:.0%} of requests are too slow, by {cause}"
        if worst.late_first:
            longest = max(each.prompt_tokens for load in self._loads for each in load.requests)
            alone = costs.prefill_s((1.0, longest, longest * (longest - 1) / 2))
            if alone > targets.ttft_s:
                return f"first token: the longest prompt alone takes {1e3 * alone:.0f} ms"
            busy = sum(worst.busy.values()) if not fleet.prefill else worst.busy["prefill"]
            cause = f"engines compute {min(busy, 1):.0%} of the time, prompts {worst.busy['prefill']:.0%}"
            return f"first token: {worst.late_first:.0%} of requests wait too long; {cause}"
        return "nothing up to 64 times this load"


def _share(outcomes: Sequence[Outcome]) -> float:
    return min(each.share for each in outcomes)


def _mean_s(outcome: Outcome) -> float:
    return outcome.figures.ttft_mean_s + (outcome.figures.tpot_mean_s or 0.0)
