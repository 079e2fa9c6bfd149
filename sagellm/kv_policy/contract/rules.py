"""The contract of an eviction policy as checks that anybody can run on theirs: `sagellm policy check module:Class`.

Each rule is held against random sequences of events; a rule that is broken says what was got, what is allowed and which seed
shows it again.
"""

from collections.abc import Callable

from sagellm.core.contract import ContractReport, Played, Report, RuleResult, Scenario, run_scenarios
from sagellm.kv_policy.base import EvictionPolicy
from sagellm.kv_policy.contract.scenarios import SCENARIOS
from sagellm.kv_policy.contract.world import PolicyBroke

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
    """
    return run_scenarios(
        RULES, SCENARIOS, lambda scenario, number, report: _run(scenario, make, number, report),
        seed=seed, rounds=rounds, progress=progress, limit_s=limit_s,
    )  # fmt: skip


def _run(scenario: Scenario, make: Callable[[int], EvictionPolicy], seed: int, report: Report) -> Played:
    def build(capacity: int) -> EvictionPolicy:
        try:
            return make(capacity)
        except (Exception, SystemExit) as error:
            if capacity > 0:
                report("builds", f"capacity {capacity} raised {type(error).__name__}: {error}; build it.")
                raise PolicyBroke from error
            raise

    try:
        return scenario.run(build, seed, report)
    except PolicyBroke:
        return Played(0, frozenset())
