"""The contract of an eviction policy as checks that anybody can run on theirs: `sagellm policy check module:Class`.

Each rule is held against random sequences of events; a rule that is broken says what was got, what is allowed and which seed
shows it again.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from sagellm.kv_policy.base import EvictionPolicy
from sagellm.kv_policy.contract.scenarios import SCENARIOS, Scenario
from sagellm.kv_policy.contract.world import PolicyBroke

__all__ = ["RULES", "ContractReport", "RuleResult", "check_policy"]

RULES = {
    "builds": "can be built for 1 block and for many, and refuses room for none",
    "raises_nothing": "raises in no event and at no question that keeps to the contract",
    "answer": "answers with an EvictionDecision",
    "no_more": "gives no more victims than wanted",
    "on_tier": "gives victims that are on the tier",
    "distinct": "gives no victim twice",
    "unpinned": "gives no victim that a request holds, or that comes before a block which continues it",
    "enough": "gives as many victims as wanted if there are that many",
    "reasons": "gives a reason for each victim",
    "asking": "can be asked again when nothing was removed: choosing a victim does not remove it",
    "bad_events": "refuses, with PolicyError, to insert what is there, and to hit or remove what is not",
    "deterministic": "gives the same victims for the same events",
    "bounded": "holds no more and no more memory however many blocks have come and gone",
}


class RuleResult(NamedTuple):
    """One rule. `message` is empty where the policy keeps to it."""

    rule: str
    says: str
    message: str

    @property
    def passed(self) -> bool:
        return not self.message


class ContractReport(NamedTuple):
    """What came out for one policy. `event_us`: microseconds an event or question, for information."""

    results: tuple[RuleResult, ...]
    event_us: float
    num_events: int

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


def check_policy(
    make: Callable[[int], EvictionPolicy],
    *,
    seed: int = 0,
    rounds: int = 3,
    progress: Callable[[str], None] | None = None,
) -> ContractReport:
    """Hold a policy against every rule.

    Args:
        make: builds a policy for a capacity, with whatever options it needs; called often.
        seed: the first of `rounds` seeds.
        rounds: repetitions of each random scenario.
        progress: called with the name of each scenario before it begins.
    """
    messages: dict[str, str] = {}
    num_events, seconds = 0, 0.0
    for name, scenario in SCENARIOS.items():
        if progress is not None:
            progress(name)
        for number in range(seed, seed + (rounds if scenario.is_random else 1)):
            start = time.perf_counter()
            counted = _run(scenario, name, make, number, messages)
            if scenario.is_random:
                num_events, seconds = num_events + counted, seconds + time.perf_counter() - start
    unbuilt = "not checked: the policy could not be built." if "builds" in messages and num_events == 0 else ""
    results = tuple(RuleResult(rule, says, messages.get(rule, unbuilt)) for rule, says in RULES.items())
    return ContractReport(results, seconds / num_events * 1e6 if num_events else 0.0, num_events)


def _run(
    scenario: Scenario, name: str, make: Callable[[int], EvictionPolicy], seed: int, messages: dict[str, str]
) -> int:
    def report(rule: str, message: str) -> None:
        assert rule in RULES, rule
        messages.setdefault(rule, f"{message} [scenario {name}, seed {seed}]")

    def build(capacity: int) -> EvictionPolicy:
        try:
            return make(capacity)
        except Exception as error:
            if capacity > 0:
                report("builds", f"capacity {capacity} raised {type(error).__name__}: {error}; build it.")
                raise PolicyBroke from error
            raise

    try:
        return scenario.run(build, seed, report)
    except PolicyBroke:
        return 0
