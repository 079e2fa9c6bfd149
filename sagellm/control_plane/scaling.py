"""The decision loop of a pool: policy, bounds, hysteresis and cool-down. Manager and simulator run it by their own clocks."""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from sagellm.control_plane.base import PoolView, ScalingDecision, ScalingPolicy
from sagellm.control_plane.config import ScalingConfig
from sagellm.control_plane.scalers.fixed import Fixed
from sagellm.core.errors import PolicyError
from sagellm.pd.guarded import GuardedRouting

__all__ = ["OPEN", "STEP", "ScalingLoop", "ScalingStep", "check_decision", "open_fields", "step_fields"]

OPEN, STEP = "scale_open", "scale"
MOST_ENGINES = 1 << 20


class ScalingStep(NamedTuple):
    """One decision.

    Attributes:
        policy: name of the policy that decided.
        asked: number that it asked for.
        present, target: engines before and after the decision.
        reason: the policy's, then that of the loop where it changed the number.
    """

    policy: str
    asked: int
    present: int
    target: int
    reason: str

    @property
    def action(self) -> str:
        return "keep" if self.target == self.present else "up" if self.target > self.present else "down"


class _Guarded(GuardedRouting):
    what, default = "scaling policy", Fixed

    def ask(self, request: PoolView, engines: Sequence[Any]) -> Any:
        return self.policy.decide(request)

    def check(self, answer: Any, request: PoolView, engines: Sequence[Any]) -> None:
        check_decision(answer)

    def last_resort(self, engines: Sequence[Any], error: Exception) -> ScalingDecision:
        raise error  # `fixed` does not fail


def check_decision(decision: Any) -> None:
    """Raises PolicyError: no ScalingDecision, or its target is no number of engines."""
    if not isinstance(decision, ScalingDecision) or not isinstance(decision.reason, str):
        raise PolicyError(f"got {decision!r}; give a ScalingDecision with a reason.")
    if type(decision.target) is not int or not 0 <= decision.target <= MOST_ENGINES:
        raise PolicyError(f"got a target of {decision.target!r} engines; give a whole number from 0 on.")


class ScalingLoop:
    """Decides how many engines a pool has. It reads no clock: the view has the time.

    A change waits until `cooldown_s` have passed since the last one. Fewer engines wait also until `down_after` decisions in a
    row asked for fewer, and then the largest number of these counts.

    Attributes:
        num_faults: of the policy that was given.
    """

    def __init__(self, policy: ScalingPolicy, config: ScalingConfig) -> None:
        self._policy, self._config = _Guarded(policy), config
        self._asked: deque[int] = deque(maxlen=config.down_after)
        self._changed_s: float | None = None

    @property
    def policy(self) -> ScalingPolicy:
        return self._policy.policy

    @property
    def num_faults(self) -> int:
        return self._policy.num_faults

    def step(self, view: PoolView) -> ScalingStep:
        """Return the decision of an interval."""
        decision = self._policy.choose(view, ())
        config, present = self._config, view.present
        wanted = min(max(decision.target, config.min), config.max)
        notes = [] if wanted == decision.target else [f"the bounds are {config.min} and {config.max}"]
        self._asked.append(wanted)
        target = wanted
        if wanted < present and (fewer := sum(each < present for each in self._asked)) < config.down_after:
            target = present
            notes.append(f"{fewer} of the last {config.down_after} decisions asked for fewer")
        elif wanted < present:
            target = max(self._asked)
            notes += [f"the last {config.down_after} decisions asked for up to {target}"] if target != wanted else []
        left_s = 0.0 if self._changed_s is None else self._changed_s + config.cooldown_s - view.now_s
        if target != present and left_s > 0:
            target = present
            notes.append(f"the last change was too short ago by {left_s:.1f} s")
        if target != present:
            self._changed_s = view.now_s
        return ScalingStep(self.policy.name, decision.target, present, target, "; ".join([decision.reason, *notes]))


def open_fields(pool: str, config: ScalingConfig, policy: ScalingPolicy) -> dict[str, Any]:
    """Return the first line of a pool's record: all that a replay needs to build its loop again."""
    settings = config.model_dump(mode="json") | {"options": policy.recorded(config.options)}
    return {"pool": pool, "n": 0, "settings": settings}


def step_fields(pool: str, number: int, view: PoolView, step: ScalingStep) -> dict[str, Any]:
    """Return the line of a decision. `number`: from 1."""
    return {"pool": pool, "n": number, "action": step.action, **step._asdict(), "view": asdict(view)}
