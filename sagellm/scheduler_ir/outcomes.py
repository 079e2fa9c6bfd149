"""Counts which decisions an engine carried out, and which used the resources that they expected."""

from typing import Any

from sagellm.core.hooks import Phase, ScheduleDecision, StepResult, StepView

__all__ = ["DecisionOutcomes"]

MAX_OPEN = 64  # decisions without a result, of which the engine made no step; older ones are dropped


class DecisionOutcomes:
    """Compares decisions with the results of their steps.

    A decision is carried out if the step has its phase, refuses none of its wishes and computes no request that it holds.
    Its resources come true if the step computes the expected tokens: of the prompts that fit the token budget, in order,
    or one for each decoding request. A prefix hit, a lack of blocks or a preemption makes the expectation wrong.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[Phase, frozenset[int], int]] = {}
        self.num_steps = self.num_carried_out = self.num_as_expected = 0

    def expect(self, view: StepView, decision: ScheduleDecision) -> None:
        """Note what the step of this view should be. Complexity: O(requests)."""
        phase = decision.phase or view.phase
        hold = decision.hold
        if phase is Phase.DECODE:
            taking_part = sum([row.phase is Phase.DECODE and row.request_id not in hold for row in view.requests])
            tokens = min(taking_part, view.max_batch_size or taking_part)
        else:
            tokens = _prompt_tokens(view, decision)
        self._open[view.step] = (phase, hold, tokens)
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]

    def result(self, result: StepResult) -> None:
        """Compare a result with its decision; later decode steps of the same round are not counted."""
        expected = self._open.pop(result.step, None)
        if expected is None:
            return
        phase, hold, tokens = expected
        self.num_steps += 1
        held = bool(hold) and any(request in hold for request, _ in result.computed)
        if result.phase is phase and not result.refused and not held:
            self.num_carried_out += 1
            used = result.num_tokens if phase is Phase.PREFILL else result.num_requests
            self.num_as_expected += used == tokens

    def report(self) -> dict[str, Any]:
        """Return the number of steps with a decision, and the two shares of them; 0 before the first step."""
        of = max(1, self.num_steps)
        return {
            "steps": self.num_steps, "carried_out_share": self.num_carried_out / of,
            "as_expected_share": self.num_as_expected / of,
        }  # fmt: skip


def _prompt_tokens(view: StepView, decision: ScheduleDecision) -> int:
    waiting = {row.request_id: row for row in view.requests if row.phase is Phase.PREFILL}
    order = waiting if decision.order is None else [name for name in decision.order if name in waiting]
    budget = view.token_budget if decision.token_budget is None else decision.token_budget
    total = 0
    for name in order:
        if name in decision.hold:
            continue
        row = waiting[name]
        new = min(row.num_tokens - row.num_computed, decision.chunk_tokens.get(name, row.num_tokens))
        if total and total + new > budget:
            break
        total += new
    return total
