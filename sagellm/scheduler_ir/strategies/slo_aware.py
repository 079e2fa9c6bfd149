"""Least slack first, on time to first token, time per token and deadline; what cannot be in time any more goes behind."""

from sagellm.core.hooks import Phase, ScheduleDecision, StepResult, StepView
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.options import check_count
from sagellm.scheduler_ir.strategies.ordering import unfinished_tokens
from sagellm.scheduler_ir.strategies.slack import Ranked, SlackOrder, optional_seconds
from sagellm.scheduler_ir.strategies.step_times import StepTimes

__all__ = ["SloAware"]


class SloAware(SchedulingStrategy):
    """Serves most requests within their targets.

    Slack is the time until a target less the time that the work takes, by what steps took so far (`StepTimes`). Prompts are
    computed first, as many as the streams have time for; where they have none, a decode step comes first if the most urgent
    request that waits can afford it, or if more streams would be late than requests that wait. After `max_decodes` decode
    steps in a row while somebody waits, prompts come anyhow. Nothing is dropped: see `SlackOrder` for who goes behind.

    Args:
        default_ttft_s, default_tpot_s: of requests that ask for none; None: they have no target.
        rescue_every: so often, in steps of prompts, the request that has waited longest begins; from 2.
        max_decodes: from 1.
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
        self._max_decodes = check_count(self.name, "max_decodes", max_decodes, 1)
        self._num_decodes = 0  # in a row, while somebody waited
        self._num_late = 0

    def decide(self, view: StepView) -> ScheduleDecision:
        ranked = self._slack.rank(view)
        self._num_late = sum(slack_s < 0 for slack_s in ranked.slack_s.values())
        phase, budget, reason = self._phase(view, ranked)
        self._num_decodes = self._num_decodes + 1 if phase is Phase.DECODE else 0
        return ScheduleDecision(ranked.order, token_budget=budget, reason=reason, phase=phase, reasons=ranked.reasons)

    def _phase(self, view: StepView, ranked: Ranked) -> tuple[Phase | None, int | None, str]:
        """What to do next, with how many tokens, and why."""
        if not ranked.waiting:
            return None, None, "nobody waits"
        if not ranked.running:
            return Phase.PREFILL, None, "nobody decodes"
        stream_s = min(ranked.stream_slack_s, default=3600.0)
        affordable = self.times.tokens_within(stream_s)
        first = unfinished_tokens(ranked.waiting[0])
        if affordable >= first:
            budget = max(min(view.token_budget, affordable), 1)
            return Phase.PREFILL, budget, "the streams have time for it"
        if self._num_decodes >= self._max_decodes:
            return Phase.PREFILL, first if first <= view.token_budget else None, "enough decode steps in a row"
        if ranked.slack_s[ranked.waiting[0].request_id] >= ranked.decode_s:
            return Phase.DECODE, None, "a stream would be late, and who waits can wait"
        prefill_s = self.times.prefill_s(first)
        num_streams = sum(slack_s < prefill_s for slack_s in ranked.stream_slack_s)
        num_waiting = sum(0 <= slack_s < ranked.decode_s for slack_s in ranked.slack_s.values())
        if num_streams >= num_waiting:
            return Phase.DECODE, None, "more streams would be late than requests that wait"
        return Phase.PREFILL, first if first <= view.token_budget else None, "requests that wait would be late"

    def on_step_end(self, result: StepResult) -> None:
        self.times.observe(result)
        self._slack.on_step_end(result)

    def report(self) -> dict[str, float]:
        return {"late_waiting": self._num_late, **self.times.report()}
