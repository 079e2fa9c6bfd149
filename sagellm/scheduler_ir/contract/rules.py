"""Contract of a scheduling strategy: `sagellm check strategy module:Class`.

Every rule is checked with requests on a virtual engine (`simulation/`) that the strategy schedules. A broken rule reports what
was got, what is allowed and the seed.
"""

from sagellm.core.contract import Suite
from sagellm.scheduler_ir.contract.scenarios import SCENARIOS

__all__ = ["RULES", "SUITE", "check_strategy"]

RULES = {
    "builds": "has a name and can be built",
    "options": "refuses, with PlanError, an option that makes no sense, and one that it does not have",
    "raises_nothing": "raises at no view, result or end, also of requests that vanished, huge numbers and infinities",
    "answer": "answers with a ScheduleDecision whose parts are what it says, or None",
    "names_all": "names every request of the view",
    "names_once": "names none twice",
    "names_known": "names none that is not in the view",
    "amounts": "gives budgets and chunks of at least one token",
    "reasons": "gives texts as reasons",
    "completes": "lets every request of a finite workload come to its end, and holds none for a minute",
    "deterministic": "decides the same for the same events",
    "identity": "decides the same for equal requests, whichever objects they are",
    "reads_nothing": "reads no clock and no random number without a seed",
    "unchanged": "leaves a decision as it was when it was given",
    "forgets": "keeps nothing of requests that ended",
}

SUITE = Suite("strategy", RULES, SCENARIOS, example={"ageing_s": 2.0})
check_strategy = SUITE.check
