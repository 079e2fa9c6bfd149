"""Contract of a speculative strategy, and of an engine that verifies its guesses: `sagellm check speculative module:Class`."""

from collections.abc import Callable, Collection

from sagellm.accel.speculative.contract.exactness import BF16_GAP, ENGINE_SCENARIOS, Guesser, Trial
from sagellm.accel.speculative.contract.scenarios import SCENARIOS
from sagellm.core.contract import ContractReport, Suite, run_scenarios

__all__ = ["ENGINE_RULES", "RULES", "SUITE", "check_engine", "check_speculator"]

RULES = {
    "builds": "has a name and can be built",
    "options": "refuses, with SpeculationError, a lookahead that makes no sense",
    "raises_nothing": "raises at nothing that it is told or asked",
    "answers": "answers one list of whole numbers for each ask",
    "limits": "guesses no more than the limit of each ask",
    "shape": "guesses no tree where it `takes_shape` and is asked for a list",
    "vocabulary": "guesses tokens that there are",
    "lookahead": "keeps a lookahead that makes sense",
    "quiet": "keeps a `quiet` that makes sense, and guesses the same whether it is told of quiet steps at once or late",
    "strangers": "accepts requests that were never begun, steps that it was not told of, and ends that come twice",
    "leaves_asks": "leaves what it is asked about as it is",
    "models": "loads the models that it names, and computes with them after keys of the text that it was asked about",
    "deterministic": "guesses the same after the same events",
    "forgets": "gives back what it kept of requests that ended, or bounds it",
}
ENGINE_RULES = {
    "runs": "an engine runs with it, and finds no fault",
    "greedy": "greedy answers in float32 are those without guesses, token by token, and so are drawn ones with seeds",
    "near_argmax": f"in bfloat16 each token's logit is within {BF16_GAP} of the highest, all of the answer in one pass",
    "distribution": "drawn tokens have the model's own distribution, in the place of a guess and after one",
}


SUITE = Suite("strategy", RULES, SCENARIOS, example={"lookahead": 4})
check_speculator = SUITE.check


def check_engine(
    trial: Trial,
    guesser: Guesser,
    *,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    limit_s: float | None = None,
    only: Collection[str] | None = None,
) -> ContractReport:
    """Check an engine that runs a strategy. The suite's own guessers test how the engine verifies guesses.

    An engine without float32 is checked against the rules of bfloat16 alone.

    Args:
        guesser: the strategy by name, its options, and the models that it loads.
        seed: of prompts and draws.
        only: names of the scenarios to play; by default all.
    """
    rules = ENGINE_RULES
    if not trial.has_float32:
        only, rules = ("answers in bfloat16",), {name: ENGINE_RULES[name] for name in ("runs", "near_argmax")}
    return run_scenarios(
        rules, ENGINE_SCENARIOS, lambda scenario, number, report: scenario.run(trial, guesser, number, report),
        seed=seed, rounds=1, progress=progress, limit_s=limit_s, only=only, what="engine", built_rule="runs", raise_rule="runs",
    )  # fmt: skip
