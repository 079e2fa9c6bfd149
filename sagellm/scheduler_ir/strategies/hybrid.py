"""Order by slack, prompts in chunks, and a turn for who has waited longest."""

from dataclasses import replace

from sagellm.core.hooks import Phase, RequestId, ScheduleDecision, StepResult, StepView
from sagellm.core.step_times import StepTimes
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.chunking import ChunkSizer
from sagellm.scheduler_ir.strategies.options import check_count, check_number
from sagellm.scheduler_ir.strategies.ordering import unfinished_tokens
from sagellm.scheduler_ir.strategies.phase_choice import PhaseChoice
from sagellm.scheduler_ir.strategies.slack import SlackOrder, optional_seconds

__all__ = ["Hybrid"]


class Hybrid(SchedulingStrategy):
    """Which prompt: as `slo_aware` (least slack; late ones behind; each `rescue_every`-th step the oldest). How much of it: as
    `adaptive` (chunks between decode steps), and none where a stream with a target would be late for it. One estimate of step
    times serves both.

    A prompt that is cut keeps its blocks, and one that becomes more urgent goes before its rest; where memory runs out, the
    least urgent of these gives its blocks back.

    Args:
        default_ttft_s, default_tpot_s, rescue_every, max_decodes: as `SloAware`.
        target_itl_s, max_overhead: as `Adaptive`.
    """

    name = "hybrid"

    def __init__(
        self,
        *,
        default_ttft_s: float | None = None,
        default_tpot_s: float | None = None,
        rescue_every: int = 8,
        target_itl_s: float | None = None,
        max_overhead: float = 0.03,
        max_decodes: int = 32,
    ) -> None:
        self.times = StepTimes()
        ttft_s = optional_seconds(self.name, "default_ttft_s", default_ttft_s)
        tpot_s = optional_seconds(self.name, "default_tpot_s", default_tpot_s)
        target_s = optional_seconds(self.name, "target_itl_s", target_itl_s)
        self._slack = SlackOrder(self.name, self.times, ttft_s, tpot_s, rescue_every)
        self._chunks = ChunkSizer(self.times, target_s, check_number(self.name, "max_overhead", max_overhead, 1e-3, 0.9))
        self._phases = PhaseChoice(self.times, check_count(self.name, "max_decodes", max_decodes, 1))

    def decide(self, view: StepView) -> ScheduleDecision:
        ranked = self._slack.rank(view)
        step = self._chunks.choose(view, ranked.waiting)
        tokens, forced = 0, ""
        if ranked.waiting:
            first = ranked.waiting[0]
            tokens = step.chunk_tokens.get(first.request_id, unfinished_tokens(first))
            forced = step.reason if step.phase is Phase.DECODE else ""
        phase, budget, reason = self._phases.choose(view, ranked, tokens, forced)
        self._chunks.chosen(phase)
        if phase is Phase.PREFILL:
            budget = min(budget or view.token_budget, step.token_budget or view.token_budget)
            step = replace(step, token_budget=max(budget, 1))
        else:
            step = ScheduleDecision(phase=phase, reason=reason)
        return ScheduleDecision(
            ranked.order, token_budget=step.token_budget, reason=step.reason, phase=step.phase,
            chunk_tokens=step.chunk_tokens, reasons=ranked.reasons,
        )  # fmt: skip

    def on_step_end(self, result: StepResult) -> None:
        self.times.observe(result)
        self._chunks.on_step_end(result)
        self._slack.on_step_end(result)

    def on_request_end(self, request_id: RequestId) -> None:
        self._slack.on_request_end(request_id)

    def report(self) -> dict[str, float]:
        return {"chunk_tokens": self._chunks.chunk, **self.times.report()}
