"""The contract of a strategy as checks that anybody can run on theirs: `sagellm strategy check module:Class`.

Each rule is held against requests on a virtual engine (`simulation/`) that the strategy schedules; a rule that is broken says
what was got, what is allowed and which seed shows it again.
"""

from collections.abc import Callable, Collection

from sagellm.core.contract import ContractReport, playing, run_scenarios
from sagellm.scheduler_ir.contract.scenarios import SCENARIOS
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["RULES", "check_strategy"]

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


def check_strategy(
    make: Callable[..., SchedulingStrategy],
    *,
    seed: int = 0,
    rounds: int = 3,
    progress: Callable[[str], None] | None = None,
    limit_s: float | None = None,
    only: Collection[str] | None = None,
) -> ContractReport:
    """Hold a strategy against every rule. One that was never put to the test, because the strategy broke others before, is not
    passed.

    Args:
        make: builds a strategy, with keyword arguments where options are tried; called often.
        seed: the first of `rounds` seeds.
        rounds: repetitions of each random scenario.
        progress: called with the name of each scenario before it begins.
        limit_s: for one run of a scenario, see `run_scenarios`.
        only: names of the scenarios to play; by default all.
    """
    return run_scenarios(
        RULES, SCENARIOS, playing(make), seed=seed, rounds=rounds, progress=progress, limit_s=limit_s, only=only,
        what="strategy",
    )  # fmt: skip
