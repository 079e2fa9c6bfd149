"""Chunked prefill: chunk and token budget follow the measured step times, so that streams go on while prompts are computed."""

from sagellm.core.hooks import ScheduleDecision, StepResult, StepView
from sagellm.core.step_times import StepTimes
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.chunking import ChunkSizer
from sagellm.scheduler_ir.strategies.options import check_number
from sagellm.scheduler_ir.strategies.slack import optional_seconds

__all__ = ["Adaptive"]


class Adaptive(SchedulingStrategy):
    """First come, first served, in chunks that alternate with decode steps: the gap between two tokens of a stream is at most
    `target_itl_s`, or one decode step and the smallest chunk where that is longer.

    Source: the idea of Sarathi-Serve (Agrawal et al., OSDI 2024), for an engine that computes prompts and decodes in turn; the
    chunk is steered by what steps took (`StepTimes`), not fixed.

    Args:
        target_itl_s: None: the least TPOT that a running request asks for, or three times a decode step where none asks.
        max_overhead: share of a chunk's time that its step costs whatever its length; from 0.001 to 0.9.
    """

    name = "adaptive"

    def __init__(self, *, target_itl_s: float | None = None, max_overhead: float = 0.03) -> None:
        self.times = StepTimes()
        target_s = optional_seconds(self.name, "target_itl_s", target_itl_s)
        self._chunks = ChunkSizer(self.times, target_s, check_number(self.name, "max_overhead", max_overhead, 1e-3, 0.9))

    def decide(self, view: StepView) -> ScheduleDecision:
        ordered = sorted(view.requests, key=lambda request: request.arrival_s)
        step = self._chunks.choose(view, sorted(view.waiting, key=lambda request: request.arrival_s))
        self._chunks.chosen(step.phase)
        return ScheduleDecision(
            [request.request_id for request in ordered], token_budget=step.token_budget, reason=step.reason,
            phase=step.phase, chunk_tokens=step.chunk_tokens,
        )  # fmt: skip

    def on_step_end(self, result: StepResult) -> None:
        self.times.observe(result)
        self._chunks.on_step_end(result)

    def report(self) -> dict[str, float]:
        return {"chunk_tokens": self._chunks.chunk, **self.times.report()}
