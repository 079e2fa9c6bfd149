"""Chooses prompts or streams: those that would be late otherwise."""

import math

from sagellm.core.hooks import Phase, StepView
from sagellm.core.step_times import StepTimes
from sagellm.scheduler_ir.strategies.slack import Ranked

__all__ = ["PhaseChoice"]


class PhaseChoice:
    """Prompts go first, as many as the streams have time for. If they have no time, a decode step comes first if the most
    urgent waiting request can afford it, or if more streams than waiting requests would be late. After `max_decodes`
    such steps in a row prompts come first, so that no request waits for ever. While the streams are on the device and
    the waiting requests can afford it, the answer is decode: an engine that asks that early puts the choice off until
    they are back.

    A step of prompts has no more tokens than are done when the first of those that can be in time is due.
    """

    def __init__(self, times: StepTimes, max_decodes: int) -> None:
        self._times = times
        self._max_decodes = max_decodes
        self._num_decodes = 0  # in a row, while somebody waited
        self._num_put_off = 0  # in a row, because all were on the device

    def choose(
        self, view: StepView, ranked: Ranked, tokens: int, forced: str = ""
    ) -> tuple[Phase | None, int | None, str]:
        """Return the next phase, its largest number of tokens (None: the engine's limit), and the reason.

        Args:
            tokens: of the shortest step of prompts there can be: the first request of `ranked`, or a chunk of it.
            forced: why a decode step comes next, if that is so; it counts among those in a row.
        """
        phase, budget, reason = (Phase.DECODE, None, forced) if forced else self._choose(view, ranked, tokens)
        self._num_put_off = self._num_put_off + 1 if phase is Phase.DECODE and not ranked.running else 0
        if ranked.running or phase is not Phase.DECODE:
            self._num_decodes = self._num_decodes + 1 if phase is Phase.DECODE else 0
        if phase is Phase.PREFILL:
            budget = self._in_time(view, ranked, tokens, budget)
        return phase, budget, reason

    def _in_time(self, view: StepView, ranked: Ranked, tokens: int, budget: int | None) -> int | None:
        """The budget, less where who is due first would be late in so long a step."""
        if ranked.first_due_s == math.inf:
            return budget
        context = max(ranked.waiting[0].num_computed, 0)
        most = max(self._times.tokens_within(ranked.first_due_s - view.now_s, context), tokens, 1)
        return most if most < (budget or view.token_budget) else budget

    def _choose(self, view: StepView, ranked: Ranked, tokens: int) -> tuple[Phase | None, int | None, str]:
        if not ranked.waiting:
            return None, None, "no request waits"
        if not ranked.running:
            can_wait = ranked.patience_s >= ranked.decode_s and self._num_put_off < self._max_decodes
            if view.num_in_flight and can_wait:
                return Phase.DECODE, None, "who decodes is on the device, and who waits can wait"
            return Phase.PREFILL, None, "no request decodes"
        context = max(ranked.waiting[0].num_computed, 0)
        affordable = self._times.tokens_within(min(ranked.stream_slack_s, default=3600.0), context)
        if affordable >= tokens:
            return Phase.PREFILL, max(min(view.token_budget, affordable), 1), "the streams have time for prompts"
        alone = tokens if tokens <= view.token_budget else None  # as little as can be: the streams are late already
        if self._num_decodes >= self._max_decodes:
            return Phase.PREFILL, alone, f"{self._max_decodes} decode steps in a row are enough"
        if ranked.patience_s >= ranked.decode_s:
            return Phase.DECODE, None, "a stream would be late, and who waits can wait"
        prefill_s = self._times.prefill_s(tokens, context)
        num_streams = sum(slack_s < prefill_s for slack_s in ranked.stream_slack_s)
        num_waiting = sum(0 <= slack_s < ranked.decode_s for slack_s in ranked.slack_s.values())
        if num_streams >= num_waiting:
            return Phase.DECODE, None, "more streams would be late than requests that wait"
        return Phase.PREFILL, alone, "requests that wait would be late"
