"""Prompts or streams next: whoever would be late otherwise."""

from sagellm.core.hooks import Phase, StepView
from sagellm.scheduler_ir.strategies.slack import Ranked
from sagellm.scheduler_ir.strategies.step_times import StepTimes

__all__ = ["PhaseChoice"]


class PhaseChoice:
    """Prompts go first, as many as the streams have time for. Where they have none, a decode step comes first if the most
    urgent request that waits can afford it, or if more streams would be late than requests that wait; after `max_decodes`
    such steps in a row prompts come anyhow, so that nobody waits for ever.
    """

    def __init__(self, times: StepTimes, max_decodes: int) -> None:
        self._times = times
        self._max_decodes = max_decodes
        self._num_decodes = 0  # in a row, while somebody waited

    def choose(self, view: StepView, ranked: Ranked, tokens: int) -> tuple[Phase | None, int | None, str]:
        """What to do next, with how many tokens at most (None: the engine's limit), and why.

        Args:
            tokens: of the shortest step of prompts there can be: the first request of `ranked`, or a chunk of it.
        """
        phase, budget, reason = self._choose(view, ranked, tokens)
        self._num_decodes = self._num_decodes + 1 if phase is Phase.DECODE else 0
        return phase, budget, reason

    def _choose(self, view: StepView, ranked: Ranked, tokens: int) -> tuple[Phase | None, int | None, str]:
        if not ranked.waiting:
            return None, None, "nobody waits"
        if not ranked.running:
            return Phase.PREFILL, None, "nobody decodes"
        affordable = self._times.tokens_within(min(ranked.stream_slack_s, default=3600.0))
        if affordable >= tokens:
            return Phase.PREFILL, max(min(view.token_budget, affordable), 1), "the streams have time for prompts"
        alone = tokens if tokens <= view.token_budget else None  # as little as can be: the streams are late already
        if self._num_decodes >= self._max_decodes:
            return Phase.PREFILL, alone, f"{self._max_decodes} decode steps in a row are enough"
        if ranked.slack_s[ranked.waiting[0].request_id] >= ranked.decode_s:
            return Phase.DECODE, None, "a stream would be late, and who waits can wait"
        prefill_s = self._times.prefill_s(tokens)
        num_streams = sum(slack_s < prefill_s for slack_s in ranked.stream_slack_s)
        num_waiting = sum(0 <= slack_s < ranked.decode_s for slack_s in ranked.slack_s.values())
        if num_streams >= num_waiting:
            return Phase.DECODE, None, "more streams would be late than requests that wait"
        return Phase.PREFILL, alone, "requests that wait would be late"
