"""Guesses in the usage of an answer whose request asks for it.

OpenAI's `completion_tokens_details` counts right and wrong guesses that clients send; here the server guesses. The rest is
in a field of this project's own, `speculation`. LMDeploy makes usage in its handlers, which know nothing
of guesses, so the counts travel beside them in a context variable, as in `service`.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import zip_longest
from typing import Any

from sagellm.accel.speculative.statistics import RequestGuesses
from sagellm.serve.parameters import Refused

FIELD = "speculation_usage"


class UsageOfGuesses:
    """Counts of the generations of a request. `details`, `speculation`: fields of its usage, up to date; both grow in place, as
    LMDeploy may make the usage before the first token."""

    def __init__(self) -> None:
        self._num_decoded = self._num_guessed = 0
        self.details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        self.speculation: dict[str, Any] = {
            "drafted": 0, "accepted": 0, "drafted_at": [], "accepted_at": [], "acceptance_at": [], "mean_accepted": 0.0,
            "tokens_per_step": 0.0,
        }  # fmt: skip

    def add(self, before: RequestGuesses, now: RequestGuesses, num_decoded: int) -> None:
        """Counts of a generation, those that were added before and those up to now, and how many tokens decode steps have given
        in between: each gives its right guesses and a token more."""
        found = self.speculation
        drafted = found["drafted"] = found["drafted"] + now.num_drafted - before.num_drafted
        accepted = found["accepted"] = found["accepted"] + now.num_accepted - before.num_accepted
        self.details.update(accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted)
        self._num_decoded += num_decoded
        self._num_guessed += now.num_guessed - before.num_guessed
        found["drafted_at"] = _grown(found["drafted_at"], before.drafted_at, now.drafted_at)
        found["accepted_at"] = _grown(found["accepted_at"], before.accepted_at, now.accepted_at)
        found["acceptance_at"] = [
            right / made for right, made in zip(found["accepted_at"], found["drafted_at"], strict=True)
        ]
        found["mean_accepted"] = accepted / self._num_guessed if self._num_guessed else 0.0
        num_steps = self._num_decoded - accepted
        found["tokens_per_step"] = self._num_decoded / num_steps if num_steps > 0 else 0.0


# Counts of the current request; None if it does not ask.
USAGE: ContextVar[UsageOfGuesses | None] = ContextVar("sagellm_speculation_usage", default=None)


def take_wish(body: dict[str, Any]) -> UsageOfGuesses | None:
    """Take the wish out of `body`; return counts to be filled in, or None. Raises Refused: it is no boolean."""
    wish = body.pop(FIELD, False)
    if not isinstance(wish, bool):
        raise Refused(f"{FIELD} is {wish!r}; allowed: true or false.")
    return UsageOfGuesses() if wish else None


def add_guesses(before: Sequence[Any], now: Sequence[Any], num_decoded: int) -> None:
    """`before` and `now`: the `RequestGuesses` of a generation so far, or as many of its values as are not 0; `num_decoded`:
    the tokens of decode steps in between."""
    if (counts := USAGE.get()) is not None:
        counts.add(RequestGuesses(*before), RequestGuesses(*now), num_decoded)


def with_guesses(make: Callable[..., Any]) -> Callable[..., Any]:
    """LMDeploy's `UsageInfo`, with the counts where they were asked for. They may grow until the usage is written."""

    def usage(**values: int) -> Any:
        counts = USAGE.get()
        if counts is None:
            return make(**values)
        return make(**values, completion_tokens_details=counts.details, speculation=counts.speculation)

    return usage


def _grown(counts: Sequence[int], before: Sequence[int], now: Sequence[int]) -> list[int]:
    return [count + new - old for count, old, new in zip_longest(counts, before, now, fillvalue=0)]
