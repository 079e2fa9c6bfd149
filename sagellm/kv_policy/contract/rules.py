"""The contract of an eviction policy as checks that anybody can run on theirs: `sagellm policy check module:Class`.

Each rule is held against random sequences of events; a rule that is broken says what was got, what is allowed and which seed
shows it again.
"""

from collections.abc import Callable, Collection

from sagellm.core.contract import ContractReport, RuleResult, playing, run_scenarios
from sagellm.kv_policy.base import EvictionPolicy
from sagellm.kv_policy.contract.scenarios import SCENARIOS

__all__ = ["RULES", "ContractReport", "RuleResult", "check_policy"]

RULES = {
    "builds": "has a name, can be built for 1 block and for many, and refuses room for none",
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


def check_policy(
    make: Callable[[int], EvictionPolicy],
    *,
    seed: int = 0,
    rounds: int = 3,
    progress: Callable[[str], None] | None = None,
    limit_s: float | None = None,
    only: Collection[str] | None = None,
) -> ContractReport:
    """Hold a policy against every rule. One that was never put to the test, because the policy broke others before, is not
    passed.

    Args:
        make: builds a policy for a capacity, with whatever options it needs; called often.
        seed: the first of `rounds` seeds.
        rounds: repetitions of each random scenario.
        progress: called with the name of each scenario before it begins.
        limit_s: for one run of a scenario; a policy that takes longer, in Python, is stopped and nothing else is tried. Only
            in a process's main thread, on systems that have signals.
        only: names of the scenarios to play; by default all.
    """
    return run_scenarios(
        RULES, SCENARIOS, playing(make, may_refuse=lambda capacity: capacity < 1), seed=seed, rounds=rounds,
        progress=progress, limit_s=limit_s, only=only,
    )  # fmt: skip
