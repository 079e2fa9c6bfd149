"""Order by slack, prompts in chunks, and a turn for who has waited longest."""

from dataclasses import replace

from sagellm.core.hooks import Phase, ScheduleDecision, StepResult, StepView
from sagellm.scheduler_ir.strategies.chunking import ChunkSizer
from sagellm.scheduler_ir.strategies.options import check_number
from sagellm.scheduler_ir.strategies.ordering import unfinished_tokens
from sagellm.scheduler_ir.strategies.slack import optional_seconds
from sagellm.scheduler_ir.strategies.slo_aware import SloAware

__all__ = ["Hybrid"]


class Hybrid(SloAware):
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
        super().__init__(
            default_ttft_s=default_ttft_s, default_tpot_s=default_tpot_s, rescue_every=rescue_every, max_decodes=max_decodes
        )
        target_s = optional_seconds(self.name, "target_itl_s", target_itl_s)
        self._chunks = ChunkSizer(self.times, target_s, check_number(self.name, "max_overhead", max_overhead, 1e-3, 0.9))

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
        super().on_step_end(result)
        self._chunks.on_step_end(result)

    def report(self) -> dict[str, float]:
        return {"chunk_tokens": self._chunks.chunk, **self.times.report()}
