"""Guesses of a speculative strategy, from the differences of the server's counters around a round."""

import re
from collections.abc import Iterable, Mapping

from benchmarks.result import Definition

TOKENS, STEPS = "sagellm_speculative_tokens_total", "sagellm_speculative_sequence_steps_total"
NAMES = ("spec_acceptance", "spec_mean_accepted", "spec_tokens_per_step")
_AT = "spec_acceptance_at."
_PLACE = re.compile(r'sagellm_speculative_place_tokens_total\{kind="(\w+)",place="(\d+)"\}$')


def guess_metrics(deltas: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the metrics, and why each other one of `NAMES` is absent.

    `spec_acceptance_at.K` covers the places K that had a guess.
    """
    drafted, accepted = (deltas.get(f'{TOKENS}{{kind="{kind}"}}') for kind in ("drafted", "accepted"))
    steps, guessed = (deltas.get(f'{STEPS}{{kind="{kind}"}}') for kind in ("all", "guessed"))
    if drafted is None or accepted is None or steps is None or guessed is None:
        return {}, dict.fromkeys(NAMES, f"the server does not count {TOKENS}: no speculative strategy guesses")
    metrics: dict[str, float] = {}
    absent = dict.fromkeys(NAMES, "no guess was made")
    if drafted:
        metrics["spec_acceptance"] = accepted / drafted
    if guessed:
        metrics["spec_mean_accepted"] = accepted / guessed
    if steps:
        metrics["spec_tokens_per_step"] = 1 + accepted / steps
    else:
        absent["spec_tokens_per_step"] = "no decode step was made"
    return metrics | _by_place(deltas), {name: why for name, why in absent.items() if name not in metrics}


def place_definitions(names: Iterable[str]) -> dict[str, Definition]:
    """Return the definitions of the names that are metrics of a place."""
    text = (
        "As `spec_acceptance`, of the guesses at one place of a sequence and step alone, from 1 on. At place 1 it is the "
        "chance that a guess is right; further on one counts as right with all before it alone. Places at which no guess was "
        "made are left out."
    )
    return {name: Definition(unit="ratio", better=None, text=text) for name in names if name.startswith(_AT)}


def _by_place(deltas: Mapping[str, float]) -> dict[str, float]:
    counts: dict[str, dict[int, float]] = {"drafted": {}, "accepted": {}}
    for name, delta in deltas.items():
        if match := _PLACE.match(name):
            counts[match[1]][int(match[2])] = delta
    return {
        f"{_AT}{place}": counts["accepted"].get(place, 0.0) / drafted
        for place, drafted in sorted(counts["drafted"].items())
        if drafted
    }
