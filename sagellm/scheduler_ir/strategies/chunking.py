"""How many prompt tokens fit between two decode steps."""

import math

from sagellm.core.hooks import Phase, RequestView, ScheduleDecision, StepResult, StepView
from sagellm.core.step_times import StepTimes
from sagellm.scheduler_ir.strategies.ordering import unfinished_tokens

__all__ = ["ChunkSizer"]

DEFAULT_STEPS = 3  # decode steps that a stream may wait for a token, if no request has a target
ENOUGH_STEPS = 4  # of prompts, before which the constant part of a step is a guess
FIRST_CHUNK = 128  # tokens; the least until then
LEAST_CHUNK = 32  # tokens; less does not fill a device, whatever the constant part of a step seems to be


class ChunkSizer:
    """Cuts prompts so that streams get a token at least every `target_itl_s` seconds.

    The chunk fills what a decode step leaves of that time. It is never so small that the constant part of its step is more
    than `max_overhead` of it: then the gap grows to one decode step and the smallest chunk. The pieces of one prompt are of
    about equal length, so that none is a crumb. Without decoding requests nothing is cut. A chunk that is on the device
    while the
    next step is chosen counts as time that streams have waited already.

    Its owner passes results on, and says with `chosen` what it decided.

    Args:
        target_itl_s: infinity: the least TPOT that a stream asks for, or three decode steps where none asks.
    """

    def __init__(self, times: StepTimes, target_itl_s: float, max_overhead: float) -> None:
        self._times = times
        self._target_s = target_itl_s
        self._max_overhead = max_overhead
        self._asked_prefill = False  # the step that was chosen last
        self._did_prefill = False  # the last one that is done; where it was chosen ahead it may be another
        self._sent_s = 0.0  # expected of the chunk that was chosen last
        self._next_s = 0.0  # and the one offered last
        self._tpot_s = math.inf  # the least that a stream asked for when one was last seen
        self.chunk = 0  # tokens of the last one

    def on_step_end(self, result: StepResult) -> None:
        self._did_prefill = result.phase is Phase.PREFILL

    def chosen(self, phase: Phase | None) -> None:
        """The next step, after `choose`."""
        self._asked_prefill = phase is Phase.PREFILL
        self._sent_s = self._next_s if self._asked_prefill else 0.0

    def choose(self, view: StepView, waiting: list[RequestView]) -> ScheduleDecision:
        """Phase, budget, cut and reason of the next step, without an order.

        Args:
            waiting: those that wait, in the order in which they will go.
        """
        running = view.running
        if not waiting or not (running or view.num_in_flight):
            self._tpot_s = math.inf
            unfinished = min(sum(unfinished_tokens(request) for request in waiting), max(view.token_budget, 1))
            self._next_s = self._times.prefill_s(unfinished)
            return ScheduleDecision(
                phase=Phase.PREFILL if waiting else None,
                reason="no request decodes: no cuts" if waiting else "no request waits",
            )
        decode_s = self._times.decode_s(
            len(running) + view.num_in_flight, sum(request.num_tokens for request in running)
        )
        target_s = self._target(running, decode_s)
        gap_s = max((view.now_s - request.last_token_s for request in running), default=0.0)
        is_sent = view.num_in_flight > 0 and self._asked_prefill
        gap_s = max(gap_s, 0.0) + (self._sent_s if is_sent else 0.0)
        left_s = target_s - decode_s - gap_s
        first, unfinished = waiting[0], sum(unfinished_tokens(request) for request in waiting)
        computed = max(first.num_computed, 0)
        fits, least = self._times.tokens_within(left_s, computed), self._least_chunk(computed)
        was_prefill = self._asked_prefill if view.num_in_flight else self._did_prefill
        if running and was_prefill and fits < min(least, unfinished_tokens(first)):
            return ScheduleDecision(phase=Phase.DECODE, reason=f"streams wait for a token every {target_s:.4g} s")
        step = self._cut(view, first, min(max(fits, least), max(view.token_budget, 1)), target_s)
        self._next_s = self._times.prefill_s(min(self.chunk, unfinished), computed)
        return step

    def _cut(self, view: StepView, first: RequestView, tokens: int, target_s: float) -> ScheduleDecision:
        whole = unfinished_tokens(first)
        chunks = {}
        if whole > tokens:
            tokens = -(-whole // -(-whole // tokens))
            chunks = {first.request_id: tokens}
        self.chunk = tokens
        return ScheduleDecision(
            token_budget=tokens, phase=Phase.PREFILL, chunk_tokens=chunks,
            reason=f"{tokens} prompt tokens between tokens every {target_s:.4g} s",
        )  # fmt: skip

    def _target(self, running: tuple[RequestView, ...], decode_s: float) -> float:
        asked_s = self._target_s
        if asked_s == math.inf:
            if running:  # else all are on the device
                self._tpot_s = min(request.service.tpot_s for request in running)
            asked_s = self._tpot_s
        return DEFAULT_STEPS * decode_s if asked_s == math.inf else asked_s

    def _least_chunk(self, context: int) -> int:
        """Tokens whose own time outweighs the constant part of a step as `max_overhead` asks for."""
        if self._times.prefill.num_samples < ENOUGH_STEPS:
            return FIRST_CHUNK
        constant_s = self._times.prefill_s(0)
        return max(self._times.tokens_within(constant_s / self._max_overhead, context), LEAST_CHUNK)
