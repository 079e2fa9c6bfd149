"""Contract of an eviction policy: `sagellm check policy module:Class`.

Every rule is checked with random sequences of events. A broken rule reports what was got, what is allowed and the seed.
"""

from sagellm.core.contract import ContractReport, Flag, RuleResult, Suite
from sagellm.kv_policy.contract.scenarios import SCENARIOS

__all__ = ["RULES", "SUITE", "ContractReport", "RuleResult", "check_policy"]

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

SUITE = Suite(
    "policy", RULES, SCENARIOS, example={"small_ratio": 0.2}, trial=(16,), may_refuse=lambda capacity, **_: capacity < 1,
    flags=(Flag("reference", False, "Check the twin in plain Python, not the native policy."),),
)  # fmt: skip
check_policy = SUITE.check
