"""A decision from a key: the smallest first."""

from collections.abc import Callable
from typing import Any

from sagellm.core.hooks import Phase, RequestView, ScheduleDecision, StepView

__all__ = ["smallest_first", "unfinished_tokens"]


def smallest_first(
    view: StepView, key: Callable[[RequestView], Any], reason: str, is_urgent: bool = False
) -> ScheduleDecision:
    """All requests by their key, equal ones by arrival.

    Args:
        is_urgent: compute prompts next if the very first request waits, whatever the engine would do; a request that runs
            and has the smallest key leaves that to the engine.
    """
    ordered = sorted(view.requests, key=lambda request: (key(request), request.arrival_s))
    waits = is_urgent and bool(ordered) and ordered[0].phase is Phase.PREFILL
    phase = Phase.PREFILL if waits else None
    return ScheduleDecision([request.request_id for request in ordered], reason=reason, phase=phase)


def unfinished_tokens(request: RequestView) -> int:
    """Tokens that a prefill has to compute before the next token is there, at least one."""
    return max(request.num_tokens - request.num_computed, 1)
