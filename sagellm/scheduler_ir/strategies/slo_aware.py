"""Least slack first, on time to first token, time per token and deadline; what cannot be in time any more goes behind."""

from sagellm.core.hooks import RequestId, ScheduleDecision, StepResult, StepView
from sagellm.core.step_times import StepTimes
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.options import check_count
from sagellm.scheduler_ir.strategies.ordering import unfinished_tokens
from sagellm.scheduler_ir.strategies.phase_choice import PhaseChoice
from sagellm.scheduler_ir.strategies.slack import SlackOrder, optional_seconds

__all__ = ["SloAware"]


class SloAware(SchedulingStrategy):
    """Serves most requests within their targets.

    Slack is the time until a target less the time that the work takes, by what steps took so far (`StepTimes`).
    `SlackOrder` orders the requests and drops none. `PhaseChoice` chooses between prompts and streams.

    Args:
        default_ttft_s, default_tpot_s: of requests that ask for none; None: they have no target.
        rescue_every: so often, in steps of prompts, the request that has waited longest begins; from 2.
        max_decodes: decode steps in a row while somebody waits, at most; from 1.
    """

    name = "slo_aware"

    def __init__(
        self,
        *,
        default_ttft_s: float | None = None,
        default_tpot_s: float | None = None,
        rescue_every: int = 8,
        max_decodes: int = 32,
    ) -> None:
        self.times = StepTimes()
        ttft_s = optional_seconds(self.name, "default_ttft_s", default_ttft_s)
        tpot_s = optional_seconds(self.name, "default_tpot_s", default_tpot_s)
        self._slack = SlackOrder(self.name, self.times, ttft_s, tpot_s, rescue_every)
        self._phases = PhaseChoice(self.times, check_count(self.name, "max_decodes", max_decodes, 1))
        self._num_late = 0

    def decide(self, view: StepView) -> ScheduleDecision:
        ranked = self._slack.rank(view)
        self._num_late = sum(slack_s < 0 for slack_s in ranked.slack_s.values())
        tokens = unfinished_tokens(ranked.waiting[0]) if ranked.waiting else 0
        phase, budget, reason = self._phases.choose(view, ranked, tokens)
        return ScheduleDecision(ranked.order, token_budget=budget, reason=reason, phase=phase, reasons=ranked.reasons)

    def on_step_end(self, result: StepResult) -> None:
        self.times.observe(result)
        self._slack.on_step_end(result)

    def on_request_end(self, request_id: RequestId) -> None:
        self._slack.on_request_end(request_id)

    def report(self) -> dict[str, float]:
        return {"late_waiting": self._num_late, **self.times.report()}
