"""Guesses that were right and wrong, in the usage of an answer whose request asks for it.

The field is OpenAI's for guesses that clients send, `completion_tokens_details`; here the server guesses. LMDeploy makes usage
in its handlers, which know nothing of guesses, so the counts travel beside them in a context variable, as in `service`.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sagellm.serve.parameters import Refused

FIELD = "speculation_usage"
ACCEPTED, REJECTED = "accepted_prediction_tokens", "rejected_prediction_tokens"
# Counts of the request that is being handled, which its generations add to; None where it does not ask.
USAGE: ContextVar[dict[str, int] | None] = ContextVar("sagellm_speculation_usage", default=None)


def take_wish(body: dict[str, Any]) -> dict[str, int] | None:
    """Take the wish out of `body`; counts to be filled in, None where there is none. Raises Refused: it is no boolean."""
    wish = body.pop(FIELD, False)
    if not isinstance(wish, bool):
        raise Refused(f"{FIELD} is {wish!r}; allowed: true or false.")
    return {ACCEPTED: 0, REJECTED: 0} if wish else None


def add_guesses(before: tuple[int, int], now: tuple[int, int]) -> None:
    """`before` and `now`: guesses of a generation so far, and how many of them were right."""
    if (counts := USAGE.get()) is not None:
        drafted, accepted = now[0] - before[0], now[1] - before[1]
        counts[ACCEPTED] += accepted
        counts[REJECTED] += drafted - accepted


def with_guesses(make: Callable[..., Any]) -> Callable[..., Any]:
    """LMDeploy's `UsageInfo`, with the counts where they were asked for. They may grow until the usage is written."""

    def usage(**values: int) -> Any:
        counts = USAGE.get()
        return make(**values) if counts is None else make(**values, completion_tokens_details=counts)

    return usage
